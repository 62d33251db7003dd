"""A model, an optimizer and a schedule -> a DeepSpeed engine; and one optimizer step over several micro-batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import deepspeed
import torch
from torch import Tensor, nn
from transformers import get_scheduler

from dschat_ppo.common.dist import world_size
from dschat_ppo.common.heartbeat import heartbeat
from dschat_ppo.common.logging import quiet_prints
from dschat_ppo.engine.ds_config import Config
from dschat_ppo.engine.skip_update import (
    Fault,
    StepResult,
    forget_gradients,
    gradient_fault,
    has_dynamic_scale,
    is_at_smallest_scale,
    is_plain,
    largest_gradient,
    loss_fault,
    overflows,
    plain_norm,
    random_state,
    refuse,
    set_random_state,
)
from dschat_ppo.runtime.stop_requests import subprocesses_may_stop

MicroBatch = TypeVar("MicroBatch")


@dataclass(frozen=True)
class OptimizerSettings:
    """AdamW, its learning rate, and the schedule in optimizer steps."""

    learning_rate: float
    weight_decay: float
    schedule: str
    warmup_steps: int
    total_steps: int
    betas: tuple[float, float]
    epsilon: float


def _parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices decay; biases and norm weights (one dimension) do not."""
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for parameter in model.parameters():
        if parameter.requires_grad:
            shape = parameter.ds_shape if hasattr(parameter, "ds_shape") else parameter.shape  # ZeRO-3 empties `shape`
            groups[len(shape) > 1].append(parameter)
    decays = {True: weight_decay, False: 0.0}
    return [{"params": groups[kind], "weight_decay": decays[kind]} for kind in (True, False) if groups[kind]]


def _optimizer(model: nn.Module, settings: OptimizerSettings, config: Config) -> torch.optim.Optimizer:
    groups = _parameter_groups(model, settings.weight_decay)
    offloaded = config["zero_optimization"].get("offload_optimizer", {}).get("device", "none") != "none"
    if offloaded:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        with subprocesses_may_stop("compiled an operator"):
            return DeepSpeedCPUAdam(groups, lr=settings.learning_rate, betas=settings.betas, eps=settings.epsilon)
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=settings.betas, eps=settings.epsilon, fused=True)


def train_engine(model: nn.Module, config: Config, settings: OptimizerSettings) -> Any:
    """A DeepSpeed engine that trains all parameters of `model` with AdamW, in training mode."""
    optimizer = _optimizer(model, settings, config)
    scheduler = get_scheduler(
        settings.schedule,
        optimizer=optimizer,
        num_warmup_steps=settings.warmup_steps,
        num_training_steps=settings.total_steps,
    )
    with quiet_prints():
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config)
    engine.train()  # transformers loads models in eval mode
    return engine


def eval_engine(model: nn.Module, config: Config) -> Any:
    """A DeepSpeed engine that only runs forward, in eval mode."""
    model.requires_grad_(False)
    with quiet_prints():
        engine, *_ = deepspeed.initialize(model=model, config=config)
    engine.eval()
    return engine


@dataclass(frozen=True)
class Gradients(Generic[MicroBatch]):
    """An optimizer step whose gradients are there and whose update is not made yet.

    `micro_batches` and `loss_of` as in `optimizer_step`; `fault`, the loss that is not finite, if any;
    `random_state` as the step began.
    """

    engine: Any
    micro_batches: Sequence[MicroBatch]
    loss_of: Callable[[MicroBatch], Tensor]
    fault: Fault | None
    random_state: list[Tensor]


def optimizer_step(
    engine: Any, micro_batches: Sequence[MicroBatch], loss_of: Callable[[MicroBatch], Tensor]
) -> StepResult:
    """Forward and backward over all micro-batches, then one update, unless a number is not finite.

    A loss or gradient that is not finite on any rank leaves the update out on every rank, at every ZeRO stage, and is
    the result's `fault`. Only an fp16 gradient beside finite losses is the loss scaler's business: `overflow`.

    Args:
        engine: DeepSpeed engine in training.
        micro_batches: this rank's share of the step; the same number on every rank.
        loss_of: a micro-batch's part of the loss, already divided by the count of the *whole* step over all ranks,
            so that parts add up. DeepSpeed averages gradients over ranks, hence the factor of `world_size`.
    """
    return apply(accumulate(engine, micro_batches, loss_of))


def accumulate(
    engine: Any, micro_batches: Sequence[MicroBatch], loss_of: Callable[[MicroBatch], Tensor]
) -> Gradients[MicroBatch]:
    """The first part of `optimizer_step`: forward and backward. `apply` must follow. Collective."""
    state = random_state()
    losses = []
    for number, micro_batch in enumerate(micro_batches, start=1):
        engine.set_gradient_accumulation_boundary(number == len(micro_batches))
        loss = loss_of(micro_batch) * world_size()
        losses.append(loss.detach())
        engine.backward(loss, scale_wrt_gas=False)
        heartbeat()
    return Gradients(engine, micro_batches, loss_of, loss_fault(torch.stack(losses), state), state)


def apply(gradients: Gradients[MicroBatch], refused: bool = False) -> StepResult:
    """The second part of `optimizer_step`: the update. Collective.

    Args:
        gradients: of `accumulate`.
        refused: leave the update out (the same on every rank); weights, schedule and loss scale stay as they are.
    """
    engine, fault = gradients.engine, gradients.fault
    if refused or fault is not None:
        refuse(engine)
        return StepResult(math.inf, applied=False, fault=fault)
    if is_plain(engine):
        norm = plain_norm(engine)
        if not norm.isfinite():
            refuse(engine)
            return StepResult(math.inf, applied=False, fault=_locate(gradients))
        engine.step()
        return StepResult(float(norm), applied=True)
    scaled = has_dynamic_scale(engine)
    if scaled and is_at_smallest_scale(engine) and overflows(engine):
        refuse(engine)
        return StepResult(math.inf, applied=False, fault=_locate(gradients))
    engine.step()
    if engine.was_step_applied():
        return StepResult(float(engine.get_global_grad_norm()), applied=True)
    forget_gradients(engine)
    return StepResult(math.inf, applied=False, overflow=scaled, fault=None if scaled else _locate(gradients))


def apply_together(parts: Sequence[Gradients[Any]]) -> list[StepResult]:
    """The updates of several fp16 engines, or none of them where the gradients of one overflow. Collective.

    The scale of the engine whose gradients overflowed falls, that of the others stays: theirs were in range.
    """
    bad = [overflows(part.engine) for part in parts]
    return [apply(part, refused=any(bad) and not own) for part, own in zip(parts, bad, strict=True)]


def _locate(gradients: Gradients[MicroBatch]) -> Fault:
    """Which rank and micro-batch the bad gradients came from, found by forward and backward once more. Collective.

    The gradients of the step were thrown away before, and those of this pass are. The random streams stay where they
    were.
    """
    engine, largest, after = gradients.engine, [], random_state()
    set_random_state(gradients.random_state)
    for number, micro_batch in enumerate(gradients.micro_batches, start=1):
        engine.set_gradient_accumulation_boundary(number == len(gradients.micro_batches))
        with largest_gradient(engine.module) as seen:
            engine.backward(gradients.loss_of(micro_batch) * world_size(), scale_wrt_gas=False)
            largest.append(seen())
    refuse(engine)
    set_random_state(after)
    return gradient_fault(torch.stack(largest), gradients.random_state)


def learning_rate(engine: Any) -> float:
    """Learning rate that the next optimizer step will use."""
    return float(engine.get_lr()[0])
