"""What the sources of reward are asked about a rollout."""

import json
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from tiny_tokenizers import KINDS, tokenizer_of

from dschat_ppo.data.encode import encode_prompt
from dschat_ppo.ppo.score import RewardRequests
from dschat_ppo.rewards.function_reward import FunctionReward, parse_function
from dschat_ppo.rewards.reward_source import RewardMixture
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


def test_the_answers_to_a_prompt_stand_one_after_another_with_its_data_row():
    tokenizer = toy.make_tokenizer(["a lamp in the hall"])
    ids = torch.tensor([tokenizer.encode("hall")[:1]]).repeat(4, 1)
    rollout = Rollout(ids, torch.ones_like(ids).bool(), ids, torch.ones_like(ids).bool(), ids.float(), torch.zeros(4))
    rows = Dataset.from_dict({"row": [json.dumps({"answer": number}) for number in range(3)]})
    request = RewardRequests(RewardMixture([(Remembering(), 1.0)]), rows, tokenizer).request(rollout, [2, 0], 0)
    assert [row["answer"] for row in request.rows] == [2, 2, 0, 0]


def test_a_function_of_trl_sees_messages_token_ids_and_the_step(tmp_path):
    tokenizer = toy.make_tokenizer(["a lamp in the hall"])
    (tmp_path / "f.py").write_text(
        "def f(prompts, completions, completion_ids, trainer_state, log_metric, place):\n"
        "    log_metric('places', sum(place))\n"
        "    assert prompts == [[{'role': 'user', 'content': 'where?'}], '" + tokenizer.decode([5]) + "']\n"
        "    assert completions == [[{'role': 'assistant', 'content': 'hall'}], 'lamp']\n"
        "    return [1000 * trainer_state.global_step + sum(ids) for ids in completion_ids]\n"
    )
    rows = Dataset.from_dict({"row": [
        json.dumps({"place": 0.5, "_messages": [{"role": "user", "content": "where?"}]}), json.dumps({"place": 2})
    ]})  # fmt: skip
    hall, lamp = [*tokenizer.encode("hall"), tokenizer.eos_token_id], tokenizer.encode("lamp")
    assert len(lamp) <= len(hall)
    padded = [*lamp, *[9] * (len(hall) - len(lamp))]
    prompts, answers = torch.tensor([[5], [5]]), torch.tensor([hall, padded])
    mask = torch.arange(len(hall)) < torch.tensor([[len(hall)], [len(lamp)]])
    reasons = torch.tensor([FinishReason.EOS, FinishReason.LENGTH])
    rollout = Rollout(prompts, torch.ones_like(prompts).bool(), answers, mask, mask.float(), reasons)
    function = FunctionReward(parse_function(f"{tmp_path}/f.py:f"), 1, 10.0, -1.0)
    scorer = RewardRequests(RewardMixture([(function, 2.0)]), rows, tokenizer)
    scores = scorer.mixture(scorer.request(rollout, [0, 1], 3), rollout)
    function.close()
    assert function.counts.cause is None
    assert scores.total.tolist() == [2 * (3000 + sum(hall)), 2 * (3000 + sum(lamp))]
    assert scores.numbers["f/places"].tolist() == [2.5, 2.5]


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
