"""One optimizer step over several micro-batches. The update is skipped on every rank if a number is not finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from dschat_ppo.common.dist import world_size
from dschat_ppo.common.heartbeat import heartbeat
from dschat_ppo.engine.skip_update import (
    Fault,
    StepResult,
    clear_offloaded_gradients,
    gradient_fault,
    has_dynamic_scale,
    has_overflow,
    has_plain_optimizer,
    is_at_smallest_scale,
    largest_gradient,
    loss_fault,
    plain_grad_norm,
    random_state,
    set_random_state,
    skip_update,
)
from dschat_ppo.types import Engine

MicroBatch = TypeVar("MicroBatch")


@dataclass(frozen=True)
class Gradients(Generic[MicroBatch]):
    """The accumulated gradients of an optimizer step, before its update. `fault` is the first loss that is not finite;
    `random_state` this rank's `random_state()` at the start of the step."""

    engine: Engine
    micro_batches: Sequence[MicroBatch]
    loss_of: Callable[[MicroBatch], Tensor]
    fault: Fault | None
    random_state: list[Tensor]


def optimizer_step(
    engine: Engine, micro_batches: Sequence[MicroBatch], loss_of: Callable[[MicroBatch], Tensor]
) -> StepResult:
    """Forward and backward over all micro-batches, equally many on every rank, then one update. Collective.

    If a loss or a gradient is not finite on any rank, every rank skips the update, at every ZeRO stage, and the result
    has a `fault`. An fp16 gradient that overflows although all losses are finite is no fault: the loss scaler lowers
    its scale, and the result has `overflow` set.

    `loss_of` is a micro-batch's part of the loss, already divided by the count of the *whole* step over all ranks, so
    that the parts add up. DeepSpeed averages gradients over ranks, hence the factor `world_size`.
    """
    return apply(accumulate(engine, micro_batches, loss_of))


def accumulate(
    engine: Engine, micro_batches: Sequence[MicroBatch], loss_of: Callable[[MicroBatch], Tensor]
) -> Gradients[MicroBatch]:
    """The first half of `optimizer_step`: forward and backward. `apply` must follow. Collective."""
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
    """The update, the second half of `optimizer_step`. Collective. `refused` (the same on every rank) skips it:
    weights, schedule and loss scale do not change."""
    engine, fault = gradients.engine, gradients.fault
    if refused or fault is not None:
        skip_update(engine)
        return StepResult(math.inf, applied=False, fault=fault)
    if has_plain_optimizer(engine):
        norm = plain_grad_norm(engine)
        if not norm.isfinite():
            skip_update(engine)
            return StepResult(math.inf, applied=False, fault=_find_gradient_fault(gradients))
        engine.step()
        return StepResult(float(norm), applied=True)
    scaled = has_dynamic_scale(engine)
    if scaled and is_at_smallest_scale(engine) and has_overflow(engine):
        skip_update(engine)
        return StepResult(math.inf, applied=False, fault=_find_gradient_fault(gradients))
    engine.step()
    if engine.was_step_applied():
        return StepResult(float(engine.get_global_grad_norm()), applied=True)
    clear_offloaded_gradients(engine)
    fault = None if scaled else _find_gradient_fault(gradients)
    return StepResult(math.inf, applied=False, overflow=scaled, fault=fault)


def apply_together(parts: Sequence[Gradients[Any]]) -> list[StepResult]:
    """Update several fp16 engines, or none of them if the gradients of one overflow. Collective. Only the engines whose
    gradients overflowed lower their loss scale."""
    bad = [has_overflow(part.engine) for part in parts]
    return [apply(part, refused=any(bad) and not own) for part, own in zip(parts, bad, strict=True)]


def _find_gradient_fault(gradients: Gradients[MicroBatch]) -> Fault:
    """Find the rank and micro-batch of the bad gradient by repeating forward and backward. Collective. The step's
    gradients must be gone; those of this pass are dropped too. The random streams do not advance."""
    engine, largest, after = gradients.engine, [], random_state()
    set_random_state(gradients.random_state)
    for number, micro_batch in enumerate(gradients.micro_batches, start=1):
        engine.set_gradient_accumulation_boundary(number == len(gradients.micro_batches))
        with largest_gradient(engine.module) as seen:
            engine.backward(gradients.loss_of(micro_batch) * world_size(), scale_wrt_gas=False)
            largest.append(seen())
    skip_update(engine)
    set_random_state(after)
    return gradient_fault(torch.stack(largest), gradients.random_state)


def learning_rates(engine: Engine) -> dict[str, float]:
    """`lr` of the next optimizer step, of weights that are not LoRA, if there are any; and `lora_lr` if weights with
    LoRA's own rate are trained as well as others."""
    peaks = [group["initial_lr"] for group in engine.optimizer.param_groups]
    own = {"lora_lr": float(engine.get_lr()[-1])} if peaks[0] != peaks[-1] else {}
    return {"lr": float(engine.get_lr()[0])} | own
