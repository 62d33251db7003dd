"""The text of `--help`: the usual flags of a step, all of them, or those with a word in their
name."""

from __future__ import annotations

import argparse
import difflib
import shutil
import textwrap
from collections.abc import Sequence

from dschat_ppo.config.feature_flags import feature_notes
from dschat_ppo.config.flag_parser import FlagParser, first_words, shown_default
from dschat_ppo.errors import UserError

LEAST_WIDTH = 80  # columns
MOST_WIDTH = 120
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
    "memory": "zero_stage gradient_checkpointing",
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
    columns = shutil.get_terminal_size((100, 24)).columns
    width = min(max(columns, LEAST_WIDTH), MOST_WIDTH)
    word = topic.lstrip("-").replace("-", "_").lower()
    flags = parser.flags
    if not word:
        return _usual_flags(step, flags, width)
    if word == "all":
        head = f"All {len(flags)} flags of {TITLES[step][1]}; in names, - and _ are the same."
        return f"{head}\n\n{parser.help_of(flags, width)}"
    exact = [flag for flag in flags if f"--{word}" in flag.option_strings]
    matches = exact or [flag for flag in flags if word in flag.dest]
    if not matches:
        similar = difflib.get_close_matches(word, [flag.dest for flag in flags])
        hint = ""
        if similar:
            hint = f"; did you mean {' or '.join(f'--help {name}' for name in similar)}?"
        raise UserError(
            f"--help {topic}: no flag has this in its name{hint} (all flags: --help all)"
        )
    return parser.help_of(matches, width)


def _usual_flags(step: str, flags: Sequence[argparse.Action], width: int) -> str:
    """The help of a step for a beginner: how to start it, and the first words on the flags of
    `USUAL`, with their defaults."""
    by_name = {flag.dest: flag for flag in flags}
    title, program = TITLES[step]
    names_by_heading = {heading: names.split() for heading, names in USUAL[step].items()}
    for notes in feature_notes():
        for (step_of_flag, heading), name in notes.usual.items():
            if step_of_flag == step:
                names_by_heading[heading].append(name)
    longest = max(len(name) for names in names_by_heading.values() for name in names)
    name_width = longest + len("--")
    lines = [
        title,
        "",
        f"usage: deepspeed {program} --flag value ...",
        f"one rank:  python {program} ...",
        f"on a CPU:  deepspeed --num_accelerators 2 {program} ...",
        f"installed: dschat-{step} [--num_accelerators N] --flag value ...",
        "",
    ]
    for heading, names in names_by_heading.items():
        lines.append(f"{heading}:")
        for name in names:
            default = shown_default(by_name[name])
            suffix = f" [{default}]" if default else ""
            text_width = width - name_width - len(suffix) - 4
            help_words = first_words(str(by_name[name].help))
            text = textwrap.shorten(help_words, text_width, placeholder=" ...")
            lines.append(f"  {f'--{name}'.ljust(name_width)}  {text}{suffix}")
        lines.append("")
    lines += [
        f"all {len(flags)} flags: --help all; those with a word in their name: --help eval",
        "flags in a YAML file: --config FILE; details: docs/your-data.md",
    ]
    return "\n".join(lines)
