"""`--health` is checked before anything is loaded, and may change when a run resumes."""

from dataclasses import fields

import pytest
from command_lines import NEEDED, read

from dschat_ppo.checkpoint.config_diff import HARMLESS
from dschat_ppo.config.cli import parse
from dschat_ppo.config.health_flags import FitHealthFlags, PPOHealthFlags, thresholds
from dschat_ppo.errors import UserError


@pytest.mark.parametrize(("step", "value", "named"), [
    ("ppo", "window=1", "--health window=1: window takes a whole number of 2 or more$"),
    ("sft", "window=off", "window takes a whole number of 2 or more$"),
    ("ppo", "length_creep=1", "length_creep takes a factor above 1, or off"),
    ("ppo", "entropy_collapse=0.3", "takes a factor above 1"), ("reward", "loss_grows=0.9", "takes a factor above 1"),
    ("ppo", "gradient_explodes=inf", "takes a factor above 1"),
    ("ppo", "clip_fraction_high=30", "takes a share from 0 up to, but not, 1"),
    ("ppo", "ranks_uneven=-0.1", "takes a share"), ("ppo", "ranks_uneven=nan", "takes a share"),
    ("ppo", "kl_spike=0", "takes NUMBER above 0, or off"), ("ppo", "kl_spike", "takes NUMBER above 0, or off"),
    ("ppo", "kl_negative=0.02", "takes -NUMBER"), ("ppo", "logprob_diff_high=-1", "takes NUMBER above 0"),
    ("sft", "overfitting=1.5", "takes a whole number, or off"), ("sft", "overfitting=0", "takes a whole number"),
    ("ppo", "critic_lags=2", "critic_lags takes off$"),
    ("ppo", "kl_spikes=1", "there is no rule 'kl_spikes'; did you mean kl_spike[?]$"),
    ("sft", "kl_spike=1", "there is no rule 'kl_spike'; there are: window, loss_grows, overfitting"),
])  # fmt: skip
def test_a_threshold_without_meaning_is_refused(step, value, named):
    with pytest.raises(UserError, match=named):
        parse(step, [*NEEDED[step], "--health", value])


def test_values_come_in_words_or_between_commas():
    read("ppo", "--health", "kl_spike=0.6,window=20", "critic_lags=off", "kl_negative=-0.1")
    window, limits, off = thresholds(PPOHealthFlags(health=["kl_spike=0.6", "window=20", "critic_lags=off"]))
    assert (window, limits["kl_spike"], off) == (20, 0.6, {"critic_lags"})
    assert thresholds(PPOHealthFlags(health=["kl_spike=off", "kl_spike=0.7"]))[2] == set()  # the last word counts


def test_a_step_of_ppo_and_an_optimizer_step_have_windows_of_their_own():
    assert (thresholds(PPOHealthFlags())[0], thresholds(FitHealthFlags())[0]) == (10, 50)
    assert read("ppo")["stop_on_health"] == read("sft")["stop_on_health"] == "off"


def test_they_may_change_when_a_run_resumes():
    assert {field.name for group in (PPOHealthFlags, FitHealthFlags) for field in fields(group)} <= HARMLESS
