"""How the routers of a mixture of experts distribute tokens: recorded in forward passes; the loss
that balances it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dschat_ppo.models.pass_observers import LayOut


@dataclass(frozen=True)
class RouterRecorder:
    """Records the load of each forward pass: a `PassObserver`."""

    rows: Tensor  # (B,) bool, those that count
    top_k: int  # experts of each token
    loads: list[RouterLoad] = field(default_factory=list)

    @property
    def arguments(self) -> dict[str, Any]:
        """Let the model return the logits of its routers."""
        return {"output_router_logits": True}

    def observe(self, output: Any, read: Tensor, lay_out: LayOut) -> None:
        """Record the load of one forward pass over the tokens that are `read` (B, T) bool."""
        counted = lay_out(read & self.rows.unsqueeze(1)).flatten()  # (N,)
        logits = [
            layer.reshape(len(counted), -1) for layer in output.router_logits if layer is not None
        ]
        self.loads.append(router_load(logits, counted, self.top_k))


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
