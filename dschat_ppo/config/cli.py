"""Command line and YAML -> a frozen configuration of one step, and back to a file."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import os
import re
import unicodedata
from collections.abc import Sequence
from typing import Any, NoReturn, get_type_hints

import yaml
from transformers import HfArgumentParser

from dschat_ppo.config.schema import read_settings, require
from dschat_ppo.config.steps import STEPS, PPOConfig, Step
from dschat_ppo.errors import UserError, reading

_NAMES_A_PLACE = re.compile(r"_path$|_dir$|_name$|config$|^resume$")
MOST_NAME_BYTES, MOST_PATH_BYTES = 255, 3500  # Linux takes 4095 bytes, of which the names inside a folder need some
MOST_COUNT = 2**31 - 1  # counts become 32-bit integers in several libraries
LEAST_NUMBER, MOST_NUMBER = 1e-30, 1e30  # in size: beyond them fp32 has no room for the next product


class _StepParser(HfArgumentParser):
    """argparse whose complaints are one line."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (all flags: --help)")


def _groups(step: Step) -> list[tuple[str, Any]]:
    return list(get_type_hints(step.config).items())


def _amend(parser: HfArgumentParser, step: Step) -> None:
    """What transformers' parser does not know of our flags, most of it for `--help`."""
    for action in parser._actions:
        action.nargs = "*" if action.nargs == "+" else action.nargs  # a list may be given empty, as in DeepSpeed-Chat
        if action.option_strings[0] == f"--no_{action.dest}":  # it would have the help and a default of its opposite
            action.help, action.default = f"turn --{action.dest} off", argparse.SUPPRESS
        if action.required:
            action.help, action.default = f"{action.help} (required)", argparse.SUPPRESS
        if action.dest in step.not_yet:
            action.help = f"{action.help} (not available yet)"


def _yaml_arguments(path: str, known: set[str]) -> list[str]:
    """The settings of a YAML file as command-line words, to stand before the user's own."""
    _check_place("config", path)
    text = read_settings("--config", path)
    with reading(f"--config {path}: is not YAML"):
        settings = yaml.safe_load(text)
    require(isinstance(settings, dict), f"--config {path}: must be a mapping of flag names to values")
    words: list[str] = []
    for key, value in settings.items():
        require(key in known, f"--config {path}: unknown setting '{key}' (names are those of the flags)")
        require(not isinstance(value, dict), f"--config {path}: '{key}' must be a value or a list, not a mapping")
        if value is None:
            continue
        words.append(f"--{key}")
        words.extend(str(item) for item in value) if isinstance(value, list) else words.append(str(value))
    return words


def _config_path(argv: Sequence[str]) -> str | None:
    """The value of `--config`, found before the full parse because it supplies words to that parse."""
    path = None
    for position, word in enumerate(argv):
        if word.startswith("--config="):
            path = word.split("=", 1)[1]
        elif word == "--config":
            require(position + 1 < len(argv), "--config needs a file name")
            path = argv[position + 1]
    return path


def parse(step_name: str, argv: Sequence[str]) -> Any:
    """Read one step's command line.

    Args:
        step_name: "sft", "reward", "dpo" or "ppo".
        argv: words after the program's name. A YAML file named by `--config` stands before them, so they override it.

    Returns:
        The step's frozen configuration: `SFTConfig`, `PreferenceConfig` or `PPOConfig`.

    Raises:
        UserError: an unknown flag, a value out of range, or a flag that is not available yet.
        SystemExit: after `--help`.
    """
    step = STEPS[step_name]
    groups = _groups(step)
    parser = _StepParser([kind for _, kind in groups], allow_abbrev=False)
    parser.set_defaults(**step.defaults)
    _amend(parser, step)
    known = {field.name for _, kind in groups for field in dataclasses.fields(kind)} - {"config", "local_rank"}
    path = _config_path(argv)
    words = (_yaml_arguments(path, known) if path else []) + list(argv)
    *parts, unknown = parser.parse_args_into_dataclasses(words, look_for_args_file=False, return_remaining_strings=True)
    values = {name: value for part in parts for name, value in vars(part).items()}
    refused = _later_flags(step, {name: value for name, value in values.items() if value != parser.get_default(name)})
    if unknown:
        refused.insert(
            0, f"unknown flag or value: {' '.join(unknown)}{_nearest(unknown[0], known)} (all flags: --help)"
        )
    require(not refused, "; ".join(refused))
    _check_values(values)
    return step.config(**{name: part for (name, _), part in zip(groups, parts, strict=True)})


