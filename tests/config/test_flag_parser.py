"""Flags from the fields of dataclasses: names, types, defaults and help."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import pytest
from transformers import HfArgumentParser

from dschat_ppo.config.flag_parser import flag_parser
from dschat_ppo.config.schema import flag, flag_list
from dschat_ppo.errors import UserError


@dataclass
class Flags:
    """One field of each kind."""

    _argument_group_name: ClassVar[str] = "all kinds"

    model_path: str = flag("needed")
    size: int = flag("a count", 3)
    rate: float | None = flag("a rate", None, "lr")
    level: Literal["low", 2] = flag("a level", 2)
    quick: bool = flag("a switch", False)
    with_text: bool = flag("a switch that is on", True)
    maybe: bool | None = flag("a switch that may be open", None)
    names: list[str] = flag_list("names", lambda: ["a"])
    counts: list[int] = flag_list("counts", list)


GIVEN = [
    [],
    ["--size", "5", "--rate=0.5", "--level", "low"],
    ["--lr", "1e-3", "--level=2"],
    ["--quick", "--maybe", "--no_with_text"],
    ["--quick", "no", "--maybe", "False", "--with-text", "F"],
    ["--quick", "YES", "--no-with-text", "--names", "b", "c", "--counts", "1", "2"],
    ["--size", "1", "--size", "2"],
]


def read(*words: str) -> dict:
    return vars(flag_parser([Flags]).parse_args(["--model-path", "m", *words]))


@pytest.mark.parametrize("words", GIVEN, ids=" ".join)
def test_values_are_those_of_the_parser_of_transformers(words):
    if "--maybe" in words and words[words.index("--maybe") + 1].startswith("--"):
        assert read(*words)["maybe"] is True  # there the switch needs a value
        words = [word for word in words if word != "--maybe"]
    theirs = vars(HfArgumentParser(Flags).parse_args(["--model_path", "m", *words]))
    assert read(*words) == theirs
    assert all(type(value) is type(theirs[name]) for name, value in read(*words).items())


def test_a_list_may_be_empty():
    assert read("--names")["names"] == []


def test_a_required_flag_that_is_not_given_has_no_value():
    assert "model_path" not in flag_parser([Flags]).parse_args([])


@pytest.mark.parametrize(("words", "message"), [
    (["--size", "x"], "argument --size: invalid int value: 'x' (all flags: --help)"),
    (["--quick", "perhaps"], "argument --quick: 'perhaps' is neither true nor false (all flags: --help)"),
    (["--counts", "1", "x"], "argument --counts: invalid int value: 'x' (all flags: --help)"),
    (["--rate"], "argument --rate/--lr: expected one argument (all flags: --help)"),
    (["--siz", "4"], "unrecognized arguments: --siz 4; did you mean --size? (all flags: --help)"),
    (["--with-txt=1"], "unrecognized arguments: --with-txt=1; did you mean --with_text? (all flags: --help)"),
    (["--zz"], "unrecognized arguments: --zz (all flags: --help)"),
])  # fmt: skip
def test_a_wrong_value_is_an_error_of_one_line(words, message):
    with pytest.raises(UserError) as problem:
        read(*words)
    assert str(problem.value) == message


@pytest.mark.parametrize(("given", "meant"), [
    ("lo", "; did you mean low?"), ("LOW", "; did you mean low?"), ("high", ""), ("3", ""),
])  # fmt: skip
def test_a_value_that_is_no_choice_is_refused_and_the_nearest_is_suggested(given, meant):
    with pytest.raises(UserError) as problem:
        read("--level", given)
    message = f"argument --level: invalid choice: '{given}'{meant} (choose from low, 2) (all flags: --help)"
    assert str(problem.value) == message


def test_help_shows_types_and_defaults_but_no_empty_ones():
    lines = flag_parser([Flags], usage="", add_help=False).format_help().splitlines()
    shown = [" ".join(line.split()) for line in lines]
    shown = [line.replace("--rate X, --lr X", "--rate, --lr X") for line in shown]  # before Python 3.13
    assert "all kinds:" in shown
    assert any(line.endswith("needed (required)") for line in shown)
    assert "--size N a count (default: 3)" in shown
    assert "--rate, --lr X a rate" in shown
    assert "--level {low,2} a level (default: 2)" in shown
    assert "--quick [BOOL] a switch (default: False)" in shown
    assert "turn --with_text off" in shown
    assert "--names [TEXT ...] names (default: ['a'])" in shown
    assert "--counts [N ...] counts" in shown
