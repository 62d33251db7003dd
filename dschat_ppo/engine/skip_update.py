"""Updates that must not be applied: how DeepSpeed is made to leave one out, and where its bad number came from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from torch import Tensor, nn

from dschat_ppo.common.dist import device, gather_cat


@dataclass(frozen=True)
class Fault:
    """The bad number of an optimizer step. The same on every rank, but for `random_state`.

    Attributes:
        kind: "loss", "gradient", or "norm" (each rank's gradients are finite, their norm over all ranks is not).
        rank: where it was made; with "norm" the rank of the largest gradient.
        micro_batch: number on that rank, from 0.
        numbers: of each rank and micro-batch the loss, or the largest absolute gradient.
        random_state: this rank's `random_state()` as the step began.
    """

    kind: Literal["loss", "gradient", "norm"]
    rank: int
    micro_batch: int
    numbers: list[list[float]]
    random_state: list[Tensor] = field(repr=False, compare=False)

    def __str__(self) -> str:
        place = f"rank {self.rank}, micro-batch {self.micro_batch}"
        if self.kind == "norm":
            return f"the norm of the gradients is not finite (the largest: {place})"
        return f"the {self.kind} is not finite ({place})"


@dataclass(frozen=True)
class StepResult:
    """What became of an optimizer step; the same on every rank.

    Attributes:
        grad_norm: global norm before clipping; inf where the update was not applied.
        applied: whether weights, optimizer state and schedule moved.
        overflow: fp16 gradients overflowed, the loss scaler lowered its scale.
        fault: the bad number for which the update was left out, if any.
    """

    grad_norm: float
    applied: bool
    overflow: bool = False
    fault: Fault | None = None


def random_state() -> list[Tensor]:
    """States of torch's default streams (dropout draws from them): of the CPU, and of this rank's GPU if it has one."""
    return [torch.get_rng_state()] + ([torch.cuda.get_rng_state()] if torch.cuda.is_available() else [])


def set_random_state(state: Sequence[Tensor]) -> None:
    """Go on from `random_state()`; a GPU's part is left out where there is no GPU."""
    torch.set_rng_state(state[0])
    if len(state) > 1 and torch.cuda.is_available():
        torch.cuda.set_rng_state(state[1])


def loss_fault(losses: Tensor, state: list[Tensor]) -> Fault | None:
    """The first loss that is not finite, over all ranks. Collective.

    Args:
        losses: (M,) fp32, of this rank's micro-batches; M is the same on every rank.
        state: `random_state()` as the step began.
    """
    everywhere = gather_cat(losses.unsqueeze(0))
    if bool(everywhere.isfinite().all()):
        return None
    rank, micro_batch = (~everywhere.isfinite()).nonzero()[0].tolist()
    return Fault("loss", rank, micro_batch, everywhere.tolist(), state)


def gradient_fault(largest: Tensor, state: list[Tensor]) -> Fault:
    """Where gradients are not finite, or largest if their norm alone is not. Collective.

    Args:
        largest: (M,) fp32, the largest absolute gradient of each of this rank's micro-batches.
        state: `random_state()` as the step began.
    """
    everywhere = gather_cat(largest.unsqueeze(0))
    bad = ~everywhere.isfinite()
    places = bad if bool(bad.any()) else everywhere == everywhere.max()
    rank, micro_batch = places.nonzero()[0].tolist()
    return Fault("gradient" if bool(bad.any()) else "norm", rank, micro_batch, everywhere.tolist(), state)


@contextmanager
def largest_gradient(module: nn.Module) -> Iterator[Callable[[], Tensor]]:
    """Gives a function that tells the largest absolute gradient (NaN counts as one) that backward made inside."""
    found = [torch.zeros((), device=device())]

    def see(gradient: Tensor) -> None:
        if gradient.numel():
            found.append(gradient.detach().abs().max().float())

    hooks = [parameter.register_hook(see) for parameter in module.parameters() if parameter.requires_grad]
    try:
        yield lambda: torch.stack(found).max()
    finally:
        for hook in hooks:
            hook.remove()


def is_plain(engine: Any) -> bool:
    """Whether the engine's optimizer is torch's own (stage 0 in fp32), which checks nothing."""
    return isinstance(engine.optimizer, torch.optim.Optimizer)


def plain_norm(engine: Any) -> Tensor:
    """Norm of the gradients of an engine with a plain optimizer; the same on every rank, after the last backward."""
    gradients = [p.grad for p in engine.module.parameters() if p.grad is not None]
    return torch.nn.utils.get_total_norm(gradients)


def has_dynamic_scale(engine: Any) -> bool:
    """Whether the engine trains in fp16 with a loss scale that falls after an overflow."""
    return bool(engine.fp16_enabled()) and engine.optimizer.loss_scaler.dynamic


def loss_scale(engine: Any) -> float:
    """What the loss is multiplied by before backward: 1 but in fp16."""
    return float(engine.optimizer.loss_scaler.cur_scale) if engine.fp16_enabled() else 1.0


def overflows(engine: Any) -> bool:
    """Whether the accumulated fp16 gradients are not finite on some rank. Collective."""
    return bool(engine.optimizer.has_overflow())


def is_at_smallest_scale(engine: Any) -> bool:
    """Whether the loss scale cannot fall further, so that an overflow is no longer a matter of scale."""
    scaler = engine.optimizer.loss_scaler
    return scaler.cur_scale <= scaler.min_scale


def refuse(engine: Any) -> None:
    """End an optimizer step without its update: gradients are thrown away, weights, optimizer state, schedule and loss
    scale stay. Collective, after the last backward.

    DeepSpeed's own `step` does it, as after an overflow, told that the gradients' norm is infinite: what there is to
    clear differs from stage to stage. Only the loss scaler must not learn of it.

    Raises:
        RuntimeError: DeepSpeed applied the update all the same.
    """
    if is_plain(engine):
        engine.zero_grad()
        engine.skipped_steps += 1
        return
    with _infinite_norm(engine.optimizer), _scale_kept(engine):
        engine.step()
    forget_gradients(engine)
    if engine.was_step_applied():
        raise RuntimeError("DeepSpeed applied an update with an infinite gradient norm; it needs to be version 0.19.8")


def forget_gradients(engine: Any) -> None:
    """What DeepSpeed 0.19.8 forgets to clear when it leaves an update out: with bf16, stage 1 or 2 and offload, the
    fp32 gradients of this rank's partition, which the next step would be added to."""
    optimizer = engine.optimizer
    if getattr(optimizer, "cpu_offload", False):
        optimizer.averaged_gradients.update(dict.fromkeys(optimizer.averaged_gradients))


@contextmanager
def _infinite_norm(optimizer: Any) -> Iterator[None]:
    """Inside, DeepSpeed's step finds the norm of the gradients to be infinite.

    What its optimizers take the norm from: `scaled_global_norm` at stages 1 and 2, `_get_norm_groups` at stage 3,
    `get_grads_for_norm` in the bf16 optimizer, which DeepSpeed takes at stage 1 without offload.
    """
    infinite = torch.tensor(torch.inf)
    answers = {
        "scaled_global_norm": infinite,
        "_get_norm_groups": [infinite],
        "get_grads_for_norm": ([infinite], {}),
    }
    name = next((name for name in answers if hasattr(optimizer, name)), None)
    if name is None:
        raise RuntimeError(f"DeepSpeed's {type(optimizer).__name__} cannot be told to leave an update out; leave stage "
                           "and number format to the flags, not to --deepspeed_config")  # fmt: skip
    setattr(optimizer, name, lambda *_, **__: answers[name])
    try:
        yield
    finally:
        delattr(optimizer, name)


@contextmanager
def _scale_kept(engine: Any) -> Iterator[None]:
    """Inside, the fp16 loss scale stays as it is."""
    if not engine.fp16_enabled():
        yield
        return
    optimizer = engine.optimizer
    own = optimizer.loss_scaler
    optimizer.loss_scaler = LossScaler(scale=own.cur_scale)
    try:
        yield
    finally:
        optimizer.loss_scaler = own
