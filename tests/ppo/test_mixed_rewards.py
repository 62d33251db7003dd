"""The real loop of step 3 with routed reward functions, None and further numbers; every metric by hand."""

import json

import pytest
import torch
from datasets import Dataset
from plain_ppo import PROMPTS, STEPS, PlainRun, StopAt

from dschat_ppo.config.reward_flags import RewardSourceFlags
from dschat_ppo.errors import StopRequested
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
    names = {
        "reward/score_std",
        "reward/total_mean",
        "reward/kl_penalty",
        "reward/clipped_share",
    }  # and deviations: test_rollout_metrics.py
    for step, (numbers, line) in enumerate(zip(run.taken, run.lines, strict=True), 1):
        found = {name: value for name, value in line.items() if name.startswith("reward/") and name not in names}
        found = {name: value for name, value in found.items() if not name.endswith("_std")}
        assert found == pytest.approx(expected_metrics(numbers, step)), numbers
        assert line["optim/nonfinite_skipped"] == 0 and line["policy/updates_done_share"] == 1
    assert sum(line["reward/function_faults"] for line in run.lines) == 6, "1, 7 and the four others"


def test_a_resumed_run_with_unscored_responses_equals_the_whole_run(assets, tmp_path, functions):
    """The experience in the checkpoint holds NaN where a source does not score a response."""
    whole = RoutedRun(assets, tmp_path / "whole", functions)
    whole.run()
    before = RoutedRun(assets, tmp_path / "run", functions)
    with pytest.raises(StopRequested):
        before.run(StopAt(before, (1, 2)))
    assert before.ppo.state.experience.source_scores.isnan().any()
    before.save(tmp_path / "saved")
    after = RoutedRun(assets, tmp_path / "run", functions)
    after.load(tmp_path / "saved")
    after.run(StopAt(after), ((tmp_path / "run/metrics.jsonl").stat().st_size, 2))
    assert after.lines == whole.lines and len(whole.lines) == STEPS
    for name, weight in whole.weights.items():
        assert torch.equal(after.weights[name], weight), name
    for run in (whole, before, after):
        run.ppo.collection.requests.mixture.close()


def test_running_statistics_use_the_default_of_unscored_responses(assets, tmp_path, functions):
    run = RoutedRun(assets, tmp_path / "run", functions, "--normalize_rewards running")
    run.run()
    run.ppo.collection.requests.mixture.close()
    scores = [line["reward/score_mean"] * 4 for line in run.lines]
    running = run.ppo.shaping.running
    assert running.count == 12 and float(running.mean) == pytest.approx(sum(scores) / 12)


def test_a_run_whose_first_responses_nobody_scores_ends(assets, tmp_path, functions):
    run = RoutedRun(assets, tmp_path / "run", [functions[0].replace("math=", "maths=")])
    with pytest.raises(
        RewardFunctionError, match=r"^no reward source scored any of the first 4 answers \(data_source "
    ):
        run.run()
    run.ppo.collection.requests.mixture.close()
