"""Flags of step 2: objectives, and the flags that each of them uses."""

import pytest
from command_lines import NEEDED, read

from dschat_ppo.config.cli import flatten, parse
from dschat_ppo.errors import UserError

DIRECT = ["dpo", "cdpo", "ipo", "robust_dpo", "hinge", "dpo_nll"]
SMOOTHED = ["cdpo", "robust_dpo"]


def objective_words(objective: str) -> list[str]:
    """Arguments that the objective needs."""
    return ["--objective", objective, *(["--label_smoothing", "0.1"] if objective in SMOOTHED else [])]


@pytest.mark.parametrize(
    ("words", "used_by"),
    [
        (["--no_use_margin"], ["reward"]),
        (["--center_rewards_coef", "0.01"], ["reward"]),
        (["--beta", "0.3"], DIRECT),
        (["--label_smoothing", "0.2"], SMOOTHED),
        (["--nll_coef", "1.0"], ["dpo_nll"]),
    ],
)
@pytest.mark.parametrize("objective", ["reward", *DIRECT])
def test_flags_of_other_objectives_are_refused(objective, words, used_by):
    name = words[0].replace("--no_", "--")
    given = [*objective_words(objective), *words]
    if objective in used_by:
        assert read("reward", *given)["objective"] == objective
        return
    with pytest.raises(UserError, match=f"{name} .*no effect with --objective {objective}.*{used_by[0]}"):
        read("reward", *given)


@pytest.mark.parametrize("objective", SMOOTHED)
@pytest.mark.parametrize("share", ["0", "0.5", "0.9"])
def test_label_smoothing_must_be_above_0_and_below_a_half(objective, share):
    with pytest.raises(UserError, match=f"--label_smoothing .*0.5.*{objective}"):
        read("reward", "--objective", objective, "--label_smoothing", share)


def test_the_dpo_step_differs_only_in_the_default_objective():
    values = flatten(parse("dpo", NEEDED["reward"]))
    assert values == {**read("reward"), "objective": "dpo"}
    words = "--beta 0.2 --num_train_epochs 1 --offload_reference_model --print_loss --deepspeed --zero_stage 3".split()
    assert flatten(parse("dpo", [*NEEDED["reward"], *words]))["beta"] == 0.2
    assert flatten(parse("dpo", [*NEEDED["reward"], "--objective", "ipo"]))["objective"] == "ipo"


def test_the_default_objective_trains_a_reward_model():
    values = read("reward")
    assert values["objective"] == "reward"
    assert values["use_margin"] is True
    assert values["center_rewards_coef"] == 0.0
    assert values["nll_coef"] == 0.2


@pytest.mark.parametrize(
    ("step", "name", "value"),
    [
        ("reward", "objective", "kto"),
        ("reward", "center_rewards_coef", "-0.1"),
        ("reward", "center_rewards_coef", "nan"),
        ("reward", "beta", "0"),
        ("reward", "beta", "-0.1"),
        ("reward", "beta", "inf"),
        ("reward", "label_smoothing", "-0.1"),
        ("reward", "nll_coef", "0"),
        ("reward", "nll_coef", "-1"),
    ],
)
def test_values_out_of_range_are_refused(step, name, value):
    with pytest.raises(UserError, match=f"--{name}"):
        read(step, f"--{name}", value)
