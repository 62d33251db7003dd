"""An exponential moving average of the weights that an engine trains, held once over all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dschat_ppo.common import dist
from dschat_ppo.engine.weight_parts import copy_overlaps, is_partitioned


class MovingAverage:
    """`average = decay * average + (1 - decay) * weights` after each update, in fp32 in host memory (Polyak averaging).

    Averages the parameters of `model` that train (of an adapter, its matrices), from their current values on. Under
    ZeRO-3 each rank averages its partition of each tensor. Otherwise the ranks divide the whole tensors among them.
    """

    def __init__(self, model: nn.Module, decay: float):
        self._decay = decay
        self._parameters: dict[str, Any] = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._owners = _owners({name: p.numel() for name, p in self._parameters.items() if not is_partitioned(p)})
        self._parts = dict[str, Tensor]()
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self.begin()

    def begin(self) -> None:
        """Reset the average to the current weights."""
        kept = {name: p for name, p in self._parameters.items() if self._owners.get(name, dist.rank()) == dist.rank()}
        layout = torch.contiguous_format
        self._parts = {name: _held(weight).cpu().float().clone(memory_format=layout) for name, weight in kept.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Update the average; to be called after each optimizer step."""
        for name, part in self._parts.items():
            part.lerp_(self._on_host(_held(self._parameters[name])).float(), 1 - self._decay)

    def _on_host(self, weight: Tensor) -> Tensor:
        """A weight in host memory and its dtype, until the next call; from a GPU by pinned memory, which is faster."""
        if weight.device.type == "cpu":
            return weight
        if self._buffer.numel() < weight.nbytes:
            self._buffer = pinned(max(_held(self._parameters[name]).nbytes for name in self._parts))
        return self._buffer[: weight.nbytes].view(weight.dtype).view(weight.shape).copy_(weight)

    def gathered(self) -> dict[str, Tensor]:
        """The whole averages of the parameters that train, in their dtype, on rank 0; {} on other ranks. Collective."""
        whole = {}
        for name, weight in self._parameters.items():
            if is_partitioned(weight):
                part = dist.gather_cat(self._parts[name].to(dist.device())).cpu()
            else:
                part = dist.broadcast(self._parts.get(name, weight.detach()), self._owners[name])
            if dist.is_main():
                shape = torch.Size(getattr(weight, "ds_shape", weight.shape))  # ZeRO-3 empties `shape`
                whole[name] = part.flatten()[: shape.numel()].view(shape).to(weight.dtype)  # without ZeRO-3's padding
        return whole

    def state_dict(self) -> dict[str, Tensor]:
        """This rank's parts; {} if it holds none."""
        return dict(self._parts)

    def has_layout_of(self, part: dict[str, Tensor]) -> bool:
        """Whether `part`, saved by this rank of a run on as many ranks, has the same tensors and partitions."""
        return _shapes(part) == _shapes(self._parts)

    def load_state_dict(self, part: dict[str, Tensor]) -> None:
        """Restore the `state_dict` of this rank, saved by a run with the same layout."""
        for name, mine in self._parts.items():
            mine.copy_(part[name])

    def load_parts(self, ranks: Iterable[dict[str, Tensor]]) -> bool:
        """Restore from the parts of all ranks of a saved run, in rank order ({}: none); returns whether there was any.

        Their partitions may be others. `ranks` is read one at a time.
        """
        firsts = {name: 0 if name in self._owners else dist.rank() * p.numel() for name, p in self._parts.items()}
        return copy_overlaps({name: (firsts[name], part.view(-1)) for name, part in self._parts.items()}, ranks)


def whole_averages(ranks: Iterable[dict[str, Tensor]], shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """Whole fp32 averages, by the `shapes` of the averaged parameters; `ranks` as in `MovingAverage.load_parts`."""
    parts: dict[str, list[Tensor]] = {}
    for state in ranks:
        for name in state.keys() & shapes.keys():
            parts.setdefault(name, []).append(state[name].flatten())
    # without the padding of ZeRO-3
    return {n: torch.cat(held)[: shapes[n].numel()].view(shapes[n]) for n, held in parts.items()}


def pinned(size: int) -> Tensor:
    """Host memory that a GPU reaches without a copy in between, (size,) uint8."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


def _owners(sizes: dict[str, int]) -> dict[str, int]:
    """The rank that averages each tensor, so that all average about as many numbers; the same on every rank."""
    held, owners = [0] * dist.world_size(), {}
    for name, size in sizes.items():
        owners[name] = held.index(min(held))
        held[owners[name]] += size
    return owners


def _shapes(parts: dict[str, Tensor]) -> dict[str, torch.Size]:
    return {name: part.shape for name, part in parts.items()}


def _held(weight: Any) -> Tensor:
    """This rank's part of a parameter between two steps."""
    return weight.ds_tensor.detach() if is_partitioned(weight) else weight.detach()
