"""How the routers of a mixture of experts distribute tokens: recorded in forward passes; the loss that balances it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


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


@dataclass(frozen=True)
class RouterLoad:
    """How routers distribute tokens over E experts: sums over tokens and layers, which add up over micro-batches.

    `chosen` (E,) fp32: how often each expert is among a token's top k. `probability` (E,) fp32: the sum of its router
    probabilities, with gradient. `count` fp32, a scalar: tokens x layers.
    """

    chosen: Tensor
    probability: Tensor
    count: Tensor


def router_load(logits: Sequence[Tensor], counted: Tensor, top_k: int) -> RouterLoad:
    """The load of one forward pass, from the `logits` (N, E) of each layer's router for N tokens. `counted` (N,) bool
    or int64 is how often each token counts: 0 on padding, above 1 for a token of several rows."""
    times = counted[counted > 0].float().unsqueeze(1)  # (n, 1)
    kept = [torch.softmax(layer[counted > 0].float(), dim=-1) for layer in logits]  # (n, E) each
    chosen = torch.zeros_like(kept[0][:0].sum(dim=0))  # (E,)
    for probabilities in kept:
        experts = probabilities.topk(top_k, dim=-1).indices  # (n, k)
        chosen = chosen.index_add(0, experts.flatten(), times.expand_as(experts).flatten())
    probability = torch.stack([(times * layer).sum(dim=0) for layer in kept]).sum(dim=0)
    return RouterLoad(chosen.detach(), probability, counted.sum().float() * len(kept))


def load_balancing_loss(probability: Tensor, chosen: Tensor, count: Tensor) -> Tensor:
    """A part of `E sum_i f_i P_i` (Fedus et al. 2021, equations 4 to 6, over the tokens of all layers).

    `f_i` is the share of tokens that choose expert i, and `P_i` its mean probability, both over the whole optimizer
    step; with top-k routing a balanced load gives k. The loss is linear in `P`, so the parts of micro-batches add up:
    `probability` (E,) are sums of one micro-batch, `chosen` (E,) and `count` those of the whole step.
    """
    return len(chosen) * (chosen / count * (probability / count)).sum()
