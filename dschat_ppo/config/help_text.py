"""The text of `--help`: the usual flags of a step, all flags by group, or those whose name contains a word."""

from __future__ import annotations

import dataclasses
import difflib
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any, get_type_hints

from dschat_ppo.config.flag_parser import help_of, title_of, values_of
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

# What `--help` shows first: the flags that most runs set, by heading, and for each a text of one line with its unit.
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
_IN_SHORT = {
    "model_name_or_path": "model: a folder or a hub name",
    "actor_model_name_or_path": "SFT model: actor and reference",
    "critic_model_name_or_path": "reward model; also initialises the critic",
    "data_path": "files, folders or hub names",
    "output_dir": "models, metrics and report",
    "objective": "see --help objective",
    "beta": "strength of the KL constraint (dpo, ...)",
    "data_split": "shares of the rows for steps 1, 2, 3",
    "eval_data_path": "rows for evaluation",
    "max_seq_len": "tokens, prompt and answer together",
    "truncation": "for longer rows: left, drop, ...",
    "packing": "several samples per row",
    "num_train_epochs": "passes over the rows",
    "max_steps": "optimizer steps; 0 = use epochs",
    "reward_function": "rules or file.py:function",
    "advantage_estimator": "gae, grpo, rloo, ...",
    "kl_coef": "weight of the KL in the reward",
    "max_prompt_seq_len": "tokens of a prompt",
    "max_answer_seq_len": "new tokens of an answer",
    "per_device_generation_batch_size": "prompts per device and batch",
    "n_samples_per_prompt": "answers to each prompt",
    "per_device_train_batch_size": "rows per micro-batch and device",
    "per_device_training_batch_size": "rows per micro-batch and device",
    "gradient_accumulation_steps": "micro-batches per optimizer step",
    "ppo_epochs": "passes over a rollout",
    "num_warmup_steps": "warm-up, in optimizer steps",
    "dtype": "bf16, fp16 or fp32",
    "gradient_checkpointing": "less memory, about a third slower",
    "lora_dim": "rank of LoRA; 0 = train all weights",
    "logging_steps": "steps per printed line",
    "save_steps": "steps between checkpoints; 0 = off",
    **dict.fromkeys(("learning_rate", "actor_learning_rate", "critic_learning_rate"), "peak learning rate"),
    **dict.fromkeys(("zero_stage", "actor_zero_stage"), "0 to 3; 3 shards the weights"),
}


@dataclasses.dataclass(frozen=True)
class Flag:
    """A flag as the help shows it."""

    name: str  # without dashes
    group: str
    kind: str  # what its value is, such as "N"; choices are between braces
    text: str  # with the choices if `kind` does not list them
    default: str  # "" if it is required or has none
    aliases: tuple[str, ...]  # with dashes
    required: bool
    off: str  # the flag that turns a switch off that is on by default, or ""

    @property
    def notes(self) -> str:
        """What follows the text, in brackets."""
        notes = ["required"] if self.required and "(required)" not in self.text else []
        notes += [f"default: {self.default}"] if self.default else []
        notes += [f"off: {self.off}"] if self.off else []
        notes += [f"also: {', '.join(self.aliases)}"] if self.aliases else []
        return f" ({'; '.join(notes)})" if notes else ""


def asked_for_help(argv: Sequence[str]) -> str | None:
    """The word after `--help`: "all" or (part of) the name of a flag; "" without one, None without `--help`."""
    for position, word in enumerate(argv):
        if word.startswith("--help="):
            return word.partition("=")[2]
        if word in _WORDS:
            return argv[position + 1] if position + 1 < len(argv) else ""
    return None


def flags_of(groups: Sequence[Any], defaults: dict[str, Any]) -> list[Flag]:
    """The flags of dataclasses such as `RunFlags`, in their order; `defaults` override theirs."""
    return [flag for group in groups for flag in _flags_of(group, defaults)]


def _flags_of(group: Any, defaults: dict[str, Any]) -> Iterator[Flag]:
    types = get_type_hints(group)
    for field in dataclasses.fields(group):
        read, text = values_of(types[field.name]), help_of(field, types[field.name])
        own = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        default = defaults.get(field.name, own)
        kind = read["metavar"]
        if read.get("nargs") == "*":
            kind += " ..."
        yield Flag(
            field.name, title_of(group), kind, text, shown_default(default),
            tuple(field.metadata.get("aliases", ())),
            default is dataclasses.MISSING or "(required)" in text,
            f"--no_{field.name}" if own is True else "",
        )  # fmt: skip


def shown_default(value: Any) -> str:
    """A default as the command line takes it; "" for none."""
    if value is dataclasses.MISSING or value is None or value == []:
        return ""
    if isinstance(value, bool):
        return "True" if value else "False"
    if isinstance(value, list):
        return " ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else f"'{value}'" if value in ("", "\\n") else str(value)


def help_text(step: str, flags: Sequence[Flag], topic: str) -> str:
    """The help of a step; `topic`: "" for the usual flags, "all", or (part of) the name of a flag."""
    width = min(max(shutil.get_terminal_size((100, 24)).columns, LEAST_WIDTH), MOST_WIDTH)
    word = topic.lstrip("-").replace("-", "_").lower()
    if not word:
        return _usual(step, flags)
    if word == "all":
        return (
            f"All {len(flags)} flags of {TITLES[step][1]}; in names, - and _ are the same.\n\n{_by_group(flags, width)}"
        )
    exact = [flag for flag in flags if word == flag.name or f"--{word}" in flag.aliases]
    found = exact or [flag for flag in flags if word in flag.name]
    if not found:
        near = difflib.get_close_matches(word, [flag.name for flag in flags])
        meant = f"; did you mean {' or '.join(f'--help {name}' for name in near)}?" if near else ""
        raise UserError(f"--help {topic}: no flag has this in its name{meant} (all flags: --help all)")
    return _by_group(found, width)


def _usual(step: str, flags: Sequence[Flag]) -> str:
    """The usual flags of the step, one line each."""
    known, (title, program) = {flag.name: flag for flag in flags}, TITLES[step]
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
            default = "required" if known[name].required else known[name].default
            end = f" [{default}]" if default else ""
            lines.append(f"  {f'--{name}'.ljust(column)}  {_IN_SHORT[name]}{end}")
        lines.append("")
    lines += [
        f"all {len(flags)} flags: --help all; those with a word in their name: --help lora",
        "flags in a YAML file: --config FILE; details: docs/flags-and-data.md",
    ]
    return "\n".join(lines)


def _by_group(flags: Sequence[Flag], width: int) -> str:
    """Flags with their whole text, under the names of their groups."""
    lines: list[str] = []
    group = None
    for flag in flags:
        if flag.group != group:
            group = flag.group
            lines += ["", f"{group}:"] if lines else [f"{group}:"]
        head = f"  --{flag.name} {flag.kind}".rstrip()
        text = textwrap.wrap(flag.text + flag.notes, width - _COLUMN, break_long_words=False, break_on_hyphens=False)
        if len(head) + 2 > _COLUMN:
            lines.append(head)
        else:
            lines.append(f"{head.ljust(_COLUMN)}{text.pop(0)}")
        lines += [" " * _COLUMN + line for line in text]
    return "\n".join(lines)
