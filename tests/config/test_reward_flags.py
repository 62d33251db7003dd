"""Flags of the reward sources: ranges and combinations that are refused."""

import pytest
from command_lines import read

from dschat_ppo.errors import UserError


@pytest.mark.parametrize("how", ["min", "mean", "last", "product"])
def test_the_aggregation_of_step_scores_needs_a_learned_reward(how):
    assert read("ppo", "--process_reward", how)["process_reward"] == how
    words = ["--use_reward_model", "False", "--reward_function", "exact_match"]
    with pytest.raises(UserError, match="--process_reward has no effect with --use_reward_model False"):
        read("ppo", "--process_reward", how, *words)
    with pytest.raises(UserError, match="use --normalize_rewards running"):
        read("ppo", "--process_reward", how, "--normalize_rewards", "model")
    assert read("ppo", "--process_reward", how, "--normalize_rewards", "running")


def test_an_unknown_aggregation_is_refused():
    with pytest.raises(UserError, match="--process_reward"):
        read("ppo", "--process_reward", "max")
