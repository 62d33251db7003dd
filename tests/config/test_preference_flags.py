"""Flags of step 2: objectives, and the flags that each of them uses."""

import pytest
from command_lines import NEEDED, read

from dschat_ppo.config.cli import flatten, notes, parse
from dschat_ppo.errors import UserError

DIRECT = ["dpo", "cdpo", "ipo", "robust_dpo", "hinge", "dpo_nll", "kto", "orpo", "simpo", "cpo"]
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
        (["--nll_coef", "1.0"], ["dpo_nll", "cpo", "simpo"]),
        (["--simpo_gamma", "0.5"], ["simpo"]),
        (["--kto_desirable_weight", "2"], ["kto"]),
        (["--kto_undesirable_weight", "2"], ["kto"]),
        (["--step_separator", "|"], ["process"]),
    ],
)
@pytest.mark.parametrize("objective", ["reward", "process", *DIRECT])
def test_flags_of_other_objectives_are_refused(objective, words, used_by):
    name = words[0].replace("--no_", "--")
    given = [*objective_words(objective), *words]
    if objective in used_by:
        assert read("reward", *given)["objective"] == objective
        return
    with pytest.raises(UserError, match=f"{name} .*no effect with --objective {objective}.*{used_by[0]}"):
        read("reward", *given)


def test_former_defaults_in_saved_configurations_are_accepted_with_a_note(tmp_path):
    """Before other objectives had their own ones, `config.yaml` named 0.1 and 0.2 for every objective."""
    (tmp_path / "config.yaml").write_text("beta: 0.1\nnll_coef: 0.2\n")
    for objective, idle in (("reward", ["beta", "nll_coef"]), ("dpo", ["nll_coef"]), ("dpo_nll", [])):
        words = ["--config", str(tmp_path / "config.yaml"), "--objective", objective]
        config = parse("reward", [*NEEDED["reward"], *words])
        reason = f"has no effect: --objective {objective} does not use it"
        assert notes("reward", config) == [f"--{name} {reason}" for name in idle]
        assert config.reward.nll_weight == (0.2 if objective == "dpo_nll" else config.reward.nll_coef)
    assert notes("reward", parse("reward", NEEDED["reward"])) == []


def test_the_dpo_step_differs_only_in_the_default_objective():
    values = flatten(parse("dpo", NEEDED["reward"]))
    assert values == {**read("reward"), "objective": "dpo"}
    words = "--beta 0.2 --num_train_epochs 1 --offload_reference_model --print_loss --deepspeed --zero_stage 3".split()
    assert flatten(parse("dpo", [*NEEDED["reward"], *words]))["beta"] == 0.2
    assert flatten(parse("dpo", [*NEEDED["reward"], "--objective", "ipo"]))["objective"] == "ipo"


@pytest.mark.parametrize(
    ("objective", "beta", "nll"),
    [("dpo", 0.1, 0.0), ("dpo_nll", 0.1, 0.2), ("kto", 0.1, 0.0), ("orpo", 0.1, 0.0), ("simpo", 2.0, 0.0),
     ("cpo", 0.1, 1.0)],
)  # fmt: skip
def test_beta_and_the_weight_of_the_nll_term_have_defaults_by_objective(objective, beta, nll):
    flags = parse("reward", [*NEEDED["reward"], "--objective", objective]).reward
    assert (flags.strength, flags.nll_weight) == (beta, nll)
    given = parse("reward", [*NEEDED["reward"], "--objective", objective, "--beta", "0.7"]).reward
    assert given.strength == 0.7


@pytest.mark.parametrize(("given", "text"), [("\\n", "\n"), ("\\n\\n", "\n\n"), ("\n", "\n"), ("ки\\t", "ки\t")])
def test_backslashes_in_the_step_separator_stand_for_line_breaks_and_tabs(given, text):
    flags = parse("reward", [*NEEDED["reward"], "--objective", "process", "--step_separator", given]).reward
    assert flags.separator == text


@pytest.mark.parametrize("objective", ["reward", "process", *DIRECT])
def test_only_objectives_without_a_reference_take_a_stream(objective):
    words = [*objective_words(objective), "--streaming", "--streaming_rows", "100"]
    if objective in ("reward", "process", "orpo", "simpo", "cpo"):
        assert read("reward", *words)["objective"] == objective
        return
    with pytest.raises(UserError, match=f"--objective {objective} computes log-probs of the reference"):
        read("reward", *words)
