"""Parse the command line and the YAML file of one step into its frozen configuration."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import os
import re
import sys
import unicodedata
from collections.abc import Sequence
from typing import Any

import yaml

from dschat_ppo.config.flag_parser import FlagParser, flag_parser
from dschat_ppo.config.help_text import asked_for_help, help_text
from dschat_ppo.config.lora_flags import learning_rates
from dschat_ppo.config.other_names import flags_for
from dschat_ppo.config.retired_flags import RETIRED, note_on_retired
from dschat_ppo.config.schema import WITHOUT_EFFECT, read_settings, require
from dschat_ppo.config.steps import STEPS, StepConfig, defaults_of, groups_of
from dschat_ppo.errors import UserError, printable_line, reading, without_credentials

_IS_A_PATH = re.compile(r"_path$|_dir$|_name$|config$|^resume$")
MOST_NAME_BYTES, MOST_PATH_BYTES = 255, 3500  # Linux allows 4095 bytes; files inside a folder need the rest
_ALL_FLAGS = "(all flags: --help all)"
_FEWER = "to try a few steps, use --max_steps, or fewer rows: --data_path DATA@ROWS"
_ADVICE = {  # flags of other trainers
    "max_train_steps": "did you mean --max_steps?",
    **dict.fromkeys(("max_train_samples", "max_samples"), _FEWER),
    **{name: f"use --dtype {name}" for name in ("bf16", "fp16")},
    **{
        name: f"it is a flag of the launcher, before the program: deepspeed --{name} N training/..., or of dschat-ppo"
        for name in ("num_accelerators", "num_gpus")
    },
}
_SET_BY_THEM = {"--data_path": "--data_path (DeepSpeed-Chat's default: Dahoas/rm-static)"}
_OF_TRAINING = (
    "report_to", "enable_tensorboard", "profile", "stop_on_health", "save_hf_steps", "eval_interval", "save_best",
    "metric_for_best",
)  # fmt: skip
LEAST_NUMBER, MOST_NUMBER = 1e-30, 1e30  # magnitudes beyond overflow or underflow in fp32 products


def _read_yaml(path: str, known: set[str]) -> tuple[dict[str, Any], str | None]:
    """The settings of a YAML file, and a note about flags that left in a file that a run of an earlier version saved.
    Such a file holds all flags of a step, whatever their values; in a file that a person wrote, flags that left stay,
    to be refused."""
    _check_path("config", path)
    text = read_settings("--config", path)
    with reading(f"--config {path}: is not valid YAML"):
        settings = yaml.safe_load(text)
    require(isinstance(settings, dict), f"--config {path}: must be a mapping of flag names to values")
    if len(known.intersection(settings)) < len(known) / 2:
        return settings, None
    return {key: value for key, value in settings.items() if key not in RETIRED}, note_on_retired(settings)


def _yaml_arguments(path: str, known: set[str]) -> list[str]:
    """The settings of a YAML file as command-line arguments, which precede those of the user."""
    settings, _ = _read_yaml(path, known)
    if unknown := [str(key) for key in settings if key not in known]:
        named = " and ".join(f"'{key}'" for key in unknown)
        raise UserError(f"--config {path}: unknown setting {named} {_ALL_FLAGS}{_hints(unknown, known)}")
    words: list[str] = []
    for key, value in settings.items():
        require(not isinstance(value, dict), f"--config {path}: '{key}' must be a value or a list, not a mapping")
        if value is None:
            continue
        words.append(f"--{key}")
        words.extend(str(item) for item in value) if isinstance(value, list) else words.append(str(value))
    return words


def _config_path(argv: Sequence[str]) -> str | None:
    """The value of `--config`, which is needed before the full parse because the file adds arguments to it."""
    parser = FlagParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config")
    path: str | None = parser.parse_known_args(argv)[0].config
    return path


def parse(step_name: str, argv: Sequence[str], given: dict[str, Any] | None = None) -> Any:
    """The frozen configuration of a step: `SFTConfig`, `PreferenceConfig` or `PPOConfig`.

    Args:
        step_name: "sft", "reward", "dpo" or "ppo".
        argv: arguments after the program's name. They override the YAML file named by `--config`.
        given: flag -> value that takes the place of its default; such a flag is not required.
    """
    step = STEPS[step_name]
    groups, defaults = list(groups_of(step).items()), {**step.defaults, **(given or {})}
    parser = flag_parser([kind for _, kind in groups], add_help=False)
    parser.helps_by_name = True
    parser.set_defaults(**defaults)
    if (topic := asked_for_help(argv)) is not None:
        _print_help(help_text(step_name, parser, topic))
        raise SystemExit(0)
    rates = {name: parser.get_default(name) for _, kind in groups for name in kind.__dataclass_fields__
             if name.endswith("learning_rate")}  # fmt: skip
    parser.set_defaults(**dict.fromkeys(rates))  # None: not given
    fields = [field for _, kind in groups for field in dataclasses.fields(kind)]
    known = {field.name for field in fields} - {"config", "local_rank"}
    known |= {alias.lstrip("-") for field in fields for alias in field.metadata.get("aliases", [])}
    path = _config_path(argv)
    words = _named_file((_yaml_arguments(path, known) if path else []) + list(argv))
    names = known | {f"no_{field.name}" for field in fields if parser.get_default(field.name) is True}
    try:
        found, unknown = parser.parse_known_args(words)
    except UserError as problem:  # it is about one value; flags that are unknown are named with it
        foreign = [word for word in words if word.startswith("--") and not parser.knows(word)]
        raise UserError(f"{problem}{_hints(foreign, names)}") from None
    if unknown:
        words_of_it = printable_line(" ".join(unknown))
        raise UserError(f"unknown flag or value: {words_of_it} {_ALL_FLAGS}{_hints(unknown, names)}")
    # after unknown flags: often one of them is a required flag under another name
    values = vars(found)
    values |= learning_rates(values, rates)
    if missing := _missing(fields, values):
        named = ", ".join(_SET_BY_THEM.get(flag, flag) for flag in missing)
        raise UserError(f"required: {named} {_ALL_FLAGS}")
    parts = {
        name: kind(**{field.name: values[field.name] for field in dataclasses.fields(kind)}) for name, kind in groups
    }
    _check_values(values)
    return step.config(**parts)


def _named_file(words: list[str]) -> list[str]:
    """`words` with `--deepspeed_config FILE` in place of `--deepspeed FILE`, as the Hugging Face trainer has it."""
    named = list(words)
    for place, word in enumerate(words):
        flag, equals, value = word.partition("=")
        following = value if equals else words[place + 1] if place + 1 < len(words) else ""
        if flag == "--deepspeed" and following.endswith(".json"):
            named[place] = "--deepspeed_config" + equals + value
    return named


def _missing(fields: Sequence[dataclasses.Field[Any]], values: dict[str, Any]) -> list[str]:
    """The required flags that have no value; in step 3 followed by those that would name the reward, if none does."""
    missing = [
        f"--{field.name}"
        for field in fields
        if field.name not in values or ("(required)" in field.metadata["help"] and values[field.name] in (None, []))
    ]
    models = [values.get(f"{model}_model_name_or_path") for model in ("critic", "reward")]
    if missing and values.get("use_reward_model") and models == [None, None]:
        missing.append("--critic_model_name_or_path (or --use_reward_model False with --reward_function)")
    return missing


def _print_help(text: str) -> None:
    """Print on rank 0; a reader such as `head` may stop reading."""
    if os.environ.get("RANK", "0") != "0":
        return
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at the end of the process


def flag_help(kind: Any) -> str:
    """The help of one group of flags, such as `DataFlags`, as text."""
    return flag_parser([kind], add_help=False, usage=argparse.SUPPRESS).format_help().strip()


def _check_values(values: dict[str, Any]) -> None:
    """Refuse numbers that 32 or 64 bits cannot hold, and paths that no file system accepts."""
    for name, value in values.items():
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, str) and _IS_A_PATH.search(name):
                _check_path(name, item)
            elif isinstance(item, int):
                bits = 63 if "seed" in name else 31
                require(abs(item) < 2**bits, f"--{name} {item}: must be below 2^{bits}, to fit in {bits + 1} bits")
            elif isinstance(item, float):
                usable = item == 0 or LEAST_NUMBER <= abs(item) <= MOST_NUMBER
                require(usable, f"--{name} {item}: must be 0, or between 1e-30 and 1e30 in magnitude, as fp32 requires")


def _check_path(name: str, path: str) -> None:
    unusable = [character for character in path if unicodedata.category(character) in ("Cc", "Cs")]
    require(not unusable, f"--{name} {ascii(path)}: contains a control character or is not UTF-8 text; rename it")
    lengths = [len(os.fsencode(part)) for part in (path, *path.split("/"))]
    fits = lengths[0] <= MOST_PATH_BYTES and max(lengths[1:]) <= MOST_NAME_BYTES
    require(fits, f"--{name} {path[:60]}...: is too long for a file system; move or rename it")


def _hints(unknown: Sequence[str], known: set[str]) -> str:
    """For each unknown flag that a hint is known for, a line with the hint."""
    lines = dict.fromkeys(_hint(word, known) for word in unknown)
    return "".join(f"\n  {line}" for line in lines if line)


def _hint(unknown: str, known: set[str]) -> str:
    """What to use in place of a flag of other trainers or of another step, or the flag that `unknown` misspells; "" if
    one of its words resembles no word of a flag."""
    theirs = printable_line(unknown.split("=")[0])
    words = unknown.lstrip("-").split("=")[0].replace("-", "_").split("_")
    given = "_".join(words)
    if advice := _ADVICE.get(given) or RETIRED.get(given.removeprefix("no_")):
        return f"{theirs}: {advice}"
    if same := flags_for(given, known):
        return f"{theirs} -> {' and '.join(f'--{name}' for name in same)}"
    steps = [
        name for name, step in STEPS.items() for kind in groups_of(step).values() if given in kind.__dataclass_fields__
    ]
    if steps:
        return f"{theirs}: is a flag of {' and '.join(f'dschat-{name}' for name in steps)}"
    for name in difflib.get_close_matches("_".join(words), known):
        others = name.split("_")
        pairs = zip(words, others, strict=False)
        if len(others) == len(words) and all(difflib.SequenceMatcher(None, *pair).ratio() > 0.65 for pair in pairs):
            return f"{theirs}: did you mean --{name}?"
    return ""


def flatten(config: StepConfig) -> dict[str, Any]:
    """The configuration of a step as flag name -> value, to be saved and compared, without credentials."""
    groups = dataclasses.asdict(config).values()
    return {name: without_credentials(value) for group in groups for name, value in group.items()}


def notes(step_name: str, config: StepConfig) -> list[str]:
    """One line for each flag that was given but has no effect, with the reason; one for all flags that left."""
    step = STEPS[step_name]
    defaults = defaults_of(step)
    values = flatten(config)
    reasons = {name: why for name, why in WITHOUT_EFFECT.items() if name in values}
    reasons |= step.notes | config.run.idle() | config.idle()
    if values["validate_only"]:
        reasons |= dict.fromkeys([name for name in _OF_TRAINING if name in values], "--validate_only trains nothing")
    left = _read_yaml(config.run.config, set(defaults))[1] if config.run.config else None
    lines = [f"--{name} has no effect: {reason}" for name, reason in reasons.items() if values[name] != defaults[name]]
    return lines + ([f"--config {config.run.config}: {left}"] if left else [])
