"""The flags of the benchmark of learning."""

import sys
from pathlib import Path

import pytest

from dschat_ppo.config.cli import parse

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import learning  # noqa: E402


@pytest.mark.parametrize("task", ["addition", "preference"])
def test_budgets_are_alike_and_only_critics_cost_more(task, tmp_path):
    budgets = set()
    for estimator in learning.ESTIMATORS:
        flags = parse("ppo", [*learning.flags_of(task, estimator, 3, tmp_path), "--output_dir", "out"])
        assert (flags.algorithm.advantage_estimator, flags.run.seed) == (estimator, 3)
        assert flags.ppo.actor_model_name_or_path == f"{tmp_path}/sft"
        critic = {"gae": "sft" if task == "addition" else "reward"}.get(estimator)
        if critic:
            assert flags.ppo.critic_model_name_or_path == f"{tmp_path}/{critic}"
        budgets.add((
            flags.ppo.per_device_generation_batch_size, flags.ppo.per_device_training_batch_size,
            flags.ppo.n_samples_per_prompt, flags.ppo.ppo_epochs, flags.ppo.max_answer_seq_len,
        ))  # fmt: skip
    assert len(budgets) == 1
