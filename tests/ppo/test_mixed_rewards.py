"""The real loop of step 3 with routed reward functions, None and further numbers; every metric by hand."""

import json

import pytest
from datasets import Dataset
from plain_ppo import PROMPTS, PlainRun

from dschat_ppo.config.reward_flags import RewardSourceFlags
from dschat_ppo.rewards.build_rewards import build_sources
from dschat_ppo.rewards.reward_source import RewardFunctionError

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
