"""Parse the command line and the YAML file of one step into its frozen configuration; the text of
`--help`."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import os
import shutil
import sys
import textwrap
from collections.abc import Sequence
from functools import partial
from typing import Any

import yaml

from dschat_ppo.config.flag_parser import FlagParser, first_words, flag_parser, shown_default
from dschat_ppo.config.other_trainers import trains_critic, what_to_use
from dschat_ppo.config.ppo_config import PPOConfig
from dschat_ppo.config.run_flags import WITHOUT_EFFECT
from dschat_ppo.config.schema import read_settings, require
from dschat_ppo.config.step_config import StepConfig, defaults_of, flatten, groups_of
from dschat_ppo.config.supervised_config import DPOConfig, PreferenceConfig, SFTConfig
from dschat_ppo.errors import UserError, reading

STEPS: dict[str, type[StepConfig]] = {
    "sft": SFTConfig,
    "reward": PreferenceConfig,
    "dpo": DPOConfig,
    "ppo": PPOConfig,
}

_SET_BY_THEM = {"--data_path": "--data_path (DeepSpeed-Chat's default: Dahoas/rm-static)"}
_OF_TRAINING = (
    "report_to",
    "enable_tensorboard",
    "profile",
    "stop_on_health",
    "save_hf_steps",
    "eval_interval",
    "save_best",
    "metric_for_best",
    "push_to_hub",
)


def _read_yaml(path: str) -> dict[str, Any]:
    text = read_settings("--config", path)
    with reading(f"--config {path}: is not valid YAML"):
        settings: dict[str, Any] = yaml.safe_load(text)
    require(
        isinstance(settings, dict), f"--config {path}: must be a mapping of flag names to values"
    )
    return settings


def _words_of(path: str, parser: FlagParser) -> list[str]:
    """The settings of a YAML file as words of a command line; unknown ones without values, which
    may be secret."""
    words: list[str] = []
    for key, value in _read_yaml(path).items():
        if f"--{key}" not in parser.names:
            words.append(f"--{key}")
            continue
        require(
            key != "config" or value is None,
            f"--config {path}: 'config' cannot name another file here",
        )
        require(
            not isinstance(value, dict),
            f"--config {path}: '{key}' must be a value or a list, not a mapping",
        )
        if value is not None:
            words += [f"--{key}", *map(str, value if isinstance(value, list) else [value])]
    return words


def parse(step_name: str, argv: Sequence[str], given: dict[str, Any] | None = None) -> Any:
    """The frozen configuration of a step, a key of `STEPS`. `argv`, the arguments after the
    program's name, override the YAML file named by `--config`. `given`: flag -> value that takes
    the place of its default; such a flag is not required."""
    step = STEPS[step_name]
    groups = list(groups_of(step).items())
    parser = flag_parser([kind for _, kind in groups], add_help=False)
    parser.helps_by_name = True
    flags_of_steps = {name: defaults_of(kind) for name, kind in STEPS.items()}
    parser.advice = partial(
        what_to_use,
        step=step_name,
        flags_of_steps=flags_of_steps,
        trains_critic=trains_critic(argv),
    )
    parser.set_defaults(**step.own_defaults | (given or {}))
    if (topic := asked_for_help(argv)) is not None:
        _print_help(help_text(step_name, parser, topic))
        raise SystemExit(0)
    fields = [field for _, kind in groups for field in dataclasses.fields(kind)]
    rates = {
        field.name: parser.get_default(field.name)
        for field in fields
        if field.name.endswith("learning_rate")
    }
    parser.set_defaults(**dict.fromkeys(rates))  # None: not given
    found = parser.parse_args(_named_file(argv))
    if found.config:
        try:
            settings = parser.parse_args(_named_file(_words_of(found.config, parser)))
        except UserError as problem:
            raise UserError(
                str(problem)
                if "--config" in str(problem)
                else f"--config {found.config}: {problem}"
            ) from None
        found = parser.parse_args(_named_file(argv), settings)
    values = vars(found)
    values |= learning_rates(values, rates)
    if missing := _missing(fields, values):
        named = ", ".join(_SET_BY_THEM.get(flag, flag) for flag in missing)
        raise UserError(f"required: {named} (all flags: --help all)")
    parts = {
        name: kind(**{field.name: values[field.name] for field in dataclasses.fields(kind)})
        for name, kind in groups
    }
    return step(**parts)


def learning_rates(given: dict[str, Any], defaults: dict[str, float]) -> dict[str, float]:
    """Flag -> rate: that in `given` (None: not given), else its default. With
    `--only_optimize_lora` the adapter trains in place of the weights, so the rate that was given
    for the weights of a model is also that of its adapter."""
    rates = {}
    for name, default in defaults.items():
        whole = name.replace("lora_", "")
        prefix = name.removesuffix("lora_learning_rate")
        is_alone = whole != name and given["only_optimize_lora"] and given[f"{prefix}lora_dim"] > 0
        if given[name] is not None or not is_alone:
            rates[name] = given[name]
        else:
            rates[name] = given[whole]
        rates[name] = default if rates[name] is None else rates[name]
    return rates


def _named_file(words: Sequence[str]) -> list[str]:
    """`words` with `--deepspeed_config FILE` in place of `--deepspeed FILE`, as the Hugging Face
    trainer has it."""
    named = list(words)
    for place, word in enumerate(words):
        flag, equals, value = word.partition("=")
        if equals:
            following = value
        elif place + 1 < len(words):
            following = words[place + 1]
        else:
            following = ""
        if flag == "--deepspeed" and following.endswith(".json"):
            named[place] = "--deepspeed_config" + equals + value
    return named


def _missing(fields: Sequence[dataclasses.Field[Any]], values: dict[str, Any]) -> list[str]:
    """The required flags that have no value; in step 3 followed by those that would name the
    reward, if none does."""
    missing = [
        f"--{field.name}"
        for field in fields
        if field.name not in values
        or ("(required)" in field.metadata["help"] and values[field.name] in (None, []))
    ]
    models = [values.get(f"{model}_model_name_or_path") for model in ("critic", "reward")]
    if missing and values.get("use_reward_model") and models == [None, None]:
        ways = "--reward_function"
        if values.get("teacher_model_name_or_path"):
            ways += ", or with --advantage_estimator none to learn from the teacher alone"
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


def notes(step_name: str, config: StepConfig) -> list[str]:
    """One line for each flag that was given but has no effect, with the reason."""
    step = STEPS[step_name]
    defaults = defaults_of(step)
    values = flatten(config)
    reasons = WITHOUT_EFFECT | step.own_notes | config.run.idle() | config.idle()
    if values["validate_only"]:
        reasons |= dict.fromkeys(
            [name for name in _OF_TRAINING if name in values], "--validate_only trains nothing"
        )
    return [
        f"--{name} has no effect: {reason}"
        for name, reason in reasons.items()
        if values[name] != defaults[name]
    ]


LEAST_WIDTH, MOST_WIDTH = 80, 120  # columns
_WORDS = ("--help", "-h")

TITLES = {  # step -> what it does, and the path of its program
    "sft": (
        "Step 1: supervised fine-tuning of a language model on answers",
        "training/step1_sft/main.py",
    ),
    "reward": (
        "Step 2: train a reward model, or the policy itself, on preference pairs",
        "training/step2_reward/main.py",
    ),
    "dpo": (
        "Step 2 without a reward model: train the policy itself on preference pairs",
        "training/step2_dpo/main.py",
    ),
    "ppo": (
        "Step 3: train a policy with rewards, by PPO, GRPO and related methods",
        "training/step3_ppo/main.py",
    ),
}

# What `--help` shows first: the flags that most runs set, by heading.
_NEEDED = "model_name_or_path data_path output_dir"
_OF_ROWS = "data_split eval_data_path max_seq_len"
_STEPS_1_AND_2 = {
    "length": "num_train_epochs max_steps",
    "updates": (
        "per_device_train_batch_size gradient_accumulation_steps learning_rate num_warmup_steps"
        " dtype"
    ),
    "memory": "zero_stage gradient_checkpointing lora_dim",
    "output": "logging_steps save_steps",
}
USUAL = {
    "sft": {"needed": _NEEDED, "data": f"{_OF_ROWS} truncation packing"} | _STEPS_1_AND_2,
    "reward": (
        {"needed": _NEEDED, "what is trained": "objective beta", "data": _OF_ROWS} | _STEPS_1_AND_2
    ),
    "ppo": {
        "needed": "actor_model_name_or_path critic_model_name_or_path data_path output_dir",
        "reward and algorithm": "reward_function advantage_estimator kl_coef",
        "rollout": (
            "max_prompt_seq_len max_answer_seq_len per_device_generation_batch_size"
            " n_samples_per_prompt"
        ),
        "updates": (
            "per_device_training_batch_size ppo_epochs actor_learning_rate critic_learning_rate"
            " num_train_epochs"
        ),
        "memory and output": "actor_zero_stage dtype eval_data_path logging_steps",
    },
}
USUAL["dpo"] = USUAL["reward"]


def asked_for_help(argv: Sequence[str]) -> str | None:
    """The word after `--help`: "all" or (part of) the name of a flag; "" without one, None without
    `--help`."""
    for position, word in enumerate(argv):
        if word.startswith("--help="):
            return word.partition("=")[2]
        if word in _WORDS:
            if position + 1 < len(argv):
                return argv[position + 1]
            return ""
    return None


def help_text(step: str, parser: FlagParser, topic: str) -> str:
    """The help of a step; `topic`: "" for the usual flags, "all", or (part of) the name of a
    flag."""
    width = min(max(shutil.get_terminal_size((100, 24)).columns, LEAST_WIDTH), MOST_WIDTH)
    word = topic.lstrip("-").replace("-", "_").lower()
    flags = parser.flags
    if not word:
        return _usual(step, flags, width)
    if word == "all":
        head = f"All {len(flags)} flags of {TITLES[step][1]}; in names, - and _ are the same."
        return f"{head}\n\n{parser.help_of(flags, width)}"
    exact = [flag for flag in flags if f"--{word}" in flag.option_strings]
    found = exact or [flag for flag in flags if word in flag.dest]
    if not found:
        near = difflib.get_close_matches(word, [flag.dest for flag in flags])
        if near:
            meant = f"; did you mean {' or '.join(f'--help {name}' for name in near)}?"
        else:
            meant = ""
        raise UserError(
            f"--help {topic}: no flag has this in its name{meant} (all flags: --help all)"
        )
    return parser.help_of(found, width)


def _usual(step: str, flags: Sequence[argparse.Action], width: int) -> str:
    known, (title, program) = {flag.dest: flag for flag in flags}, TITLES[step]
    usual = {heading: names.split() for heading, names in USUAL[step].items()}
    column = max(len(name) for names in usual.values() for name in names) + 2
    lines = [
        title,
        "",
        f"usage: deepspeed {program} --flag value ...",
        f"one rank:  python {program} ...",
        f"on a CPU:  deepspeed --num_accelerators 2 {program} ...",
        f"installed: dschat-{step} [--num_accelerators N] --flag value ...",
        "",
    ]
    for heading, names in usual.items():
        lines.append(f"{heading}:")
        for name in names:
            if default := shown_default(known[name]):
                end = f" [{default}]"
            else:
                end = ""
            room = width - column - len(end) - 4
            text = textwrap.shorten(first_words(str(known[name].help)), room, placeholder=" ...")
            lines.append(f"  {f'--{name}'.ljust(column)}  {text}{end}")
        lines.append("")
    lines += [
        f"all {len(flags)} flags: --help all; those with a word in their name: --help lora",
        "flags in a YAML file: --config FILE; details: docs/your-data.md",
    ]
    return "\n".join(lines)
