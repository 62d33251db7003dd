"""Record how the routers of a mixture of experts distribute tokens in a forward pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from dschat_ppo.algorithms.router_loss import RouterLoad, router_load


@dataclass(frozen=True)
class RouterRecorder:
    """Records the loads of forward passes. `rows` (B,) bool: rows that count; `top_k`: experts per token."""

    rows: Tensor
    top_k: int
    loads: list[RouterLoad] = field(default_factory=list)


_RECORDERS: list[RouterRecorder] = []


@contextmanager
def recorded_router(rows: Tensor, top_k: int) -> Iterator[RouterRecorder]:
    """Record the load of each forward pass of a `PolicyModel` or `ScalarModel` over micro-batches with these rows."""
    _RECORDERS.append(RouterRecorder(rows, top_k))
    try:
        yield _RECORDERS[-1]
    finally:
        _RECORDERS.pop()


def router_arguments() -> dict[str, bool]:
    """Arguments with which a model returns the logits of its routers, while they are recorded."""
    return {"output_router_logits": True} if _RECORDERS else {}


def record_router(output: Any, real: Tensor, packed: bool) -> None:
    """Record the load of a forward pass, if a recorder is active.

    Args:
        output: of a model called with `router_arguments`.
        real: (B, T) bool, True on the tokens that the model computes states of.
        packed: whether the model read only those tokens, row after row, and not all B x T.
    """
    if not _RECORDERS:
        return
    recorder = _RECORDERS[-1]
    counted = real & recorder.rows.unsqueeze(1)
    counted = counted[real] if packed else counted.flatten()
    logits = [layer.reshape(len(counted), -1) for layer in output.router_logits if layer is not None]
    recorder.loads.append(router_load(logits, counted, recorder.top_k))
