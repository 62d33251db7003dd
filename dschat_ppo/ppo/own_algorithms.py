"""Estimators, policy losses, metrics and samplers of one's own: tried on made-up rows before a
model is loaded."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dschat_ppo.algorithms.actor_critic_losses import PolicyLossSettings, PolicyTerms, TokenLosses
from dschat_ppo.algorithms.advantage_estimators import AdvantageInputs
from dschat_ppo.common import dist
from dschat_ppo.common.own_functions import own_function, running_own
from dschat_ppo.config.ppo_config import PPOConfig
from dschat_ppo.config.schema import is_own_function
from dschat_ppo.errors import UserError
from dschat_ppo.types import Experience, FinishReason

METRICS, SAMPLER = "--metrics", "--sampler"
_B, _R = 4, 3


def check_own_functions(config: PPOConfig) -> None:
    """Run each estimator, policy loss and metric of one's own once, on four made-up rows.
    `UserError` if it does not return what docs/extending.md asks for."""
    estimator = config.algorithm.advantage_estimator
    loss = config.algorithm.policy_loss
    rows = made_up_rows()
    if estimator != "gae":
        rows = replace(rows, values=None)
    if len(config.data.data_path) > 1:
        rows = replace(rows, data_sources=torch.zeros(_B, dtype=torch.int64))
    if is_own_function(estimator):
        _try("--advantage_estimator", estimator, _check_estimator, rows)
    if is_own_function(loss):
        _try("--policy_loss", loss, _check_loss, rows)
    for name in config.ppo.metrics:
        if not is_own_function(name):
            raise UserError(f"{METRICS} {name}: expected FILE.py:FUNCTION")
    own_metrics(config.ppo.metrics, rows)
    if config.ppo.sampler is not None:
        if not is_own_function(config.ppo.sampler):
            raise UserError(f"{SAMPLER} {config.ppo.sampler}: expected FILE.py:CLASS")
        tried = OwnSampler(config.ppo.sampler, [{}] * _B, 0)
        tried.take(_B)
        tried.update(torch.arange(_B), torch.zeros(_B))
        tried.load_state_dict(tried.state_dict())


class OwnSampler:
    """Chooses prompts by the class of `--sampler`, in place of an `IndexStream`. What its methods
    return on rank 0 holds for all ranks. `rows`: the data row of each prompt. Its methods are
    collective."""

    def __init__(self, name: str, rows: Sequence[dict[str, Any]], seed: int):
        self.name = name
        self.count = len(rows)
        self.order = list[int]()  # of all prompts taken; its places number the groups
        with running_own(f"{SAMPLER} {name}:", name):
            self.own = own_function(SAMPLER, name)(rows, seed)

    @property
    def taken(self) -> int:
        return len(self.order)

    def take(self, count: int) -> list[int]:
        """The next `count` prompts."""
        with running_own(f"{SAMPLER} {self.name}: take({count}):", self.name):
            found = [int(index) for index in self.own.take(count)]
            if len(found) != count or not all(0 <= index < self.count for index in found):
                raise ValueError(
                    f"it must return {count} numbers from 0 to {self.count - 1}, got {found[:8]}"
                )
        found = dist.broadcast_object(found)
        self.order += found
        return found

    def update(self, groups: Tensor, scores: Tensor) -> None:
        """Tell it the scores (N,) of answers, whose prompts have the numbers `groups` (N,)."""
        if hasattr(self.own, "update"):
            with running_own(f"{SAMPLER} {self.name}: update:", self.name):
                self.own.update([self.order[number] for number in groups.tolist()], scores.tolist())

    def state_dict(self) -> dict[str, Any]:
        """The state, with that of the class if it has any."""
        with running_own(f"{SAMPLER} {self.name}: state_dict:", self.name):
            if hasattr(self.own, "state_dict"):
                own = self.own.state_dict()
            else:
                own = None
        return {"order": list(self.order), "own": dist.broadcast_object(own)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict()`."""
        self.order = list(state["order"])
        if state["own"] is not None:
            with running_own(f"{SAMPLER} {self.name}: load_state_dict:", self.name):
                self.own.load_state_dict(state["own"])


def own_metrics(names: Sequence[str], rows: Experience) -> dict[str, float]:
    """The numbers that the functions of `--metrics` give for the N rows of a PPO step, by
    `own/NAME`."""
    found: dict[str, float] = {}
    for name in names:
        found |= _try(METRICS, name, partial(_numbers_of, name), rows)
    return found


