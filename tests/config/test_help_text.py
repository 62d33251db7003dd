"""`--help`: the usual flags, all flags, and those with a word in their name."""

import dataclasses
import re

import pytest

from dschat_ppo.config.cli import STEPS
from dschat_ppo.config.flag_parser import FlagParser, flag_parser
from dschat_ppo.config.help_text import TITLES, help_text
from dschat_ppo.config.step_config import groups_of
from dschat_ppo.errors import UserError


@pytest.fixture(autouse=True)
def columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")


def all_flags(step: str) -> FlagParser:
    parser = flag_parser(groups_of(STEPS[step]), add_help=False)
    parser.set_defaults(**STEPS[step].own_defaults)
    return parser


def test_each_flag_is_in_the_whole_help_exactly_once():
    for step in STEPS:
        printed = help_text(step, all_flags(step), "all")
        groups = groups_of(STEPS[step])
        names = [field.name for group in groups for field in dataclasses.fields(group)]
        assert re.findall(r"^  --(\w+)", printed, re.MULTILINE) == names
        assert printed.startswith(f"All {len(names)} flags of training/step")


def test_the_whole_help_shows_kinds_defaults_aliases_and_how_to_turn_off():
    found = {
        line.split()[0]: " ".join(line.split()[1:])
        for line in re.sub(r"\n {6,}", " ", help_text("ppo", all_flags("ppo"), "all")).splitlines()
        if line.startswith("  --")
    }
    for name, kind, end in (
        ("seed", "N", "(default: 1234)"),
        ("actor_learning_rate", "X", "(default: 9.65e-06)"),
        ("data_path", "TEXT ...", "(required)"),
        ("prompt_column", "TEXT", "(also: --input_key)"),
        ("rollout_engine", "{auto,padded}", "(default: auto)"),
        ("align_overflow", "BOOL", "(default: False)"),
        ("whiten_advantages", "BOOL", "(default: True; off: --no_whiten_advantages)"),
    ):
        assert found[f"--{name}"].startswith(f"{kind} ") and found[f"--{name}"].endswith(end), (
            found[f"--{name}"]
        )


@pytest.mark.parametrize("step", STEPS)
def test_the_short_help_fits_a_screen_and_has_twenty_flags_with_the_defaults_of_the_step(
    step, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "80")
    printed = help_text(step, all_flags(step), "").splitlines()
    assert max(map(len, printed)) <= 80 and len(printed) <= 45  # a screen
    assert f"on a CPU:  deepspeed --num_accelerators 2 {TITLES[step][1]} ..." in printed
    lines = [line for line in printed if line.startswith("  --")]
    names = [line.split()[0].removeprefix("--") for line in lines]
    assert len(lines) == len(set(names)) == 20
    fields = {
        field.name: field for group in groups_of(STEPS[step]) for field in dataclasses.fields(group)
    }
    for line, name in zip(lines, names, strict=True):
        field = fields[name]
        own = (
            field.default_factory()
            if field.default_factory is not dataclasses.MISSING
            else field.default
        )
        default = STEPS[step].own_defaults.get(name, own)
        needed = default is dataclasses.MISSING or "(required)" in field.metadata["help"]
        [shown] = re.findall(r" \[([^]]*)\]$", line) or [""]
        assert (shown == "required") is needed, line
        if isinstance(default, float) and not needed:
            assert float(shown) == default, line
    printed = help_text(step, all_flags(step), "all")
    required = re.findall(r"^  --(\w+)[^-]*?\(required\)", printed, re.MULTILINE)
    assert required and set(required) <= set(names)


def test_a_word_selects_the_flags_whose_name_contains_it():
    def names(topic):
        return re.findall(r"^  --(\w+)", help_text("ppo", all_flags("ppo"), topic), re.MULTILINE)

    assert names("--kl-coef") == ["kl_coef"]
    assert names("KL_LOSS") == ["kl_loss_coef", "kl_loss_estimator"]
    assert names("temperature") == ["temperature"]
    assert names("eval_data_path") == names("--eval_data_path") == ["eval_data_path"]
    assert names("data_path") == ["data_path"], "a whole name is one flag"
    assert names("input_key") == ["prompt_column"], "another name of the flag"
    assert names("overflow") == ["align_overflow"]
    for topic, hint in (
        ("kl_cof", "in its name; did you mean --help kl_coef"),
        ("zzz", "name (all flags: --help all)"),
    ):
        with pytest.raises(UserError, match=re.escape(hint)):
            names(topic)
