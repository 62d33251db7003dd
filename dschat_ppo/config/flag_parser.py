"""A command-line parser with one flag for each field of the flag groups.

`HfArgumentParser` of transformers does the same, but its import takes a second, for which `--help` and a misspelt flag
would wait. The flags are written as that parser writes them, so DeepSpeed-Chat's scripts keep working.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import os
import re
from collections.abc import Collection, Iterable
from functools import partial
from types import NoneType, UnionType
from typing import Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

from dschat_ppo.config.retired_flags import RETIRED
from dschat_ppo.config.schema import is_own_function, require_in_range
from dschat_ppo.errors import UserError, printable_line

LONG_CHOICES = "NAME"  # shown in place of a long list of choices
_SHORT_CHOICES = 24  # characters; longer lists are part of the help text
_TRUE, _FALSE = ("true", "yes", "t", "y", "1"), ("false", "no", "f", "n", "0")


class FlagParser(argparse.ArgumentParser):
    """An argument parser that raises `UserError` with a message of one line, which suggests flags for unknown ones.
    With `helps_by_name` the program has `--help NAME` and `--help all`, as the steps have."""

    helps_by_name = False

    def error(self, message: str) -> NoReturn:
        named = re.fullmatch(r"argument (--?[^:/]+)[^:]*: (.*)", message, re.DOTALL)
        if named and (action := self._option_string_actions.get(named[1])):
            word = f" {named[1].lstrip('-').removeprefix('no_')}" if self.helps_by_name else ""
            raise UserError(f"{_wrong_value(named[1], action, named[2])} (see --help{word})")
        kind, _, words = message.partition(": ")
        unknown = [word.split("=")[0] for word in words.split() if word.startswith("--")]
        near = [difflib.get_close_matches(word[2:].replace("-", "_"), self._by_name, n=1) for word in unknown]
        meant = [self._by_name[name] for [name] in filter(None, near)] if kind == "unrecognized arguments" else []
        hint = f"; did you mean {' and '.join(dict.fromkeys(meant))}?" if meant else ""
        all_flags = "--help all" if self.helps_by_name else "--help"
        left = [f"\n  {word}: {RETIRED[word[2:]]}" for word in unknown if word[2:] in RETIRED]
        raise UserError(f"{printable_line(message)}{hint} (all flags: {all_flags}){''.join(left)}")

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        if action.option_strings and arg_strings == ["--"]:  # argparse removes it, and a number becomes a list
            raise argparse.ArgumentError(action, "expected a value, got '--'")
        if getattr(action, "commas", False):
            parts = [part for word in arg_strings for part in _between_commas(word)]
            arg_strings = parts if action.nargs == "*" else [",".join(parts)]
            if action.nargs == "+":  # a text
                return super()._get_values(action, arg_strings)[0]
        return super()._get_values(action, arg_strings)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse does. The last value of each flag must be in its range: flags override those of `--config`."""
        found, others = super().parse_known_args(args, namespace)
        for action in self._actions:
            value = getattr(found, action.dest, None)
            if (range := getattr(action, "range", "")) and value is not None and value != action.default:
                require_in_range(action.dest, range, str(action.help), value)
        return found, others

    def knows(self, word: str) -> bool:
        """Whether a word of a command line, such as "--seed=1", is a flag of this parser."""
        return word.partition("=")[0] in self._option_string_actions

    @property
    def groups(self) -> list[tuple[str, list[argparse.Action]]]:
        """(title, flags) of each group, without those that turn another flag off."""
        found = [(str(group.title), group._group_actions) for group in self._action_groups]
        return [(title, [flag for flag in flags if flag.const is not False]) for title, flags in found]

    @property
    def _by_name(self) -> dict[str, str]:
        """The flags, by their names without dashes."""
        flags = [flag for flag in self._option_string_actions if flag.startswith("--")]
        return {flag[2:].replace("-", "_"): flag for flag in reversed(flags)}


class OrOwnFunction(tuple[str, ...]):
    """The choices of a flag that takes a function of one's own too."""

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or (isinstance(name, str) and is_own_function(name))


def _between_commas(word: str) -> list[str]:
    """The values in one word of a command line. The name of a file, perhaps with a weight or a number of rows behind
    it, may have commas of its own."""
    if os.path.lexists(os.path.expanduser(re.sub(r"[:@][\d.]+$", "", word))):
        return [word]
    return [part.strip() for part in word.split(",") if part.strip()]


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Omits defaults of None and [], whose meaning is in the help text, and marks required flags."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is argparse.SUPPRESS and action.type is not None:
            return f"{action.help} (required)"
        return action.help if action.default in (None, []) else super()._get_help_string(action)


def _wrong_value(flag: str, action: argparse.Action, problem: str) -> str:
    """What is wrong with the value of a flag, and what it expects, from the message of argparse."""
    given = re.search(r"(?:value|choice|argument):? (['\"])(.*?)\1($| \()", problem, re.DOTALL)
    expected = _expected(action)
    if problem.startswith("expected"):
        return f"{flag} needs a value, {expected}"
    if given is None:
        return f"{flag}: {problem}"
    if problem.startswith("ignored explicit argument"):
        return f"{flag} takes no value, got {given[2]}"
    choices = [str(choice) for choice in action.choices or ()]
    nearest = difflib.get_close_matches(given[2].lower().replace("-", "_"), choices, n=1)
    meant = f"; did you mean {nearest[0]}?" if nearest else ""
    return f"{flag} {given[2]}: expected {expected}{meant}"


