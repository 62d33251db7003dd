"""The text of `--help`: the usual flags of a step, all flags by group, or those whose name contains a word."""

from __future__ import annotations

import argparse
import difflib
import shutil
import textwrap
from collections.abc import Sequence
from typing import Any

from dschat_ppo.config.flag_parser import FlagParser, first_words
from dschat_ppo.errors import UserError

LEAST_WIDTH, MOST_WIDTH = 80, 120  # columns
_COLUMN = 34  # where the text of a flag starts
_WORDS = ("--help", "-h")

TITLES = {  # step -> what it does, and the path of its program
    "sft": ("Step 1: supervised fine-tuning of a language model on answers", "training/step1_sft/main.py"),
    "reward": (
        "Step 2: train a reward model, or the policy itself, on preference pairs",
        "training/step2_reward/main.py",
    ),
    "dpo": (
        "Step 2 without a reward model: train the policy itself on preference pairs",
        "training/step2_dpo/main.py",
    ),
    "ppo": ("Step 3: train a policy with rewards, by PPO, GRPO and related methods", "training/step3_ppo/main.py"),
}

# What `--help` shows first: the flags that most runs set, by heading.
_NEEDED = "model_name_or_path data_path output_dir"
_OF_ROWS = "data_split eval_data_path max_seq_len"
_STEPS_1_AND_2 = {
    "length": "num_train_epochs max_steps",
    "updates": "per_device_train_batch_size gradient_accumulation_steps learning_rate num_warmup_steps dtype",
    "memory": "zero_stage gradient_checkpointing lora_dim",
    "output": "logging_steps save_steps",
}
USUAL = {
    "sft": {"needed": _NEEDED, "data": f"{_OF_ROWS} truncation packing"} | _STEPS_1_AND_2,
    "reward": {"needed": _NEEDED, "what is trained": "objective beta", "data": _OF_ROWS} | _STEPS_1_AND_2,
    "ppo": {
        "needed": "actor_model_name_or_path critic_model_name_or_path data_path output_dir",
        "reward and algorithm": "reward_function advantage_estimator kl_coef",
        "rollout": "max_prompt_seq_len max_answer_seq_len per_device_generation_batch_size n_samples_per_prompt",
        "updates": (
            "per_device_training_batch_size ppo_epochs actor_learning_rate critic_learning_rate num_train_epochs"
        ),
        "memory and output": "actor_zero_stage dtype eval_data_path logging_steps",
    },
}
USUAL["dpo"] = USUAL["reward"]


def asked_for_help(argv: Sequence[str]) -> str | None:
    """The word after `--help`: "all" or (part of) the name of a flag; "" without one, None without `--help`."""
    for position, word in enumerate(argv):
        if word.startswith("--help="):
            return word.partition("=")[2]
        if word in _WORDS:
            return argv[position + 1] if position + 1 < len(argv) else ""
    return None


def _default(flag: argparse.Action) -> str:
    """The default as the command line takes it, "required", or "" for none."""
    required = flag.default is argparse.SUPPRESS or "(required)" in str(flag.help)
    return "required" if required else shown_default(flag.default)


def _notes(flag: argparse.Action, has_off: bool) -> str:
    """What follows the text of a flag, in brackets. `has_off`: whether another flag turns it off."""
    default = "" if "(required)" in str(flag.help) else _default(flag)  # else the text says so
    notes = [default if default == "required" else f"default: {default}"] if default else []
    notes += [f"off: --no_{flag.dest}"] if has_off else []
    aliases = [word for word in flag.option_strings if word[2:].replace("-", "_") != flag.dest]
    notes += [f"also: {', '.join(aliases)}"] if aliases else []
    return f" ({'; '.join(notes)})" if notes else ""


def shown_default(value: Any) -> str:
    """A default as the command line takes it; "" for none."""
    if value is None or value == []:
        return ""
    if isinstance(value, bool):
        return "True" if value else "False"
    if isinstance(value, list):
        return " ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else f"'{value}'" if value in ("", "\\n") else str(value)


def help_text(step: str, parser: FlagParser, topic: str) -> str:
    """The help of a step; `topic`: "" for the usual flags, "all", or (part of) the name of a flag."""
    width = min(max(shutil.get_terminal_size((100, 24)).columns, LEAST_WIDTH), MOST_WIDTH)
    word = topic.lstrip("-").replace("-", "_").lower()
    flags = [flag for _, group in parser.groups for flag in group]
    if not word:
        return _usual(step, flags, width)
    if word == "all":
        head = f"All {len(flags)} flags of {TITLES[step][1]}; in names, - and _ are the same."
        return f"{head}\n\n{_by_group(parser, flags, width)}"
    exact = [flag for flag in flags if f"--{word}" in flag.option_strings]
    found = exact or [flag for flag in flags if word in flag.dest]
    if not found:
        near = difflib.get_close_matches(word, [flag.dest for flag in flags])
        meant = f"; did you mean {' or '.join(f'--help {name}' for name in near)}?" if near else ""
        raise UserError(f"--help {topic}: no flag has this in its name{meant} (all flags: --help all)")
    return _by_group(parser, found, width)


def _usual(step: str, flags: Sequence[argparse.Action], width: int) -> str:
    """The usual flags of the step, one line each."""
    known, (title, program) = {flag.dest: flag for flag in flags}, TITLES[step]
    usual = {heading: names.split() for heading, names in USUAL[step].items()}
    column = max(len(name) for names in usual.values() for name in names) + 2
    lines = [
        title, "", f"usage: deepspeed {program} --flag value ...", f"one rank:  python {program} ...",
        f"on a CPU:  deepspeed --num_accelerators 2 {program} ...",
        f"installed: dschat-{step} [--num_accelerators N] --flag value ...", "",
    ]  # fmt: skip
    for heading, names in usual.items():
        lines.append(f"{heading}:")
        for name in names:
            end = f" [{default}]" if (default := _default(known[name])) else ""
            room = width - column - len(end) - 4
            text = textwrap.shorten(first_words(str(known[name].help)), room, placeholder=" ...")
            lines.append(f"  {f'--{name}'.ljust(column)}  {text}{end}")
        lines.append("")
    lines += [
        f"all {len(flags)} flags: --help all; those with a word in their name: --help lora",
        "flags in a YAML file: --config FILE; details: docs/flags-and-data.md",
    ]
    return "\n".join(lines)


def _by_group(parser: FlagParser, flags: Sequence[argparse.Action], width: int) -> str:
    """Flags with their whole text, under the titles of their groups."""
    blocks: list[str] = []
    for title, group in parser.groups:
        lines = [f"{title}:"]
        for flag in [flag for flag in group if flag in flags]:
            head = f"  --{flag.dest} {flag.metavar}" + (" ..." if flag.nargs == "*" else "")
            text = f"{flag.help}{_notes(flag, parser.knows(f'--no_{flag.dest}'))}"
            words = textwrap.wrap(text, width - _COLUMN, break_long_words=False, break_on_hyphens=False)
            lines.append(head if len(head) + 2 > _COLUMN else f"{head.ljust(_COLUMN)}{words.pop(0)}")
            lines += [" " * _COLUMN + line for line in words]
        blocks += ["\n".join(lines)] if len(lines) > 1 else []
    return "\n\n".join(blocks)
