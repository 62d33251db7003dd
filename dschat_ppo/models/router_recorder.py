"""How the routers of a mixture of experts distribute tokens: recorded in forward passes; the loss
that balances it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# rows that count, experts per token, recorded loads; the last one is active; None: nothing is
# recorded
_RECORDED: list[tuple[Tensor, int, list[RouterLoad]] | None] = [None]


@contextmanager
def recorded_router(rows: Tensor | None, top_k: int = 0) -> Iterator[list[RouterLoad]]:
    """Record the load of each forward pass of a `PolicyModel` or `ScalarModel` over micro-batches,
    of which the `rows` (B,) bool count, by the `top_k` experts of each token. None: record nothing,
    of a model that does not train."""
    loads: list[RouterLoad] = []
    recorder = None
    if rows is not None:
        recorder = rows, top_k, loads
    _RECORDED.append(recorder)
    try:
        yield loads
    finally:
        _RECORDED.pop()


def router_arguments() -> dict[str, bool]:
    """Arguments with which a model returns the logits of its routers, while they are recorded."""
    if _RECORDED[-1] is None:
        return {}
    return {"output_router_logits": True}


def record_router(
    output: Any, read: Tensor, lay_out: Callable[[Tensor], Tensor] = torch.flatten
) -> None:
    """Record the load of a forward pass with `router_arguments`, if it is wanted. `read` (B, T)
    bool: tokens whose states are read. `lay_out`: a mask (B, T) -> how often each of the N tokens
    that this rank's model ran is in it, bool or int64, of padded, packed or divided rows."""
    if _RECORDED[-1] is None:
        return
    rows, top_k, loads = _RECORDED[-1]
    counted = lay_out(read & rows.unsqueeze(1)).flatten()  # (N,)
    logits = [
        layer.reshape(len(counted), -1) for layer in output.router_logits if layer is not None
    ]
    loads.append(router_load(logits, counted, top_k))


@dataclass(frozen=True)
class RouterLoad:
    """How routers distribute tokens over E experts: sums over tokens and layers, which add up over
    micro-batches.

    `chosen` (E,) fp32: how often each expert is among a token's top k. `probability` (E,) fp32: the
    sum of its router probabilities, with gradient. `count` fp32, a scalar: tokens x layers.
    """

    chosen: Tensor
    probability: Tensor
    count: Tensor


def router_load(logits: Sequence[Tensor], counted: Tensor, top_k: int) -> RouterLoad:
    """The load of one forward pass, from the `logits` (N, E) of each layer's router for N tokens.
    `counted` (N,) bool or int64 is how often each token counts: 0 on padding, above 1 for a token
    of several rows."""
    is_counted = counted > 0
    times = counted[is_counted].float().unsqueeze(1)  # (n, 1)
    # (n, E) each
    layers = [torch.softmax(layer[is_counted].float(), dim=-1) for layer in logits]
    chosen = torch.zeros_like(layers[0][:0].sum(dim=0))  # (E,)
    for probabilities in layers:
        experts = probabilities.topk(top_k, dim=-1).indices  # (n, k)
        chosen = chosen.index_add(0, experts.flatten(), times.expand_as(experts).flatten())
    layer_sums = [(times * probabilities).sum(dim=0) for probabilities in layers]
    probability = torch.stack(layer_sums).sum(dim=0)
    return RouterLoad(chosen.detach(), probability, counted.sum().float() * len(layers))


def load_balancing_loss(probability: Tensor, chosen: Tensor, count: Tensor) -> Tensor:
    """A part of `E sum_i f_i P_i` (Fedus et al. 2021, equations 4 to 6, over the tokens of all
    layers).

    `f_i` is the share of tokens that choose expert i, and `P_i` its mean probability, both over the
    whole optimizer step; with top-k routing a balanced load gives k. The loss is linear in `P`, so
    the parts of micro-batches add up: `probability` (E,) are sums of one micro-batch, `chosen` (E,)
    and `count` those of the whole step.
    """
    return len(chosen) * (chosen / count * (probability / count)).sum()