def _expected(action: argparse.Action) -> str:
    """What values a flag takes: their kind and, from the first words of its help text, their unit or range."""
    if action.choices:
        own = ", or FILE.py:FUNCTION" if isinstance(action.choices, OrOwnFunction) else ""
        return f"one of {', '.join(map(str, action.choices))}{own}"
    kinds: dict[Any, str] = {int: "a whole number", float: "a number", _bool_of: "true or false"}
    kind = kinds.get(action.type, "text")
    if not action.help or action.help == argparse.SUPPRESS:
        return kind
    return f"{kind}: {first_words(action.help)}"


def first_words(text: str) -> str:
    """The first part of a help text: what a flag is, with its unit or range."""
    return re.split(r"; |: | \(", text)[0]


def flag_parser(groups: Iterable[Any], **settings: Any) -> FlagParser:
    """A parser for the fields of dataclasses such as `RunFlags`.

    A field `some_name` becomes `--some_name` and `--some-name`, with the aliases in its metadata. A field of type bool
    takes a value or none (true), and with the default True it also has `--no_some_name`. A list takes any number of
    values; with `commas` in its metadata, a list or a text takes them between commas or spaces. A field without a
    default has no attribute in the result if its flag is not given. Types may be `T`, `T | None` or `list[T]`, with T a
    Literal, bool, int, float or str; or a Literal `| str`, which takes `FILE.py:FUNCTION` too. `settings` are those of
    `argparse.ArgumentParser`.
    """
    parser = FlagParser(allow_abbrev=False, formatter_class=_HelpFormatter, **settings)
    add_groups(parser, groups)
    return parser


def add_groups(parser: argparse.ArgumentParser, groups: Iterable[Any], hidden: Collection[str] = ()) -> None:
    """Add the fields of dataclasses, as `flag_parser` does; the help omits those whose names are in `hidden`."""
    for group in groups:
        section, types = parser.add_argument_group(_title_of(group)), get_type_hints(group)
        for field in dataclasses.fields(group):
            _add_flag(section, field, types[field.name], field.name in hidden)


def _title_of(group: Any) -> str:
    """The title of a group of flags: the first line of its docstring."""
    return str(group.__doc__).partition("\n")[0].removesuffix(".")


def _add_flag(section: Any, field: dataclasses.Field[Any], kind: Any, is_hidden: bool) -> None:
    default: Any = argparse.SUPPRESS
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    elif field.default is not dataclasses.MISSING:
        default = field.default
    names = dict.fromkeys((f"--{field.name}", f"--{field.name.replace('_', '-')}"))
    read, commas = values_of(kind), field.metadata.get("commas", False)
    action = section.add_argument(
        *names, *field.metadata.get("aliases", []), default=default, **({"nargs": "+"} if commas else {}) | read,
        help=argparse.SUPPRESS if is_hidden else help_of(field, kind),
    )  # fmt: skip
    action.commas, action.range = commas, field.metadata.get("range", "")
    if default is True:
        section.add_argument(
            f"--no_{field.name}", f"--no-{field.name.replace('_', '-')}", action="store_false", dest=field.name,
            default=argparse.SUPPRESS, help=argparse.SUPPRESS if is_hidden else f"turn --{field.name} off",
        )  # fmt: skip


def values_of(kind: Any) -> dict[str, Any]:
    """What argparse needs to read values of a type: settings of `add_argument`."""
    if get_origin(kind) in (Union, UnionType):
        kinds = [part for part in get_args(kind) if part is not NoneType]
        if len(kinds) == 2 and kinds[1] is str:
            own = OrOwnFunction(get_args(kinds[0]))
            return {"choices": own, "type": partial(_choice_or_own, own), "metavar": LONG_CHOICES}
        [kind] = kinds
    if get_origin(kind) is list:
        [item] = get_args(kind)
        return {**values_of(item), "nargs": "*"}  # a list may be empty, as in DeepSpeed-Chat
    if get_origin(kind) is Literal:
        by_text = {str(choice): choice for choice in get_args(kind)}
        listed = "{" + ",".join(by_text) + "}"
        metavar = listed if len(listed) <= _SHORT_CHOICES else LONG_CHOICES
        return {"choices": get_args(kind), "type": partial(_choice_of, by_text), "metavar": metavar}
    if kind is bool:
        return {"type": _bool_of, "nargs": "?", "const": True, "metavar": "BOOL"}
    return {"type": kind, "metavar": {int: "N", float: "X"}.get(kind, "TEXT")}


def help_of(field: dataclasses.Field[Any], kind: Any) -> str:
    """The help text of a flag, with the choices if there are too many to list them before it."""
    read, text = values_of(kind), str(field.metadata["help"])
    if read["metavar"] != LONG_CHOICES:
        return text
    own = ", or FILE.py:FUNCTION" if isinstance(read["choices"], OrOwnFunction) else ""
    return f"{text}; one of {', '.join(map(str, read['choices']))}{own}"


def _choice_of(by_text: dict[str, Any], text: str) -> Any:
    """The choice that `text` names."""
    if text not in by_text:
        raise argparse.ArgumentTypeError(f"invalid choice: {text!r}")
    return by_text[text]


def _choice_or_own(choices: OrOwnFunction, text: str) -> str:
    if text not in choices:
        raise argparse.ArgumentTypeError(f"invalid choice: {text!r}")
    return text


def _bool_of(text: str) -> bool:
    if text.lower() not in _TRUE + _FALSE:
        raise argparse.ArgumentTypeError(f"invalid value: {text!r}")
    return text.lower() in _TRUE
