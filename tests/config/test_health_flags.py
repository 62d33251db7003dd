"""`--health` is checked before anything is loaded, and may change when a run resumes."""

import pytest
from command_lines import read

from dschat_ppo.config.health_flags import FitHealthFlags, PPOHealthFlags, thresholds
from dschat_ppo.errors import UserError


def test_values_come_in_words_or_between_commas():
    read("ppo", "--health", "kl_spike=0.6,window=20", "critic_lags=off", "kl_negative=-0.1")
    window, limits, off = thresholds(PPOHealthFlags(health=["kl_spike=0.6", "window=20", "critic_lags=off"]))
    assert (window, limits["kl_spike"], off) == (20, 0.6, {"critic_lags"})
    assert thresholds(PPOHealthFlags(health=["kl_spike=off", "kl_spike=0.7"]))[2] == set()  # the last word counts


@pytest.mark.parametrize("words", [
    "entropy_collapse=0", "entropy_collapse=1 entropy_collapse=0", "kl_negative=0.1", "kl_negative=-1 kl_negative=0.1",
    "window=1", "window=2.5",
])  # fmt: skip
def test_a_value_is_compared_with_the_default_and_not_with_the_word_before(words):
    with pytest.raises(UserError, match=r"^--health "):
        PPOHealthFlags(health=words.split())


def test_an_overfitting_run_is_counted_in_whole_evaluations():
    assert thresholds(FitHealthFlags(health=["overfitting=2"]))[1]["overfitting"] == 2
    with pytest.raises(UserError, match="overfitting takes whole numbers of 1 or above"):
        FitHealthFlags(health=["overfitting=1.5"])


def test_a_step_of_ppo_and_an_optimizer_step_have_windows_of_their_own():
    assert (thresholds(PPOHealthFlags())[0], thresholds(FitHealthFlags())[0]) == (10, 50)
    assert read("ppo")["stop_on_health"] == read("sft")["stop_on_health"] == "off"
