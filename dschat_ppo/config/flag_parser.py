"""A command-line parser with one flag for each field of the flag groups.

`HfArgumentParser` of transformers does the same, but its import takes a second, for which `--help`
and a misspelt flag would wait. The flags are written as that parser writes them, so
DeepSpeed-Chat's scripts keep working.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import os
import re
import textwrap
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from types import NoneType, UnionType
from typing import Any, Literal, NoReturn, Union, get_args, get_origin

from dschat_ppo.config.feature_flags import feature_notes
from dschat_ppo.config.schema import RANGES, default_of, is_own_function, types_of
from dschat_ppo.errors import UserError, printable_line

# Values that other trainers take -> what to use.
THEIR_VALUES = {
    **dict.fromkeys(
        ("flash_attention_2", "flash_attention_3", "flex_attention"),
        "auto computes packed rows by PyTorch's own FlashAttention",
    ),
    "tis": "did you mean truncate?",
    "icepop": "did you mean mask?",
}
LONG_CHOICES = "NAME"  # shown in place of a long list of choices
_SHORT_CHOICES = 24  # characters; longer lists are part of the help text
_TRUE = ("true", "yes", "t", "y", "1")
_FALSE = ("false", "no", "f", "n", "0")
_KINDS = {"N": "a whole number", "X": "a number", "BOOL": "true or false"}


class FlagParser(argparse.ArgumentParser):
    """An argument parser that raises one `UserError` for all wrong values and unknown flags of a
    command line, with a line for each unknown flag that says what to use. `advice` names that for a
    flag without dashes, or ""; misspelt ones have an answer in any case. With `helps_by_name` the
    program has `--help NAME` and `--help all`, as the steps have."""

    helps_by_name = False
    advice: Callable[[str], str] = staticmethod(lambda name: "")

    def __init__(self, **settings: Any):
        super().__init__(**settings)
        self._wrong_values: list[str] = []  # of the command line that is being parsed

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        self._wrong_values = []
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown or self._wrong_values:
            self._refuse(unknown)
        return parsed

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self._wrong_values = []
        parsed, unknown = super().parse_known_args(args, namespace)
        if self._wrong_values:
            self._refuse([])
        return parsed, unknown

    def error(self, message: str) -> NoReturn:
        wrong_value = self._as_wrong_value(message)
        if wrong_value is None:
            wrong_value = f"{printable_line(message)} {self._all_flags}"
        self._wrong_values.append(wrong_value)
        self._refuse([])

    @property
    def _all_flags(self) -> str:
        if self.helps_by_name:
            return "(all flags: --help all)"
        return "(all flags: --help)"

    def _as_wrong_value(self, message: str) -> str | None:
        """What is wrong with the value of a flag, from the message of argparse; None if that is
        about something else."""
        match = re.fullmatch(r"argument (--?[^:/]+)[^:]*: (.*)", message, re.DOTALL)
        if match is None:
            return None
        flag, problem = match.groups()
        action = self._option_string_actions.get(flag)
        if action is None:
            return None
        see = self._help_of_flag(flag.lstrip("-").removeprefix("no_"))
        return f"{_wrong_value(flag, action, problem)} ({see})"

    def _help_of_flag(self, name: str) -> str:
        if self.helps_by_name:
            return f"see --help {name}"
        return "see --help"

    def _refuse(self, unknown: Sequence[str]) -> NoReturn:
        """Raise the error about the wrong values, and about `unknown` words of the command line."""
        lines = list(self._wrong_values)
        groups = _by_flag(unknown)
        hints = {words[0]: self._hint(words[0].split("=")[0]) for words in groups}
        if len(groups) == 1:
            lines.append(f"unknown flag or value: {_line(groups[0])} {self._all_flags}")
        elif groups:
            lines.append(f"unknown flags or values {self._all_flags}:")
        for words in groups:
            hint = hints[words[0]]
            if len(groups) == 1:
                name = printable_line(words[0].split("=")[0])
            else:
                name = _line(words)
            if hint:
                lines.append(f"  {name}: {hint}")
            elif len(groups) > 1:
                lines.append(f"  {name}")
        raise UserError("\n".join(lines))

    def _hint(self, flag: str) -> str:
        """What to use in place of an unknown flag, or the flags that it resembles; "" for none."""
        if not flag.startswith("--"):
            return ""
        name = flag[2:].replace("-", "_")
        hint = self.advice(name) or self.advice(name.removeprefix("no_"))
        if hint:
            return hint
        known = [option[2:] for option in self._option_string_actions]
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.85)
        if near:
            return f"did you mean --{near[0]}?"
        return ""

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        """A wrong value is noted, and takes no effect until all words are read."""
        try:
            values = self._values_of(action, arg_strings)
            self._check(action, values)
            return values
        except UserError as problem:
            message = printable_line(str(problem))
            self._wrong_values.append(f"{message} ({self._help_of_flag(action.dest)})")
            return action.default
        except argparse.ArgumentError as problem:
            wrong_value = self._as_wrong_value(str(problem))
            if wrong_value is None:  # of an argument without a name
                raise
            self._wrong_values.append(wrong_value)
            return action.default

    @staticmethod
    def _check(action: argparse.Action, values: Any) -> None:
        """Run the check of a flag (`schema.flag`), which raises `UserError`."""
        check = getattr(action, "check", None)
        if check is not None:
            check(values)

    def _values_of(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        # argparse removes "--", and a number becomes a list
        if action.option_strings and arg_strings == ["--"]:
            raise argparse.ArgumentError(action, "expected a value, got '--'")
        if getattr(action, "commas", False):
            values: list[str] = []
            for word in arg_strings:
                values_of_word = _between_commas(word)
                if action.nargs == "*" and not values_of_word:
                    raise argparse.ArgumentError(action, "expected a value, got ''")
                values += values_of_word
            if action.nargs == "+":  # a text
                return super()._get_values(action, [",".join(values)])[0]
            arg_strings = values
        return super()._get_values(action, arg_strings)

    @property
    def names(self) -> Collection[str]:
        """All flags with their dashes, also those that turn a switch off."""
        return self._option_string_actions

    @property
    def flags(self) -> list[argparse.Action]:
        """Those that the help shows."""
        return [
            action
            for action in self._actions
            if action.option_strings and action.help != argparse.SUPPRESS
        ]

    def help_of(self, flags: Collection[argparse.Action], width: int) -> str:
        """The whole help of some flags, under the titles of their groups."""
        formatter = HelpFormatter(self.prog, width=width)
        for group in self._action_groups:
            formatter.start_section(group.title)
            formatter.add_arguments([action for action in group._group_actions if action in flags])
            formatter.end_section()
        return formatter.format_help().rstrip()


def _by_flag(words: Sequence[str]) -> list[list[str]]:
    """Words of a command line in groups: each flag with the values behind it. Equal flags are one
    group, that of the first."""
    groups: dict[str, list[str]] = {}
    flag = ""
    for word in words:
        if word.startswith("--"):
            flag = word.split("=")[0]
            groups.setdefault(flag, [word])
        else:
            groups.setdefault(flag, []).append(word)
    return list(groups.values())


def _line(words: Sequence[str]) -> str:
    return printable_line(" ".join(words))


class OrOwnFunction(tuple[str, ...]):
    """The choices of a flag that takes a function of one's own too."""

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or (isinstance(name, str) and is_own_function(name))


