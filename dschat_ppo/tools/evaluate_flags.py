"""The flags of `tools/evaluate.py`."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dschat_ppo.config.data_flags import DataFlags
from dschat_ppo.config.flag_parser import add_groups, flag_parser
from dschat_ppo.config.reward_flags import RewardSourceFlags
from dschat_ppo.config.steps import STEPS
from dschat_ppo.errors import UserError
from dschat_ppo.tools.sampling_settings import SamplingSettings, add_sampling_flags, settings_of

NO_EFFECT = ("data_split", "streaming", "streaming_rows")  # flags of training: all rows are used
PROMPT_TOKENS, PAIR_TOKENS = 256, 512  # at most, by default
REWARDS = ("reward_model_name_or_path", "reward_function", "remote_reward_url")
LEAST = {"samples": 1, "batch_size": 1, "max_prompt_seq_len": 1, "max_seq_len": 2, "max_batch_tokens": 1,
         "max_prompts": 0, "show": 0}  # fmt: skip


@dataclass(frozen=True)
class Wanted:
    """What the command line asks for."""

    words: argparse.Namespace  # the command's own flags
    prompts: DataFlags | None  # data sets of prompts
    pairs: DataFlags | None  # data sets of pairs
    rewards: RewardSourceFlags | None
    settings: SamplingSettings


def read_arguments(argv: Sequence[str], description: str | None = None) -> Wanted:
    """Parse the command line; `description` is for `--help`."""
    parser = flag_parser([], prog="python -m dschat_ppo.tools.evaluate", description=description)
    parser.usage = f"{parser.prog} --model M [M ...] --data_path DATA [flag ...]\n       {parser.prog} --pairs DATA ..."
    _add_flags(parser)
    add_sampling_flags(parser)
    add_groups(parser, [DataFlags, RewardSourceFlags], hidden=(*NO_EFFECT, "use_reward_model"))
    parser.set_defaults(use_reward_model=None, data_path=[], truncation=None)
    words = parser.parse_args(argv)
    if words.html is not None:
        raise UserError("--html: left: --show N prints the answers to N prompts, and --json FILE writes all of them")
    del words.html
    defaults = {field.name: field.default for field in dataclasses.fields(DataFlags)}
    for name in NO_EFFECT:
        if getattr(words, name) != defaults[name]:
            raise UserError(f"--{name} has no effect here, where all rows are used; omit it")
    if words.use_reward_model is not None:
        raise UserError("--use_reward_model has no effect here; name a reward model by --reward_model_name_or_path")
    for name, least in LEAST.items():
        if getattr(words, name) < least:
            raise UserError(f"--{name} must be at least {least}, got {getattr(words, name)}")
    if bool(words.model) != bool(words.data_path):
        raise UserError("give --model and --data_path together: the models answer the prompts of a data set")
    if not words.model and not words.pairs:
        raise UserError("nothing to evaluate: give --model and --data_path, or --pairs")
    if words.pairs and not words.reward_model_name_or_path:
        raise UserError("--pairs needs the reward model to evaluate: --reward_model_name_or_path")
    if len(set(words.model)) < len(words.model):
        raise UserError("--model names a model twice")
    if words.decoding == "greedy" and words.samples > 1:
        raise UserError("--samples has no effect with --decoding greedy; omit one of them")
    rewards = None
    if any(getattr(words, name) for name in REWARDS):
        values = {field.name: getattr(words, field.name) for field in dataclasses.fields(RewardSourceFlags)}
        uses_model = words.reward_model_name_or_path is not None
        rewards = RewardSourceFlags(**{**values, "use_reward_model": uses_model})
    prompts, pairs = _data(words, words.data_path, "ppo"), _data(words, words.pairs, "reward")
    return Wanted(words, prompts, pairs, rewards, settings_of(words))


def _add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("evaluation").add_argument
    add("--model", nargs="+", default=[], metavar="M",
        help="models or adapters, folders or hub names; wins are counted against the first")  # fmt: skip
    add("--pairs", nargs="+", default=[], metavar="DATA",
        help="data sets of pairs (chosen, rejected), for the accuracy of the reward model")  # fmt: skip
    add("--decoding", choices=("greedy", "sampled", "both"), default="both",
        help="how the models answer (default: both)")  # fmt: skip
    add("--samples", type=int, default=1, metavar="N", help="sampled answers to each prompt (default: 1)")
    add("--pass_score", type=float, default=1.0, metavar="X",
        help="minimum score of an answer that passes, for pass@k (default: 1)")  # fmt: skip
    add("--max_prompts", type=int, default=0, metavar="N", help="only the first N prompts; 0 = all")
    add("--max_prompt_seq_len", type=int, default=PROMPT_TOKENS, metavar="N",
        help="maximum tokens of a prompt (default: 256)")  # fmt: skip
    add("--max_seq_len", type=int, default=PAIR_TOKENS, metavar="N",
        help="maximum tokens of a row of --pairs (default: 512)")  # fmt: skip
    add("--batch_size", type=int, default=64, metavar="N", help="prompts at a time (default: 64)")
    add("--max_batch_tokens", type=int, default=16384, metavar="N",
        help="maximum tokens of a forward pass of the reward model (default: 16384)")  # fmt: skip
    add("--dtype", choices=("bf16", "fp16", "fp32"), default="bf16",
        help="number format of the weights (default: bf16)")  # fmt: skip
    add("--show", type=int, default=0, metavar="N", help="print the answers to the first N prompts (default: 0)")
    add("--json", type=Path, metavar="FILE", help="write metrics, answers and scores as JSON")
    add("--html", help=argparse.SUPPRESS)


def _data(words: argparse.Namespace, paths: list[str], step: str) -> DataFlags | None:
    """The flags of data sets; rows that are too long are handled as in a step unless --truncation says otherwise."""
    values = {field.name: getattr(words, field.name) for field in dataclasses.fields(DataFlags)}
    truncation = words.truncation or STEPS[step].defaults.get("truncation", DataFlags.truncation)
    return DataFlags(**{**values, "data_path": paths, "truncation": truncation}) if paths else None
