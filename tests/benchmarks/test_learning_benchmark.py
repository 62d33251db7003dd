"""The flags of the benchmark of learning."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import learning  # noqa: E402


@pytest.mark.parametrize("task", ["addition", "preference"])
def test_ranks_divide_the_batches_of_a_step(task, tmp_path):
    totals = set()
    for ranks in (1, 2, 4):
        words = learning.flags_of(task, "grpo", 1, tmp_path, ranks)
        flags = dict(zip(words[::2], words[1::2], strict=True))
        names = ("--per_device_generation_batch_size", "--per_device_training_batch_size")
        totals.add(tuple(int(flags[name]) * ranks for name in names))
    assert len(totals) == 1


def test_budgets_are_alike_and_only_critics_cost_more(tmp_path):
    for task in ("addition", "preference"):
        budgets = set()
        for estimator in learning.ESTIMATORS:
            words = learning.flags_of(task, estimator, 3, tmp_path, 2)
            flags = dict(zip(words[::2], words[1::2], strict=True))
            assert flags["--advantage_estimator"] == estimator and flags["--seed"] == "3"
            assert ("--critic_learning_rate" in flags) == (estimator == "gae")
            assert ("--critic_model_name_or_path" in flags) == (estimator == "gae" or task == "preference")
            budgets.add(tuple(sorted((k, v) for k, v in flags.items() if "batch" in k or "sampl" in k or "step" in k)))
        assert len(budgets) == 1
