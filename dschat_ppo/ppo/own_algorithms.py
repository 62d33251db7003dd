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
from dschat_ppo.types import Experience, FinishReason, record_of

METRICS = "--metrics"
SAMPLER = "--sampler"
# shape of the made-up rows
_B = 4
_R = 3


def check_own_functions(config: PPOConfig) -> None:
    """Run each estimator, policy loss and metric of one's own once, on four made-up rows.
    `UserError` if it does not return what docs/extending.md asks for."""
    estimator = config.algorithm.advantage_estimator
    loss = config.algorithm.policy_loss
    rows = made_up_rows()
    if estimator != "gae":  # then there is no critic
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
        sampler = OwnSampler(config.ppo.sampler, [{}] * _B, 0)
        sampler.take(_B)
        sampler.update(torch.arange(_B), torch.zeros(_B))
        sampler.load_state_dict(sampler.state_dict())


class OwnSampler:
    """Chooses prompts by the class of `--sampler`, in place of an `IndexStream`. What its methods
    return on rank 0 holds for all ranks. Its methods are collective.

    Attributes:
        name: `FILE.py:CLASS`.
        row_count: of the prompts.
        order: the row indices of all prompts that were taken; rows of a rollout name their prompt
            by its index in this list, their group.
        chooser: the object of the user's class.
    """

    def __init__(self, name: str, rows: Sequence[dict[str, Any]], seed: int):
        """Make an object of the class; `rows`: the data row of each prompt."""
        self.name = name
        self.row_count = len(rows)
        self.order = list[int]()
        with running_own(f"{SAMPLER} {name}:", name):
            self.chooser = own_function(SAMPLER, name)(rows, seed)

    @property
    def taken(self) -> int:
        return len(self.order)

    def take(self, count: int) -> list[int]:
        """The row indices of the next `count` prompts."""
        with running_own(f"{SAMPLER} {self.name}: take({count}):", self.name):
            indices = [int(index) for index in self.chooser.take(count)]
            if len(indices) != count or not all(0 <= index < self.row_count for index in indices):
                raise ValueError(
                    f"it must return {count} numbers from 0 to {self.row_count - 1}, got"
                    f" {indices[:8]}"
                )
        indices = dist.broadcast_object(indices)
        self.order += indices
        return indices

    def update(self, groups: Tensor, scores: Tensor) -> None:
        """Tell it the scores of responses (N,), whose prompts have the indices `groups` (N,) in
        `order`."""
        if hasattr(self.chooser, "update"):
            with running_own(f"{SAMPLER} {self.name}: update:", self.name):
                indices = [self.order[group] for group in groups.tolist()]
                self.chooser.update(indices, scores.tolist())

    def state_dict(self) -> dict[str, Any]:
        """The order, and the state of the user's object if it has any."""
        state = None
        with running_own(f"{SAMPLER} {self.name}: state_dict:", self.name):
            if hasattr(self.chooser, "state_dict"):
                state = self.chooser.state_dict()
        return {"order": list(self.order), "chooser": dist.broadcast_object(state)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict()`."""
        self.order = list(state["order"])
        if state["chooser"] is not None:
            with running_own(f"{SAMPLER} {self.name}: load_state_dict:", self.name):
                self.chooser.load_state_dict(state["chooser"])


def own_metrics(names: Sequence[str], rows: Experience) -> dict[str, float]:
    """The numbers that the functions of `--metrics` give for the N rows of a PPO step, by
    `own/NAME`."""
    metrics: dict[str, float] = {}
    for name in names:
        metrics |= _try(METRICS, name, partial(_metrics_of, name), rows)
    return metrics


def _metrics_of(name: str, function: Callable[..., Any], rows: Experience) -> dict[str, float]:
    """What a function of `--metrics` returns: a number, by the function's name, or a dict of
    numbers."""
    result = function(rows)
    by_name = result
    if not isinstance(result, Mapping):
        by_name = {name.rpartition(":")[2]: result}
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
    """What `check` returns for the function that a flag names; `UserError` with the flag if it
    raises anything."""
    function = own_function(flag, name)
    with running_own(f"{flag} {name}:", name):
        return check(function, rows)


def _check_estimator(function: Callable[..., Any], rows: Experience) -> None:
    """Check that an estimator returns advantages and returns of the made-up rows."""
    inputs = AdvantageInputs(
        rewards=rows.rewards,
        values=None,
        response_mask=rows.response_mask,
        groups=rows.groups,
        baselines=None,
        gamma=0.9,
        lam=0.9,
        scores=rows.scores,
        source_scores=rows.source_scores,
        source_weights=torch.ones(1).double(),
    )
    estimates = function(inputs)
    if not (isinstance(estimates, tuple) and len(estimates) == 2):
        raise TypeError(f"it must return (advantages, returns), not {type(estimates).__name__}")
    for word, values in zip(("advantages", "returns"), estimates, strict=True):
        _require_per_token(word, values, rows.rewards)
        if values[~rows.response_mask].any():
            raise ValueError(f"{word} must be 0 outside response_mask")


def _check_loss(function: Callable[..., Any], rows: Experience) -> None:
    """Check that a policy loss returns losses of the made-up rows that have a gradient."""
    assert rows.old_logprobs is not None
    logprobs = rows.old_logprobs.clone().requires_grad_()
    terms = PolicyTerms(logprobs, rows.old_logprobs, rows.advantages, rows.loss_mask)
    token_losses = function(terms, PolicyLossSettings())
    if not isinstance(token_losses, TokenLosses):
        raise TypeError(f"it must return TokenLosses, not {type(token_losses).__name__}")
    _require_per_token("losses", token_losses.losses, logprobs)
    _require_per_token("ratio", token_losses.ratio, logprobs)
    _require_per_token("clipped", token_losses.clipped, rows.loss_mask)
    if not token_losses.losses.requires_grad:
        raise ValueError("losses have no gradient: they must be computed from terms.logprobs")
    if token_losses.losses[~rows.loss_mask].any():
        raise ValueError("losses must be 0 outside terms.mask")


def _require_per_token(word: str, values: Any, like: Tensor) -> None:
    """Check that `values`, which messages call `word`, is a finite tensor of the shape and dtype of
    `like`."""
    if not isinstance(values, Tensor) or values.shape != like.shape or values.dtype != like.dtype:
        got = type(values).__name__
        if isinstance(values, Tensor):
            got = f"{tuple(values.shape)} {values.dtype}"
        raise ValueError(f"{word} must be a tensor {tuple(like.shape)} {like.dtype}, got {got}")
    if values.is_floating_point() and not bool(values.isfinite().all()):
        raise ValueError(f"{word} are not finite")


def made_up_rows() -> Experience:
    """Two responses to each of two prompts, of 3, 2, 1 and 0 tokens."""
    mask = torch.arange(_R) < torch.tensor([[3], [2], [1], [0]])  # (B, R)
    scores = torch.tensor([1.0, 0.0, -1.0, 2.0])  # (B,)
    per_token = torch.where(mask, torch.linspace(-1.0, -0.1, _B * _R).view(_B, _R), 0.0)  # (B, R)
    columns: dict[str, Tensor] = {}
    for field in fields(Experience):
        is_required = field.default is MISSING and field.default_factory is MISSING
        if is_required and field.name != "selected":
            columns[field.name] = per_token
    columns |= {
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
    return record_of(Experience, columns)
