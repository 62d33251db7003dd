"""One optimizer step over several micro-batches. The update is skipped on every rank if a number is
not finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

import torch
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from torch import Tensor, nn

from dschat_ppo.common.dist import device, gather_cat, on_gpu, world_size
from dschat_ppo.common.heartbeat import heartbeat
from dschat_ppo.engine.optimizers import OptimizerKind, SecondRate, further_optimizers, second_rate
from dschat_ppo.types import Engine


@dataclass(frozen=True)
class Fault:
    """A NaN or infinity in an optimizer step. The same on every rank, except for `random_state`,
    which is this rank's at the start of the step.

    Attributes:
        kind: "loss", "gradient", or "norm" (each rank's gradients are finite, but their norm over
            all ranks is not).
        rank: the rank that computed it; for "norm" the rank of the largest gradient.
        losses_or_gradients: of each rank, for each micro-batch, the loss, or the largest absolute
            gradient.
    """

    kind: Literal["loss", "gradient", "norm"]
    rank: int
    micro_batch: int
    losses_or_gradients: list[list[float]]
    random_state: list[Tensor] = field(repr=False, compare=False)

    def __str__(self) -> str:
        position = f"rank {self.rank}, micro-batch {self.micro_batch}"
        if self.kind == "norm":
            return f"the norm of the gradients is not finite (the largest: {position})"
        return f"the {self.kind} is not finite ({position})"


@dataclass(frozen=True)
class StepResult:
    """Outcome of an optimizer step; the same on every rank. `grad_norm` is the global norm before
    clipping, inf if the update was skipped. `overflow`: fp16 gradients overflowed, and the loss
    scaler lowered its scale."""

    grad_norm: float
    applied: bool
    overflow: bool = False
    fault: Fault | None = None


def random_state() -> list[Tensor]:
    """RNG states of torch's default generators, which dropout draws from: of the CPU, and of this
    rank's GPU if any."""
    states = [torch.get_rng_state()]
    if on_gpu():
        states.append(torch.cuda.get_rng_state())
    return states


def set_random_state(state: Sequence[Tensor]) -> None:
    """Restore the result of `random_state()`. Without a GPU, the GPU's state is ignored."""
    torch.set_rng_state(state[0])
    if len(state) > 1 and on_gpu():
        torch.cuda.set_rng_state(state[1])


def _fault(of: Literal["loss", "gradient"], values: Tensor, state: list[Tensor]) -> Fault | None:
    """The first value of all ranks that is not finite. If all are finite: None for losses; for
    gradients the largest one. Collective.

    Args:
        values: (M,) fp32, the losses, or the largest absolute gradients, of this rank's
            micro-batches, M the same on every rank.
        state: as in `Fault.random_state`.
    """
    all_values = gather_cat(values.unsqueeze(0))  # (ranks, M)
    is_faulty = ~all_values.isfinite()
    kind: Literal["loss", "gradient", "norm"] = of
    if not is_faulty.any():
        if of == "loss":
            return None
        kind = "norm"
        is_faulty = all_values == all_values.max()
    rank, micro_batch = is_faulty.nonzero()[0].tolist()
    return Fault(kind, rank, micro_batch, all_values.tolist(), state)


@contextmanager
def largest_gradient(module: nn.Module) -> Iterator[Callable[[], Tensor]]:
    """Yields a function: the largest absolute gradient of the block's backward passes so far, a
    scalar; NaN counts."""
    maxima = [torch.zeros((), device=device())]

    def record(gradient: Tensor) -> None:
        if gradient.numel():
            maxima.append(gradient.detach().abs().max().float())

    hooks = [
        parameter.register_hook(record)
        for parameter in module.parameters()
        if parameter.requires_grad
    ]
    try:
        yield lambda: torch.stack(maxima).max()
    finally:
        for hook in hooks:
            hook.remove()


def has_plain_optimizer(engine: Engine) -> bool:
    """Whether the engine's optimizer is torch's own (stage 0 in fp32), which does not check its
    gradients."""
    return isinstance(engine.optimizer, torch.optim.Optimizer)


