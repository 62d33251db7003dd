"""Flags from the fields of dataclasses: names, types, defaults and help."""

from dataclasses import dataclass
from typing import Literal

import pytest
from transformers import HfArgumentParser

from dschat_ppo.config.cli import flatten, parse
from dschat_ppo.config.flag_parser import FlagParser, flag_parser
from dschat_ppo.config.schema import REQUIRED, flag
from dschat_ppo.errors import UserError


@dataclass
class Flags:
    """All kinds."""

    model_path: str = flag(REQUIRED, "needed")
    size: int = flag(3, "a count")
    rate: float | None = flag(None, "a rate", "lr")
    level: Literal["low", 2] = flag(2, "a level")
    quick: bool = flag(False, "a switch")
    with_text: bool = flag(True, "a switch that is on")
    maybe: bool | None = flag(None, "a switch that may be open")
    names: list[str] = flag(["a"], "names")
    counts: list[int] = flag([], "counts")


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


@pytest.mark.parametrize(("step", "words", "found"), [
    ("ppo", "--actor_lora_module_name q_proj v_proj", "q_proj,v_proj"), ("sft", "--lora_module_name q,v", "q,v"),
    ("sft", "--lora_module_name q, v", "q,v"), ("sft", "--data_split 1 0 0", "1,0,0"),
    ("sft", "--data_path a.jsonl,b.jsonl:0.5", ["a.jsonl", "b.jsonl:0.5"]), ("sft", "--data_path a b", ["a", "b"]),
    ("sft", "--data_path with,comma.jsonl@5 b", ["with,comma.jsonl@5", "b"]),
    ("sft", "--eval_data_path a,b", ["a", "b"]), ("ppo", "--eval_data_path a,b", ["a", "b"]),
    ("sft", "--sft_only_data_path a,b", ["a", "b"]), ("sft", "--report_to tensorboard,wandb", ["tensorboard", "wandb"]),
    ("ppo", "--stop_token_ids 3,4 5", [3, 4, 5]), ("ppo", "--reward_model_sources a,b", ["a", "b"]),
    ("ppo", "--remote_reward_sources a,b --remote_reward_url u", ["a", "b"]),
    ("ppo", "--remote_reward_url http://a/x http://b/x", "http://a/x,http://b/x"),
    ("ppo", "--stop_strings a,b c", ["a,b", "c"]),  # text
    ("ppo", "--reward_function math,code=exact_match length", ["math,code=exact_match", "length"]),  # a route
])  # fmt: skip
def test_values_of_a_list_are_between_spaces_or_commas(tmp_path, monkeypatch, step, words, found):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "with,comma.jsonl").touch()
    needed = {"sft": "--model_name_or_path m", "ppo": "--actor_model_name_or_path a --critic_model_name_or_path c"}
    first, *values = words.split()
    config = flatten(parse(step, [*needed[step].split(), "--data_path", "d", "--output_dir", "o", first, *values]))
    assert config[first.removeprefix("--")] == found


def test_a_wrong_value_between_commas_is_named():
    with pytest.raises(UserError, match="--report_to wand: expected one of .*; did you mean wandb"):
        parse("sft", ["--report_to", "tensorboard,wand"])


def test_a_required_flag_that_is_not_given_has_no_value():
    assert "model_path" not in flag_parser([Flags]).parse_args([])


@pytest.mark.parametrize(("words", "message"), [
    (["--size", "x"], "--size x: expected a whole number: a count (see --help)"),
    (["--size", "it's"], "--size it's: expected a whole number: a count (see --help)"),
    (["--size", "1.5"], "--size 1.5: expected a whole number: a count (see --help)"),
    (["--size", ""], "--size : expected a whole number: a count (see --help)"),
    (["--rate", "abc"], "--rate abc: expected a number: a rate (see --help)"),
    (["--lr", "abc"], "--rate abc: expected a number: a rate (see --help)"),
    (["--quick", "perhaps"], "--quick perhaps: expected true or false: a switch (see --help)"),
    (["--no_with_text=x"], "--no_with_text takes no value, got x (see --help)"),
    (["--counts", "1", "x"], "--counts x: expected a whole number: counts (see --help)"),
    (["--rate"], "--rate needs a value, a number: a rate (see --help)"),
    (["--level"], "--level needs a value, one of low, 2 (see --help)"),
    (["--siz", "4"], "unknown flag or value: --siz 4 (all flags: --help)\n  --siz: did you mean --size?"),
    (["--with-txt=1"],
     "unknown flag or value: --with-txt=1 (all flags: --help)\n  --with-txt: did you mean --with_text?"),
    (["--size=--"], "--size needs a value, a whole number: a count (see --help)"),
    (["--counts=--"], "--counts needs a value, a whole number: counts (see --help)"),
    (["--size", "a\nb"], "--size a\\nb: expected a whole number: a count (see --help)"),
    (["--quick", "a\nb"], "--quick a\\nb: expected true or false: a switch (see --help)"),
    (["--zz"], "unknown flag or value: --zz (all flags: --help)"),
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
    assert str(problem.value) == f"--level {given}: expected one of low, 2{meant} (see --help)"


def test_values_of_plain_arguments_are_refused_in_the_same_words():
    parser = FlagParser(allow_abbrev=False)
    parser.add_argument("--rows", type=int, help="how many; 0 = all")
    parser.add_argument("--kind", choices=["small", "large"])
    for words, message in (
        (["--rows", "x"], "--rows x: expected a whole number: how many (see --help)"),
        (["--kind", "big"], "--kind big: expected one of small, large (see --help)"),
        (["--kind", "smal"], "--kind smal: expected one of small, large; did you mean small? (see --help)"),
    ):
        with pytest.raises(UserError) as problem:
            parser.parse_args(words)
        assert str(problem.value) == message


def test_help_lists_many_choices_once_in_the_text():
    @dataclass
    class Many:
        method: Literal["the first method", "the second method"] = flag("the first method", "a method")

    help_text = " ".join(flag_parser([Many], usage="", add_help=False).format_help().split())
    assert "--method NAME a method; one of the first method, the second method (default: the first method)" in help_text
