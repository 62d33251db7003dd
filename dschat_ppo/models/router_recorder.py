"""Record how the routers of a mixture of experts distribute tokens in a forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dschat_ppo.algorithms.router_loss import RouterLoad, router_load


@dataclass(frozen=True)
class RouterRecorder:
    """Records the loads of forward passes. `rows` (B,) bool: rows that count; `top_k`: experts per token."""

    rows: Tensor
    top_k: int
    loads: list[RouterLoad] = field(default_factory=list)


_RECORDERS: list[RouterRecorder | None] = [None]  # the last one is active; None: nothing is recorded


@contextmanager
def recorded_router(rows: Tensor, top_k: int) -> Iterator[RouterRecorder]:
    """Record the load of each forward pass of a `PolicyModel` or `ScalarModel` over micro-batches with these rows."""
    _RECORDERS.append(recorder := RouterRecorder(rows, top_k))
    try:
        yield recorder
    finally:
        _RECORDERS.pop()


@contextmanager
def unrecorded_router() -> Iterator[None]:
    """Record nothing in this block: for a second model, which is not the one that trains."""
    _RECORDERS.append(None)
    try:
        yield
    finally:
        _RECORDERS.pop()


def router_arguments() -> dict[str, bool]:
    """Arguments with which a model returns the logits of its routers, while they are recorded."""
    return {} if _RECORDERS[-1] is None else {"output_router_logits": True}


def record_router(output: Any, read: Tensor, lay_out: Callable[[Tensor], Tensor] = torch.flatten) -> None:
    """Record the load of a forward pass with `router_arguments`, if a recorder is active. `read` (B, T) bool: tokens
    whose states are read. `lay_out`: a mask (B, T) -> how often each of the N tokens that this rank's model ran is in
    it, bool or int64, of padded, packed or divided rows."""
    recorder = _RECORDERS[-1]
    if recorder is None:
        return
    counted = lay_out(read & recorder.rows.unsqueeze(1)).flatten()  # (N,)
    logits = [layer.reshape(len(counted), -1) for layer in output.router_logits if layer is not None]
    recorder.loads.append(router_load(logits, counted, recorder.top_k))