def _numbers_of(name: str, function: Callable[..., Any], rows: Experience) -> dict[str, float]:
    """A number under the function's name, or a dict of numbers."""
    found = function(rows)
    if isinstance(found, Mapping):
        by_name = found
    else:
        by_name = {name.rpartition(":")[2]: found}
    for key, value in by_name.items():
        is_number = isinstance(value, numbers.Real) or (
            isinstance(value, Tensor) and value.numel() == 1
        )
        if not (isinstance(key, str) and is_number):
            raise TypeError(
                f"it must return a number or a dict of numbers by name, not {key!r}:"
                f" {type(value).__name__}"
            )
    return {f"own/{key}": float(value) for key, value in by_name.items()}


def _try(
    flag: str, name: str, check: Callable[[Callable[..., Any], Experience], Any], rows: Experience
) -> Any:
    function = own_function(flag, name)
    with running_own(f"{flag} {name}:", name):
        return check(function, rows)


def _check_estimator(function: Callable[..., Any], rows: Experience) -> None:
    inputs = AdvantageInputs(
        rows.rewards,
        None,
        rows.response_mask,
        rows.groups,
        None,
        0.9,
        0.9,
        scores=rows.scores,
        source_scores=rows.source_scores,
        source_weights=torch.ones(1).double(),
    )
    found = function(inputs)
    if not (isinstance(found, tuple) and len(found) == 2):
        raise TypeError(f"it must return (advantages, returns), not {type(found).__name__}")
    for word, values in zip(("advantages", "returns"), found, strict=True):
        _require_per_token(word, values, rows.rewards)
        if values[~rows.response_mask].any():
            raise ValueError(f"{word} must be 0 outside response_mask")


def _check_loss(function: Callable[..., Any], rows: Experience) -> None:
    assert rows.old_logprobs is not None
    logprobs = rows.old_logprobs.clone().requires_grad_()
    terms = PolicyTerms(logprobs, rows.old_logprobs, rows.advantages, rows.loss_mask)
    found = function(terms, PolicyLossSettings())
    if not isinstance(found, TokenLosses):
        raise TypeError(f"it must return TokenLosses, not {type(found).__name__}")
    _require_per_token("losses", found.losses, logprobs)
    _require_per_token("ratio", found.ratio, logprobs)
    _require_per_token("clipped", found.clipped, rows.loss_mask)
    if not found.losses.requires_grad:
        raise ValueError("losses have no gradient: they must be computed from terms.logprobs")
    if found.losses[~rows.loss_mask].any():
        raise ValueError("losses must be 0 outside terms.mask")


def _require_per_token(word: str, values: Any, like: Tensor) -> None:
    if not isinstance(values, Tensor) or values.shape != like.shape or values.dtype != like.dtype:
        if isinstance(values, Tensor):
            got = f"{tuple(values.shape)} {values.dtype}"
        else:
            got = type(values).__name__
        raise ValueError(f"{word} must be a tensor {tuple(like.shape)} {like.dtype}, got {got}")
    if values.is_floating_point() and not bool(values.isfinite().all()):
        raise ValueError(f"{word} are not finite")


def made_up_rows() -> Experience:
    """Two answers to each of two prompts, of 3, 2, 1 and 0 tokens."""
    mask = torch.arange(_R) < torch.tensor([[3], [2], [1], [0]])  # (B, R)
    scores = torch.tensor([1.0, 0.0, -1.0, 2.0])  # (B,)
    per_token = torch.where(mask, torch.linspace(-1.0, -0.1, _B * _R).view(_B, _R), 0.0)  # (B, R)
    made: dict[str, Tensor] = {
        field.name: per_token
        for field in fields(Experience)
        if field.default is MISSING and field.name != "selected"
    }
    made |= {
        "prompt_ids": torch.ones(_B, 2, dtype=torch.int64),
        "prompt_mask": torch.ones(_B, 2, dtype=torch.bool),
        "response_ids": torch.ones(_B, _R, dtype=torch.int64),
        "response_mask": mask,
        "loss_mask": mask,
        "finish_reason": torch.full((_B,), FinishReason.EOS, dtype=torch.int8),
        "source_scores": scores.unsqueeze(1),
        "scores": scores,
        "baselines": scores,
        "penalised_scores": scores,
        "groups": torch.tensor([0, 0, 1, 1]),
        "row_indices": torch.arange(_B),
        "loss_weights": mask.float(),
    }
    return Experience(**made, selected=None)
