"""Parse the command line and the YAML file of one step into its frozen configuration."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import yaml

from dschat_ppo.config.feature_flags import FeatureFlags, feature_groups
from dschat_ppo.config.flag_parser import FlagParser, flag_parser
from dschat_ppo.config.help_text import asked_for_help, help_text
from dschat_ppo.config.other_trainers import trains_critic, what_to_use
from dschat_ppo.config.ppo_config import PPOConfig, names_of_teachings
from dschat_ppo.config.run_flags import WITHOUT_EFFECT
from dschat_ppo.config.schema import read_settings, require
from dschat_ppo.config.step_config import (
    StepConfig,
    core_groups_of,
    defaults_of,
    flatten,
)
from dschat_ppo.config.supervised_config import DPOConfig, PreferenceConfig, SFTConfig
from dschat_ppo.errors import UserError, reading
from dschat_ppo.features import hooks

STEPS: dict[str, type[StepConfig]] = {
    "sft": SFTConfig,
    "reward": PreferenceConfig,
    "dpo": DPOConfig,
    "ppo": PPOConfig,
}

# Required flags that have a default in DeepSpeed-Chat, with that default.
_DEFAULTS_THERE = {"--data_path": "--data_path (DeepSpeed-Chat's default: Dahoas/rm-static)"}
_TRAINING_FLAGS = (
    "report_to",
    "tracker",
    "enable_tensorboard",
    "profile",
    "stop_on_health",
    "save_hf_steps",
    "eval_interval",
    "save_best",
    "metric_for_best",
    "early_stop_patience",
    "early_stop_min_delta",
)


def _read_yaml(path: str) -> dict[str, Any]:
    """Flag -> value in a YAML file; `UserError` if it is anything else."""
    text = read_settings("--config", path)
    with reading(f"--config {path}: is not valid YAML"):
        settings: dict[str, Any] = yaml.safe_load(text)
    require(
        isinstance(settings, dict), f"--config {path}: must be a mapping of flag names to values"
    )
    return settings


def _file_words(path: str, parser: FlagParser) -> list[str]:
    """The settings of a YAML file as words of a command line; unknown ones without values, which
    may be secret."""
    words: list[str] = []
    for key, setting in _read_yaml(path).items():
        flag = f"--{key}"
        if flag not in parser.names:
            words.append(flag)
            continue
        if setting is None:
            continue
        if key == "config":
            raise UserError(f"--config {path}: 'config' cannot name another file here")
        if isinstance(setting, dict):
            raise UserError(f"--config {path}: '{key}' must be a value or a list, not a mapping")
        values = [setting]
        if isinstance(setting, list):
            values = setting
        words += [flag, *map(str, values)]
    return words


def parse(step_name: str, argv: Sequence[str], given: dict[str, Any] | None = None) -> Any:
    """The frozen configuration of a step.

    Args:
        step_name: A key of `STEPS`.
        argv: The arguments after the program's name; they override the YAML file named by
            `--config`.
        given: Flag -> value that takes the place of its default; such a flag is not required.

    Raises:
        SystemExit: After `--help`.
        UserError: For flags that are wrong, missing, or do not fit each other.
    """
    step = STEPS[step_name]
    groups = core_groups_of(step)
    groups_of_features = feature_groups(step.kind)
    all_groups = [*groups.values(), *groups_of_features]
    parser = flag_parser(all_groups, add_help=False)
    parser.helps_by_name = True
    parser.advice = partial(
        what_to_use,
        step=step_name,
        flags_of_steps={name: defaults_of(kind) for name, kind in STEPS.items()},
        trains_critic=trains_critic(argv),
    )
    parser.set_defaults(**step.own_defaults | (given or {}))
    topic = asked_for_help(argv)
    if topic is not None:
        _print_help(help_text(step_name, parser, topic))
        raise SystemExit(0)
    flag_fields = [field for group in all_groups for field in dataclasses.fields(group)]
    default_rates: dict[str, float] = {}
    for field in flag_fields:
        if field.name.endswith("learning_rate"):
            default_rates[field.name] = parser.get_default(field.name)
    parser.set_defaults(**dict.fromkeys(default_rates))  # None: not given
    values = _parse_with_file(parser, argv)
    values |= _resolved_rates(values, default_rates)
    missing = _missing(flag_fields, values)
    if missing:
        names = ", ".join(_DEFAULTS_THERE.get(flag, flag) for flag in missing)
        raise UserError(f"required: {names} (all flags: --help all)")

    def with_values(group: Any) -> Any:
        return group(**{field.name: values[field.name] for field in dataclasses.fields(group)})

    groups_of_values = {name: with_values(group) for name, group in groups.items()}
    features = FeatureFlags(tuple(map(with_values, groups_of_features)))
    return step(**groups_of_values, features=features)


def _parse_with_file(parser: FlagParser, argv: Sequence[str]) -> dict[str, Any]:
    """Flag -> value, of the command line and of the file that `--config` names in it."""
    words = _named_file(argv)
    of_command_line = parser.parse_args(words)
    path = of_command_line.config
    if not path:
        return dict(vars(of_command_line))
    try:
        of_file = parser.parse_args(_named_file(_file_words(path, parser)))
    except UserError as problem:
        message = str(problem)
        if "--config" not in message:
            message = f"--config {path}: {message}"
        raise UserError(message) from None
    return dict(vars(parser.parse_args(words, of_file)))


def _resolved_rates(values: dict[str, Any], default_rates: dict[str, float]) -> dict[str, float]:
    """Flag of a learning rate -> the rate that is used. A feature offers `flags.followed_rate(name,
    values)`: the flag whose rate is also that of `name`, if this was not given; or None.

    Args:
        values: Flag -> value; of a rate that was not given, None.
        default_rates: Flag of each learning rate -> its default.
    """
    rates: dict[str, float] = {}
    for name, default in default_rates.items():
        rate = values[name]
        for followed_rate in hooks("flags.followed_rate"):
            followed = followed_rate(name, values)
            if rate is None and followed is not None:
                rate = values[followed]
        if rate is None:
            rate = default
        rates[name] = rate
    return rates


def _named_file(words: Sequence[str]) -> list[str]:
    """`words` with `--deepspeed_config FILE` in place of `--deepspeed FILE`, as the Hugging Face
    trainer has it."""
    renamed = list(words)
    for index, word in enumerate(words):
        flag, equals, path = word.partition("=")
        if not equals and index + 1 < len(words):
            path = words[index + 1]
        if flag == "--deepspeed" and path.endswith(".json"):
            renamed[index] = word.replace(flag, "--deepspeed_config", 1)
    return renamed


def _missing(fields: Sequence[dataclasses.Field[Any]], values: dict[str, Any]) -> list[str]:
    """The required flags that have no value; in step 3 followed by those that would name the
    reward, if none does."""
    missing = []
    for field in fields:
        is_required = field.name not in values or "(required)" in field.metadata["help"]
        if is_required and values.get(field.name) in (None, []):
            missing.append(f"--{field.name}")
    has_reward_model = (
        values.get("critic_model_name_or_path") is not None
        or values.get("reward_model_name_or_path") is not None
    )
    if missing and values.get("use_reward_model") and not has_reward_model:
        ways = "--reward_function"
        alone = names_of_teachings(values.get)
        if alone:
            ways += f", or with --advantage_estimator none to learn from {alone} alone"
        missing.append(f"--critic_model_name_or_path (or --use_reward_model False with {ways})")
    return missing


def _print_help(text: str) -> None:
    """Print on rank 0; a reader such as `head` may stop reading."""
    if os.environ.get("RANK", "0") != "0":
        return
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # for the flush at the end of the process
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def unused_flag_notes(step_name: str, config: StepConfig) -> list[str]:
    """One line for each flag that was given but has no effect, with the reason."""
    step = STEPS[step_name]
    defaults = defaults_of(step)
    values = flatten(config)
    reasons = WITHOUT_EFFECT | step.own_notes | config.run.idle() | config.idle()
    for idle in hooks("refusals.idle"):  # flags of a feature without effect -> the reason
        reasons |= idle(config)
    if values["validate_only"]:
        for name in _TRAINING_FLAGS:
            if name in values:
                reasons[name] = "--validate_only trains nothing"
    return [
        f"--{name} has no effect: {reason}"
        for name, reason in reasons.items()
        if values[name] != defaults[name]
    ]
