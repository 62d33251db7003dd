"""Flags of the health warnings are checked before anything is loaded, and may change when a run resumes."""

from dataclasses import fields

import pytest
from command_lines import NEEDED, read

from dschat_ppo.checkpoint.config_diff import HARMLESS
from dschat_ppo.config.cli import parse
from dschat_ppo.config.health_flags import FitHealthFlags, PPOHealthFlags
from dschat_ppo.errors import UserError


@pytest.mark.parametrize(("step", "words", "named"), [
    ("ppo", ["--health_window", "1"], "--health_window must be at least 2 steps, got 1"),
    ("sft", ["--health_window", "0"], "--health_window must be at least 2 steps, got 0"),
    ("ppo", ["--health_length_growth", "1"], "--health_length_growth is a factor .* above 1, got 1"),
    ("ppo", ["--health_entropy_factor", "0.3"], "--health_entropy_factor is a factor .* above 1, got 0.3"),
    ("reward", ["--health_loss_growth", "0.9"], "--health_loss_growth is a factor"),
    ("ppo", ["--health_grad_growth", "1"], "--health_grad_growth is a factor"),
    ("ppo", ["--health_clip_fraction", "30"], "--health_clip_fraction must be at least 0 and below 1, got 30"),
    ("ppo", ["--health_rank_wait", "-0.1"], "--health_rank_wait must be at least 0"),
    ("ppo", ["--health_kl_spike", "0"], "--health_kl_spike must be finite and above 0"),
    ("ppo", ["--health_logprob_diff", "-1"], "--health_logprob_diff must be finite and above 0"),
    ("sft", ["--health_overfit_evals", "0"], "--health_overfit_evals must be finite and above 0"),
    ("sft", ["--stop_on_health", "always"], "--stop_on_health"),
])  # fmt: skip
def test_a_threshold_without_meaning_is_refused(step, words, named):
    with pytest.raises(UserError, match=named):
        parse(step, [*NEEDED[step], *words])


def test_a_step_of_ppo_and_an_optimizer_step_have_windows_of_their_own():
    assert (read("ppo")["health_window"], read("sft")["health_window"], read("reward")["health_window"]) == (10, 50, 50)
    assert read("ppo")["stop_on_health"] == read("sft")["stop_on_health"] == "off"


def test_they_may_change_when_a_run_resumes():
    names = {field.name for group in (PPOHealthFlags, FitHealthFlags) for field in fields(group)}
    assert names <= HARMLESS