def _between_commas(word: str) -> list[str]:
    """The values in one word of a command line. The name of a file, perhaps with a weight or a
    number of rows behind it, may have commas of its own."""
    if os.path.lexists(os.path.expanduser(re.sub(r"[:@][\d.]+$", "", word))):
        return [word]
    return [value.strip() for value in word.split(",") if value.strip()]


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Shows a flag by its name with _ alone; its default, its other names, and the flag that
    disables it follow its text."""

    def __init__(self, prog: str, **settings: Any):
        super().__init__(prog, max_help_position=34, **settings)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        name = action.option_strings[0]
        for option in reversed(action.option_strings):
            if option.startswith("--"):
                name = option
        kind = action.metavar
        if not kind and action.nargs != 0:
            kind = str(action.dest).upper()
        invocation = f"{name} {kind}" if kind else name
        if action.nargs in ("*", "+"):
            invocation += " ..."
        return invocation

    def _expand_help(self, action: argparse.Action) -> str:
        default = shown_default(action)
        aliases = [
            word for word in action.option_strings[1:] if word[2:].replace("-", "_") != action.dest
        ]
        notes = []
        if default not in ("", "required") and "(default" not in str(action.help):
            notes.append(f"default: {default}")
        if getattr(action, "has_off", False):
            notes.append(f"off: --no_{action.dest}")
        if aliases:
            notes.append(f"also: {', '.join(aliases)}")
        if notes:
            return f"{action.help} ({'; '.join(notes)})"
        return str(action.help)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)


def shown_default(action: argparse.Action) -> str:
    """The default of a flag as the command line takes it, "required", or "" for none."""
    value = action.default
    if "(required)" in str(action.help):
        return "required"
    if value is None or value == [] or action.nargs == 0:
        return ""
    if isinstance(value, list):
        return " ".join(map(str, value))
    if isinstance(value, float):
        return f"{value:g}"
    if value in ("", "\\n"):
        return f"'{value}'"
    return str(value)


def _wrong_value(flag: str, action: argparse.Action, problem: str) -> str:
    """What is wrong with the value of a flag, and what it expects, from the message of argparse."""
    expected = _expected(action)
    if problem.startswith("expected"):
        return f"{flag} needs a value, {expected}"
    match = re.search(r"(?:value|choice|argument):? (['\"])(.*?)\1($| \()", problem, re.DOTALL)
    if match is None:
        return f"{flag} {problem}"
    value = match[2]
    if problem.startswith("ignored explicit argument"):
        return f"{flag} takes no value, got {value}"
    message = f"{flag} {value}: expected {expected}"
    if value in THEIR_VALUES:
        return f"{message}; {THEIR_VALUES[value]}"
    choices = [str(choice) for choice in action.choices or ()]
    similar = difflib.get_close_matches(value.lower().replace("-", "_"), choices, n=1)
    if similar:
        return f"{message}; did you mean {similar[0]}?"
    return message


def _expected(action: argparse.Action) -> str:
    """What values a flag takes: their kind and, from the first words of its help text, their unit
    or range."""
    if action.choices:
        return _listed(action.choices)
    kind = _KINDS.get({int: "N", float: "X"}.get(action.type, str(action.metavar)), "text")  # type: ignore[call-overload]
    if action.help and action.help != argparse.SUPPRESS:
        return f"{kind}: {first_words(action.help)}"
    return kind


def _listed(choices: Iterable[Any]) -> str:
    listed = f"one of {', '.join(map(str, choices))}"
    if isinstance(choices, OrOwnFunction):
        listed += ", or FILE.py:FUNCTION"
    return listed


def first_words(text: str) -> str:
    """The first part of a help text: what a flag is, with its unit or range."""
    return re.split(r"; |: | \(", text)[0]


def flag_parser(groups: Iterable[Any], **settings: Any) -> FlagParser:
    """A parser for the fields of dataclasses such as `RunFlags`.

    A field `some_name` becomes `--some_name` and `--some-name`, with the aliases in its metadata. A
    field of type bool takes a value or none (true), and with the default True it also has
    `--no_some_name`. A list takes any number of values; with `commas` in its metadata, a list or a
    text takes them between commas or spaces. A field without a default has no attribute in the
    result if its flag is not given. Types may be `T`, `T | None` or `list[T]`, with T a Literal,
    bool, int, float or str; or a Literal `| str`, which takes `FILE.py:FUNCTION` too. Features add
    values to a Literal (`FlagNotes.choices`).
    `settings` are those of `argparse.ArgumentParser`.
    """
    parser = FlagParser(allow_abbrev=False, formatter_class=HelpFormatter, **settings)
    add_groups(parser, groups)
    return parser


def add_groups(
    parser: argparse.ArgumentParser, groups: Iterable[Any], without: Collection[str] = ()
) -> None:
    """Add the fields of dataclasses, as `flag_parser` does, except those whose names are in
    `without`. The title of a group is the first line of its docstring."""
    for group in groups:
        section = parser.add_argument_group(group.__doc__.partition("\n")[0].removesuffix("."))
        types = types_of(group)
        for field in dataclasses.fields(group):
            if field.name not in without:
                _add_flag(section, field, types[field.name])


def _add_flag(section: Any, field: dataclasses.Field[Any], kind: Any) -> None:
    default = default_of(field)
    if default is dataclasses.MISSING:
        default = argparse.SUPPRESS
    names = dict.fromkeys((f"--{field.name}", f"--{field.name.replace('_', '-')}"))
    further: dict[str, str] = {}
    for notes in feature_notes():
        further |= notes.choices.get(field.name, {})
    settings = values_of(kind, further)
    text = str(field.metadata["help"])
    for choice, meaning in further.items():
        if meaning:
            text += f". '{choice}' {meaning}"
    range_name = field.metadata.get("range")
    if range_name:
        settings["type"] = partial(_in_range, settings["type"], range_name, text)
    if settings["metavar"] == LONG_CHOICES:
        text += f"; {_listed(settings['choices'])}"
    if default is argparse.SUPPRESS:
        text += " (required)"
    has_commas = field.metadata.get("commas", False)
    if has_commas:
        settings.setdefault("nargs", "+")
    action = section.add_argument(
        *names,
        *field.metadata.get("aliases", []),
        default=default,
        **settings,
        help=text,
    )
    action.commas = has_commas
    action.check = field.metadata.get("check")
    action.has_off = default is True
    if default is True:
        section.add_argument(
            f"--no_{field.name}",
            f"--no-{field.name.replace('_', '-')}",
            action="store_false",
            dest=field.name,
            default=argparse.SUPPRESS,
            help=argparse.SUPPRESS,
        )


def values_of(kind: Any, further: Iterable[str] = ()) -> dict[str, Any]:
    """What argparse needs to read values of a type: settings of `add_argument`. `further`: choices
    beside those of the type."""
    if get_origin(kind) in (Union, UnionType):
        kinds = [member for member in get_args(kind) if member is not NoneType]
        if len(kinds) == 2 and kinds[1] is str:
            choices = OrOwnFunction((*get_args(kinds[0]), *further))
            return {
                "choices": choices,
                "type": partial(_choice_of, choices),
                "metavar": LONG_CHOICES,
            }
        [kind] = kinds
    if get_origin(kind) is list:
        [item] = get_args(kind)
        return {**values_of(item), "nargs": "*"}  # a list may be empty, as in DeepSpeed-Chat
    if get_origin(kind) is Literal:
        values = (*get_args(kind), *further)
        listed = "{" + ",".join(map(str, values)) + "}"
        metavar = listed if len(listed) <= _SHORT_CHOICES else LONG_CHOICES
        return {
            "choices": values,
            "type": partial(_choice_of, values),
            "metavar": metavar,
        }
    if kind is bool:
        return {"type": _bool_of, "nargs": "?", "const": True, "metavar": "BOOL"}
    return {"type": kind, "metavar": {int: "N", float: "X"}.get(kind, "TEXT")}


def _choice_of(choices: tuple[Any, ...], text: str) -> Any:
    for choice in choices:
        if str(choice) == text:
            return choice
    if text not in choices:  # a function of one's own is
        raise argparse.ArgumentTypeError(f"invalid choice: {text!r}")
    return text


def _bool_of(text: str) -> bool:
    if text.lower() not in _TRUE + _FALSE:
        raise argparse.ArgumentTypeError(f"invalid value: {text!r}")
    return text.lower() in _TRUE


def _in_range(kind: Callable[[str], float], range: str, help: str, text: str) -> float:
    """A number in a range of `RANGES`. Of flags that are 0 or above the message says what 0 means,
    for which others have -1."""
    try:
        value = kind(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"invalid value: {text!r}") from None
    description, fits = RANGES[range]
    if fits(value):
        return value
    message = f"must be {description}, got {value}"
    if description.endswith("0 or above"):
        zero = re.search(r"\b0 = [^;,)]+", help)
        if zero is not None:
            message += f"; {zero[0]}"
    raise argparse.ArgumentTypeError(message)