def loss_scale(engine: Engine) -> float:
    """Factor of the loss in the backward pass: 1 except in fp16, and in an engine that only
    evaluates."""
    scaler = None
    if engine.fp16_enabled():
        scaler = getattr(engine.optimizer, "loss_scaler", None)
    if scaler is None:
        return 1.0
    return float(scaler.cur_scale)


def has_overflow(engine: Engine) -> bool:
    """Whether an accumulated fp16 gradient is not finite on any rank. Collective."""
    return bool(engine.optimizer.has_overflow())


def skip_update(engine: Engine) -> None:
    """End an optimizer step without its update, and drop its gradients: weights, optimizer state,
    schedule and loss scale do not change. Collective, after the last backward pass. What has to be
    cleared depends on the ZeRO stage, so DeepSpeed's own `step` does it: the gradient norm is made
    to look infinite, and the loss scaler is replaced, so that its scale does not fall."""
    if has_plain_optimizer(engine):
        engine.zero_grad()
        engine.skipped_steps += 1
        return
    optimizer = engine.optimizer
    scaler = None
    if engine.fp16_enabled():
        scaler = engine.optimizer.loss_scaler
    with _infinite_norm(optimizer):
        if scaler is not None:
            optimizer.loss_scaler = LossScaler(scale=scaler.cur_scale)
        try:
            engine.step()
        finally:
            if scaler is not None:
                optimizer.loss_scaler = scaler
    clear_offloaded_gradients(engine)
    if engine.was_step_applied():
        raise RuntimeError(
            "DeepSpeed applied an update with an infinite gradient norm; it needs to be version"
            " 0.19.8"
        )


def clear_offloaded_gradients(engine: Engine) -> None:
    """Clear the fp32 gradients of this rank's partition after a skipped update. With bf16, stage 1
    or 2 and offload, DeepSpeed 0.19.8 does not clear them, and the next step would add to them."""
    optimizer = engine.optimizer
    if getattr(optimizer, "cpu_offload", False):
        optimizer.averaged_gradients.update(dict.fromkeys(optimizer.averaged_gradients))


@contextmanager
def _infinite_norm(optimizer: Any) -> Iterator[None]:
    """Make DeepSpeed's step see an infinite gradient norm. Its optimizers compute the norm in
    `scaled_global_norm` (stages 1 and 2), `_get_norm_groups` (stage 3), or `get_grads_for_norm`
    (the bf16 optimizer, used at stage 1 without offload)."""
    infinite = torch.tensor(torch.inf)
    norms = {
        "scaled_global_norm": infinite,
        "_get_norm_groups": [infinite],
        "get_grads_for_norm": ([infinite], {}),
    }
    method = next((name for name in norms if hasattr(optimizer, name)), None)
    if method is None:
        raise RuntimeError(
            f"DeepSpeed's {type(optimizer).__name__} cannot skip an update; set the ZeRO stage and "
            "the number format by flags, not in --deepspeed_config"
        )
    setattr(optimizer, method, lambda *_, **__: norms[method])
    try:
        yield
    finally:
        delattr(optimizer, method)


MicroBatch = TypeVar("MicroBatch")


@dataclass(frozen=True)
class Gradients(Generic[MicroBatch]):
    """The accumulated gradients of an optimizer step, before its update. `fault` is the first loss
    that is not finite; `random_state` this rank's `random_state()` at the start of the step."""

    engine: Engine
    micro_batches: Sequence[MicroBatch]
    loss_of: Callable[[MicroBatch], Tensor]
    fault: Fault | None
    random_state: list[Tensor]


def accumulate(
    engine: Engine, micro_batches: Sequence[MicroBatch], loss_of: Callable[[MicroBatch], Tensor]
) -> Gradients[MicroBatch]:
    """The first half of an optimizer step: forward and backward over all micro-batches, equally
    many on every rank; `apply` must follow. Collective. `loss_of` gives a micro-batch's term of the
    loss, divided by the count of the *whole* step over all ranks. DeepSpeed averages gradients over
    ranks, hence the factor `world_size`."""
    state = random_state()
    losses = []
    for ordinal, micro_batch in enumerate(micro_batches, start=1):
        engine.set_gradient_accumulation_boundary(ordinal == len(micro_batches))
        loss = loss_of(micro_batch) * world_size()
        losses.append(loss.detach())
        engine.backward(loss, scale_wrt_gas=False)
        heartbeat()
    fault = _fault("loss", torch.stack(losses), state)
    return Gradients(engine, micro_batches, loss_of, fault, state)


