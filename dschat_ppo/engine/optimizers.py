"""The optimizers that `--optimizer` names: AdamW, and those of features."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dschat_ppo.config.step_config import StepConfig
from dschat_ppo.features import hooks


def build_adamw(groups: Sequence[dict[str, Any]], adamw: dict[str, Any]) -> torch.optim.Optimizer:
    """PyTorch's AdamW for groups of parameters, with these options."""
    return torch.optim.AdamW(groups, **adamw)


def takes_none(name: str, shape: Sequence[int]) -> bool:
    """For AdamW, which trains what no other optimizer takes."""
    return False


def no_rate(config: StepConfig) -> float | None:
    """For AdamW, whose rates are those of the models."""
    return None


def no_settings(config: StepConfig) -> list[tuple[str, str, Any]]:
    """For AdamW, whose settings are those of all runs."""
    return []


@dataclass(frozen=True)
class OptimizerKind:
    """An optimizer. It trains the parameters that it takes, and AdamW trains the others.

    Attributes:
        name: the value of `--optimizer`.
        types: its names in `--deepspeed_config`, in lower case.
        build: (groups of parameters, options of AdamW) -> the optimizer.
        state_names: its states of a parameter, each as large as the parameter.
        takes: (name, shape) -> whether it trains a parameter in place of AdamW.
        mark: the option, true in a group of parameters that it takes.
        learning_rate: (flags) -> the peak rate of the parameters that it takes.
        rate_name: of that rate in the metrics.
        rate_label: of that rate in the line of a step.
        needed_settings: (flags) -> (setting of DeepSpeed, flag, value) of what
            `--deepspeed_config` can only repeat, besides what it can in all runs.
    """

    name: str
    types: tuple[str, ...]
    build: Callable[[Sequence[dict[str, Any]], dict[str, Any]], torch.optim.Optimizer]
    state_names: tuple[str, ...]
    takes: Callable[[str, Sequence[int]], bool] = takes_none
    mark: str = ""
    learning_rate: Callable[[StepConfig], float | None] = no_rate
    rate_name: str = ""
    rate_label: str = ""
    needed_settings: Callable[[StepConfig], list[tuple[str, str, Any]]] = no_settings


ADAMW = OptimizerKind("adamw", ("adam", "adamw"), build_adamw, ("exp_avg", "exp_avg_sq"))


@dataclass(frozen=True)
class SecondRate:
    """A learning rate of its own for some of the parameters that AdamW trains.

    Attributes:
        takes: (name) -> whether a parameter has it.
        learning_rate: (flags, prefix of those of a model) -> its peak.
        rate_name: in the metrics.
        rate_label: in the line of a step.
    """

    takes: Callable[[str], bool]
    learning_rate: Callable[[StepConfig, str], float]
    rate_name: str
    rate_label: str


def second_rate() -> SecondRate | None:
    """That of a feature, of which one at most offers it, as `optimizers.SECOND_RATE`."""
    return next(iter(hooks("optimizers.SECOND_RATE")), None)


def further_optimizers() -> tuple[OptimizerKind, ...]:
    """Those of features, which offer them as `optimizers.OPTIMIZER`; `FlagNotes.choices` has their
    names."""
    return hooks("optimizers.OPTIMIZER")


def optimizer_of(config: StepConfig) -> OptimizerKind:
    """The optimizer that `--optimizer` names."""
    for optimizer in further_optimizers():
        if optimizer.name == config.run.optimizer:
            return optimizer
    return ADAMW
