"""How chats and evaluations sample: one table for their flags and for commands in a chat. And the
record of what an evaluation is asked for."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from dschat_ppo.config.data_flags import DataFlags
from dschat_ppo.config.feature_flags import FeatureFlags, feature_groups
from dschat_ppo.config.ppo_flags import RewardSourceFlags
from dschat_ppo.errors import UserError

if TYPE_CHECKING:  # it needs torch, for which wrong flags do not wait
    from dschat_ppo.rollout.sampling import SamplingParameters

# name -> (type, least, most, help)
RANGES: dict[str, tuple[type[int] | type[float], float, float, str]] = {
    "temperature": (float, 0.01, 100, "sampling temperature; for greedy decoding use top_k 1"),
    "top_p": (
        float,
        0.001,
        1,
        "sample from the smallest set of tokens with this probability; 1 = off",
    ),
    "top_k": (int, 0, 10**6, "sample from the k most likely tokens; 0 = off, 1 = greedy"),
    "min_p": (
        float,
        0,
        1,
        "drop tokens less likely than this fraction of the most likely token; 0 = off",
    ),
    "repetition_penalty": (
        float,
        0.01,
        100,
        "above 1, tokens of the prompt and the answer so far become less likely; 1 = off",
    ),
    "max_tokens": (int, 1, 10**6, "maximum tokens of an answer"),
    "seed": (int, 0, 2**53 - 1, "sampling seed"),
}


@dataclass(frozen=True)
class SamplingSettings:
    """Values for `RANGES`."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int = 256
    seed: int = 1234

    @property
    def sampling(self) -> SamplingParameters:
        from dschat_ppo.rollout.sampling import SamplingParameters

        return SamplingParameters(
            self.temperature, self.top_p, self.top_k, self.min_p, self.repetition_penalty
        )

    def with_values(self, values: Mapping[str, Any], prefix: str = "") -> SamplingSettings:
        """The settings with other values, name -> number or text; `prefix` stands before names in
        messages."""
        checked: dict[str, Any] = {}
        for name, value in values.items():
            if name not in RANGES:
                raise UserError(
                    f"there is no setting '{name}'; the settings are {', '.join(RANGES)}"
                )
            kind, least, most, _ = RANGES[name]
            setting = math.nan  # of what is no number
            if not isinstance(value, bool):
                with suppress(TypeError, ValueError, OverflowError):
                    setting = float(value)
            if not least <= setting <= most or (kind is int and not setting.is_integer()):
                accepted = "an integer" if kind is int else "a number"
                raise UserError(
                    f"{prefix}{name} must be {accepted} from {least:g} to {most:g}, got {value}"
                )
            checked[name] = kind(setting)
        return replace(self, **checked)


@dataclass(frozen=True)
class EvaluationRequest:
    """What the command line of `tools/evaluate.py` asks for."""

    # `ToolFlags`, and the flags of data, rewards, features and sampling
    args: argparse.Namespace
    prompts: DataFlags
    rewards: RewardSourceFlags | None
    features: FeatureFlags
    settings: SamplingSettings


def values_of_group(args: argparse.Namespace, group: type) -> dict[str, Any]:
    """Flag -> value of those of a group that the command has."""
    return {
        field.name: getattr(args, field.name)
        for field in fields(group)
        if hasattr(args, field.name)
    }


def feature_flags_of(args: argparse.Namespace, command: str) -> FeatureFlags:
    """The flags of the features in the command."""
    groups = [group(**values_of_group(args, group)) for group in feature_groups(command)]
    return FeatureFlags(tuple(groups))


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    for field in fields(SamplingSettings):
        kind, _, _, meaning = RANGES[field.name]
        group.add_argument(
            f"--{field.name}",
            default=field.default,
            metavar="N" if kind is int else "X",
            help=f"{meaning} (default: {field.default})",
        )


def sampling_settings_of(args: argparse.Namespace) -> SamplingSettings:
    """The settings that the flags give; raises `UserError` for a value that a flag does not
    accept."""
    return SamplingSettings().with_values({name: getattr(args, name) for name in RANGES}, "--")
