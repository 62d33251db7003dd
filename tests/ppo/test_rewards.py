"""What the sources of reward are asked about a rollout, and the metrics of routed functions in the real loop."""

import json
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from plain_ppo import PROMPTS, PlainRun
from tiny_tokenizers import KINDS, tokenizer_of

from dschat_ppo.config.reward_flags import RewardSourceFlags
from dschat_ppo.data.encode import encode_prompt
from dschat_ppo.ppo.score import RewardRequests
from dschat_ppo.rewards.build_rewards import build_sources
from dschat_ppo.rewards.reward_source import RewardFunctionError, RewardMixture
from dschat_ppo.tools import toy
from dschat_ppo.types import FinishReason, Rollout


class Remembering:
    name = "remembering"

    def __call__(self, request, rollout):
        self.request = request
        return torch.zeros(len(request))


def test_prompts_lose_the_actors_bos_and_keep_other_marks():
    tokenizer = toy.make_tokenizer(["a lamp in the hall"])
    tokenizer.add_special_tokens({"bos_token": "<s>", "additional_special_tokens": ["<user>"]})
    start, user = tokenizer.convert_tokens_to_ids(["<s>", "<user>"])
    prompts = [[start, user, *tokenizer.encode("a lamp")], [user, *tokenizer.encode("a lamp"), start]]
    longest = max(map(len, prompts))
    ids = torch.tensor([[7] * (longest - len(row)) + row for row in prompts])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in prompts]).bool()
    answers = torch.tensor([tokenizer.encode("hall") + [tokenizer.eos_token_id]]).repeat(2, 1)
    rows = Dataset.from_dict({"row": [json.dumps({"answer": number}) for number in range(3)]})
    source = Remembering()
    rollout = Rollout(ids, mask, answers, torch.ones_like(answers).bool(), torch.zeros(answers.shape), torch.zeros(2))
    scorer = RewardRequests(RewardMixture([(source, 1.0)]), rows, tokenizer)
    scorer.mixture(scorer.request(rollout, [2, 0], 0), rollout)
    assert source.request.prompts == ["<user>a lamp", "<user>a lamp<s>"]
    assert source.request.responses == ["hall", "hall"]
    assert source.request.rows == [{"answer": 2}, {"answer": 0}] and source.request.step == 0
    assert [row["answer"] for row in scorer.request(rollout, [1], 0).rows] == [1, 1], "two answers to one prompt"


def test_the_token_that_ended_a_response_is_no_text_of_it():
    """A chat template may end answers with a token that its tokenizer does not call special."""
    tokenizer = toy.make_tokenizer(["a lamp in the hall"])
    tokenizer.add_tokens(["<|im_end|>"])
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    hall = tokenizer.encode("hall")
    answers = torch.tensor([[*hall, end], [*hall, tokenizer.eos_token_id], [*hall, end], [*hall, *hall[:1]]])
    reasons = torch.tensor([FinishReason.EOS, FinishReason.EOS, FinishReason.STOP, FinishReason.LENGTH])
    rollout = Rollout(
        answers, torch.ones_like(answers).bool(), answers, torch.ones_like(answers).bool(), answers.float(), reasons
    )
    rows = Dataset.from_dict({"row": ["{}"]})
    request = RewardRequests(RewardMixture([(Remembering(), 1.0)]), rows, tokenizer).request(rollout, [0], 0)
    assert request.responses == ["hall", "hall", "hall<|im_end|>", "hall" + tokenizer.decode(hall[:1])]


def test_faults_of_every_row_are_an_error_at_the_first_count_of_each_scorer():
    """Training and evaluation each have a scorer, and a resumed run has new ones."""
    refused = []
    mixture = SimpleNamespace(count_failed_rows=lambda refuse_all: refused.append(refuse_all) or 3)
    for _ in range(2):
        scorer = RewardRequests(mixture, None, None)
        assert [scorer.count_failed_rows() for _ in range(3)] == [3, 3, 3]
    assert refused == [True, False, False] * 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prompt", ["Where is the lamp?", "A", "It is in the hall. It"])
def test_prompt_and_response_together_are_the_sampled_text(kind, prompt):
    """Tokenizers of pieces drop the space with which a text begins."""
    tokenizer = tokenizer_of(kind)
    whole = encode_prompt(tokenizer, f"{prompt} is in the hall")
    count = len(encode_prompt(tokenizer, prompt))
    ids, answer = torch.tensor([[9, *whole[:count]]]), torch.tensor([[*whole[count:], tokenizer.eos_token_id]])
    mask, ended = torch.tensor([[False] + [True] * count]), torch.tensor([FinishReason.EOS])
    rollout = Rollout(ids, mask, answer, torch.ones_like(answer).bool(), answer.float(), ended)
    rows = Dataset.from_dict({"row": ["{}"]})
    request = RewardRequests(RewardMixture([(Remembering(), 1.0)]), rows, tokenizer).request(rollout, [0], 0)
    assert (request.prompts, request.responses) == ([prompt], [" is in the hall"])