def apply(gradients: Gradients[MicroBatch], refused: bool = False) -> StepResult:
    """The second half: the update. Collective. `refused` (the same on every rank) skips it, and so
    does a loss or gradient that is not finite on any rank; the result then has a `fault`. An fp16
    gradient that overflows although all losses are finite is none: the loss scaler lowers its
    scale, and the result has `overflow` set."""
    engine = gradients.engine
    fault = gradients.fault
    if refused or fault is not None:
        skip_update(engine)
        return StepResult(math.inf, applied=False, fault=fault)
    if has_plain_optimizer(engine):
        gradients_of_step = [p.grad for p in engine.module.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients_of_step)
        if not norm.isfinite():
            skip_update(engine)
            return StepResult(math.inf, applied=False, fault=_find_gradient_fault(gradients))
        engine.step()
        return StepResult(float(norm), applied=True)
    scale_may_fall = False
    if engine.fp16_enabled() and engine.optimizer.loss_scaler.dynamic:
        scale_may_fall = True
        scaler = engine.optimizer.loss_scaler
        # a scale that cannot fall any more cures no overflow
        if scaler.cur_scale <= scaler.min_scale and has_overflow(engine):
            skip_update(engine)
            return StepResult(math.inf, applied=False, fault=_find_gradient_fault(gradients))
    engine.step()
    if engine.was_step_applied():
        return StepResult(float(engine.get_global_grad_norm()), applied=True)
    clear_offloaded_gradients(engine)
    if scale_may_fall:
        return StepResult(math.inf, applied=False, overflow=True)
    return StepResult(math.inf, applied=False, fault=_find_gradient_fault(gradients))


def apply_together(engine_gradients: Sequence[Gradients[Any]]) -> list[StepResult]:
    """Update several fp16 engines, or none if gradients of one overflow; only engines with such
    gradients lower their loss scale."""
    overflows = [has_overflow(gradients.engine) for gradients in engine_gradients]
    results = []
    for gradients, overflow in zip(engine_gradients, overflows, strict=True):
        results.append(apply(gradients, refused=any(overflows) and not overflow))
    return results


def _find_gradient_fault(gradients: Gradients[MicroBatch]) -> Fault | None:
    """Find the rank and micro-batch of the bad gradient by repeating forward and backward.
    Collective. The step's gradients must be gone; those of this pass are dropped too. The random
    generators do not advance."""
    engine = gradients.engine
    largest = []
    after = random_state()
    set_random_state(gradients.random_state)
    for ordinal, micro_batch in enumerate(gradients.micro_batches, start=1):
        engine.set_gradient_accumulation_boundary(ordinal == len(gradients.micro_batches))
        with largest_gradient(engine.module) as seen:
            engine.backward(gradients.loss_of(micro_batch) * world_size(), scale_wrt_gas=False)
            largest.append(seen())
    skip_update(engine)
    set_random_state(after)
    return _fault("gradient", torch.stack(largest), gradients.random_state)


def learning_rates(engine: Engine) -> dict[str, float]:
    """`lr` of the next step, of weights that have no second rate and are not taken from AdamW, if
    any; and the second rate, or that of another optimizer, under its name, if both train, at two
    rates."""
    first = engine.optimizer.param_groups[0]
    last = engine.optimizer.param_groups[-1]
    rates = {"lr": float(engine.get_lr()[0])}
    if first["initial_lr"] != last["initial_lr"]:
        rate: SecondRate | OptimizerKind | None = second_rate()
        for optimizer in further_optimizers():
            if last.get(optimizer.mark):
                rate = optimizer
        assert rate is not None
        rates[rate.rate_name] = float(engine.get_lr()[-1])
    return rates