def _check_values(values: dict[str, Any]) -> None:
    """Numbers that the libraries below cannot hold, and places that no file system takes."""
    for name, value in values.items():
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, str) and _NAMES_A_PLACE.search(name):
                _check_place(name, item)
            elif isinstance(item, int) and "seed" not in name:
                require(abs(item) <= MOST_COUNT, f"--{name} {item}: must be below 2^31, so that 32 bits hold it")
            elif isinstance(item, int):
                require(item < 2**63, f"--{name} {item}: must be below 2^63, so that 64 bits hold it")
            elif isinstance(item, float):
                usable = item == 0 or LEAST_NUMBER <= abs(item) <= MOST_NUMBER
                require(usable, f"--{name} {item}: must be 0 or, in size, from 1e-30 to 1e30, where fp32 can compute")


def _check_place(name: str, place: str) -> None:
    odd = [mark for mark in place if unicodedata.category(mark) in ("Cc", "Cs")]
    require(not odd, f"--{name} {ascii(place)}: holds a control character or is not UTF-8 text; rename it")
    lengths = [len(os.fsencode(part)) for part in (place, *place.split("/"))]
    fits = lengths[0] <= MOST_PATH_BYTES and max(lengths[1:]) <= MOST_NAME_BYTES
    require(fits, f"--{name} {place[:60]}...: is longer than a file system takes; move or rename it")


def _nearest(unknown: str, known: set[str]) -> str:
    """A hint at the flag that `unknown` misspells, word by word; none if a word is another one."""
    words = unknown.lstrip("-").split("=")[0].replace("-", "_").split("_")
    for name in difflib.get_close_matches("_".join(words), known):
        others = name.split("_")
        if len(others) == len(words) and all(map(_alike, words, others)):
            return f"; did you mean --{name}?"
    return ""


def _alike(word: str, other: str) -> bool:
    return difflib.SequenceMatcher(None, word, other).ratio() > 0.65


def flatten(config: Any) -> dict[str, Any]:
    """Flag name -> value of a step's configuration."""
    return {name: value for group in dataclasses.asdict(config).values() for name, value in group.items()}


def _later_flags(step: Step, given: dict[str, Any]) -> list[str]:
    """Why flags of a later release cannot be used, all that are `given`, feature by feature."""
    refused = []
    for feature in dict.fromkeys(step.not_yet.values()):
        flags = [f"--{name} {given[name]}" for name in step.not_yet if step.not_yet[name] == feature and name in given]
        if flags:
            refused.append(f"{', '.join(flags)}: {feature} is not available yet; leave these flags out")
        if flags and feature == "LoRA":
            rates = " and ".join(f"--{name}" for name in step.rates)
            refused[-1] += (
                f", and give {rates} 1e-5 to 2e-5: without LoRA all weights are trained, and its 1e-3 ruins them"
            )
    return refused


def notes(step_name: str, config: Any) -> list[str]:
    """One line for each flag that was given but changes nothing, with the reason."""
    step = STEPS[step_name]
    defaults = {
        field.name: field.default for _, kind in _groups(step) for field in dataclasses.fields(kind)
    } | step.defaults
    values = flatten(config)
    reasons = {name: reason for name, reason in step.notes.items() if values[name] != defaults[name]}
    if isinstance(config, PPOConfig):
        reasons |= config.idle()
    return [f"--{name} changes nothing here: {reason}" for name, reason in reasons.items()]