# The real loop with routed reward functions, None and further numbers


FUNCTIONS = '''
def half(response, number):
    return {"score": number / 2, "even": number % 2 == 0, "text": response}


def parity(completions, number, trainer_state, log_metric, **kwargs):
    """In the form of TRL; leaves odd numbers to others."""
    log_metric("step", trainer_state.global_step)
    return [None if value % 2 else 1.0 for value in number]
'''
DEFAULT = -5.0
SOURCES = ("math", "chat", "other")


class RoutedRun(PlainRun):
    """Prompt n has the number n and the data source `SOURCES[n % 3]`; `taken`: the prompts of each PPO step."""

    def __init__(self, assets, folder, functions, words=""):
        super().__init__(assets, folder, words)
        scorer, collection = self.ppo.collection.requests, self.ppo.collection
        rows = [json.dumps({"number": n, "data_source": SOURCES[n % 3]}) for n in range(PROMPTS)]
        scorer.prompts = Dataset.from_dict({"row": rows})
        flags = RewardSourceFlags(use_reward_model=False, reward_function=functions, reward_default=DEFAULT)
        scorer.mixture = build_sources(flags, None)
        self.taken, take = [], collection.next_prompts

        def noted():
            prompts = take()
            self.taken.append(prompts.rows)
            return prompts

        collection.next_prompts = noted


@pytest.fixture
def functions(tmp_path):
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    return [f"math={tmp_path}/mine.py:half:2", f"math,chat={tmp_path}/mine.py:parity:0.5"]


def expected_metrics(numbers: list[int], step: int) -> dict[str, float]:
    """From the numbers of the prompts of a step; a response has the score of its prompt."""
    math = [n for n in numbers if n % 3 == 0]
    both = [n for n in numbers if n % 3 != 2]
    even = [n for n in both if n % 2 == 0]
    scores, unscored = [], 0
    for n in numbers:
        if n in math:
            scores.append(2 * (n / 2) + (0.5 if n in even else 0))
        elif n in even:
            scores.append(0.5)
        else:
            scores.append(DEFAULT)
            unscored += 1
    found = {"score_mean": sum(scores) / len(scores), "score_min": min(scores), "score_max": max(scores)}
    found |= {"function_faults": unscored, "half_share": len(math) / len(numbers)}
    found["parity_share"] = len(even) / len(numbers)
    if math:
        found |= {"half_mean": sum(math) / 2 / len(math), "half/even": len(set(math) & set(even)) / len(math)}
    if even:
        found["parity_mean"] = 1.0
    if both:
        found["parity/step"] = step - 1
    return {f"reward/{name}": value for name, value in found.items() if value != 1 or not name.endswith("share")}


def test_the_metrics_of_routed_functions_by_hand(assets, tmp_path, functions):
    run = RoutedRun(assets, tmp_path / "run", functions)
    run.run()
    run.ppo.collection.requests.mixture.close()
    assert sorted(n for numbers in run.taken for n in numbers) == list(range(PROMPTS))
    names = {f"reward/{name}" for name in ("score_std", "total_mean", "kl_penalty", "clipped_share")}
    for step, (numbers, line) in enumerate(zip(run.taken, run.lines, strict=True), 1):
        found = {name: value for name, value in line.items() if name.startswith("reward/") and name not in names}
        found = {name: value for name, value in found.items() if not name.endswith("_std")}  # test_rollout_metrics.py
        assert found == pytest.approx(expected_metrics(numbers, step)), numbers
        assert line["optim/nonfinite_skipped"] == 0 and line["policy/updates_done_share"] == 1
    assert sum(line["reward/function_faults"] for line in run.lines) == 6, "1, 7 and the four others"


def test_a_run_whose_first_responses_nobody_scores_ends(assets, tmp_path, functions):
    run = RoutedRun(assets, tmp_path / "run", [functions[0].replace("math=", "maths=")])
    with pytest.raises(
        RewardFunctionError, match=r"^no reward source scored any of the first 4 answers \(data_source "
    ):
        run.run()
    run.ppo.collection.requests.mixture.close()
