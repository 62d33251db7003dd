"""The flags of `tools/evaluate.py`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from dschat_ppo.config.data_flags import DataFlags
from dschat_ppo.config.flag_parser import add_groups, flag_parser
from dschat_ppo.config.ppo_flags import RewardSourceFlags
from dschat_ppo.config.schema import flag, not_negative, positive, refuse
from dschat_ppo.config.steps import STEPS
from dschat_ppo.tools.sampling_settings import SamplingSettings, add_sampling_flags, settings_of

PROMPT_TOKENS = 256  # at most, by default
NOT_HERE = {  # flags of the groups that the command does not have -> why
    **dict.fromkeys(
        ("data_split", "streaming", "streaming_rows"), "has no effect here, where all rows are used; omit it"
    ),
    "use_reward_model": "has no effect here; name a reward model by --reward_model_name_or_path",
}
LEFT = {
    "html": "left: --show N prints the answers to N prompts, and --json FILE writes all of them",
    "pairs": "left: step 2 with --validate_only --eval_data_path PAIRS measures the accuracy of a reward model",
}


@dataclass(frozen=True)
class EvaluationFlags:
    """Evaluation."""

    model: list[str] = flag([], "models or adapters, folders or hub names; wins are counted against the first")
    decoding: Literal["greedy", "sampled", "both"] = flag("both", "how the models answer")
    samples: int = positive(1, "sampled answers to each prompt")
    pass_score: float = flag(1.0, "minimum score of an answer that passes, for pass@k")
    max_prompts: int = not_negative(0, "only the first N prompts; 0 = all")
    max_prompt_seq_len: int = positive(PROMPT_TOKENS, "maximum tokens of a prompt")
    batch_size: int = positive(64, "prompts at a time")
    max_batch_tokens: int = positive(16384, "maximum tokens of a forward pass of the reward model")
    dtype: Literal["bf16", "fp16", "fp32"] = flag("bf16", "number format of the weights")
    show: int = not_negative(0, "print the answers to the first N prompts")
    json: str | None = flag(None, "file for metrics, answers and scores as JSON")


@dataclass(frozen=True)
class Wanted:
    """What the command line asks for."""

    words: argparse.Namespace  # `EvaluationFlags`, and the flags of data, rewards and sampling
    prompts: DataFlags
    rewards: RewardSourceFlags | None
    settings: SamplingSettings


def read_arguments(argv: Sequence[str], description: str | None = None) -> Wanted:
    """Parse the command line; `description` is for `--help`."""
    parser = flag_parser([EvaluationFlags], prog="python -m dschat_ppo.tools.evaluate", description=description)
    parser.usage = f"{parser.prog} --model M [M ...] --data_path DATA [flag ...]"
    add_sampling_flags(parser)
    add_groups(parser, [DataFlags, RewardSourceFlags], without=NOT_HERE)
    parser.advice = lambda name: (LEFT | NOT_HERE).get(name, "")
    parser.set_defaults(data_path=[], truncation=None)
    words = parser.parse_args(argv)
    learned = words.reward_model_name_or_path
    refuse({
        "give --model and --data_path: the models answer the prompts of a data set":
            not words.model or not words.data_path,
        "--model names a model twice": len(set(words.model)) < len(words.model),
        "--samples has no effect with --decoding greedy; omit one of them":
            words.decoding == "greedy" and words.samples > 1,
    })  # fmt: skip
    rewards = None
    if learned or words.reward_function or words.remote_reward_url:
        rewards = RewardSourceFlags(**_of(RewardSourceFlags, words), use_reward_model=learned is not None)
    truncation = words.truncation or STEPS["ppo"].defaults["truncation"]  # rows that are too long: as in step 3
    prompts = DataFlags(**_of(DataFlags, words) | {"truncation": truncation})
    return Wanted(words, prompts, rewards, settings_of(words))


def _of(group: type, words: argparse.Namespace) -> dict[str, Any]:
    return {field.name: getattr(words, field.name) for field in fields(group) if hasattr(words, field.name)}
