"""Averages over steps of PPO: the moving average of the weights that train, and the reference that
follows them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import sqrt
from typing import Any

import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import Tensor, nn

from dschat_ppo.common import dist
from dschat_ppo.common.dist import is_partitioned, own_part
from dschat_ppo.common.heartbeat import heartbeat
from dschat_ppo.models.saving import require_finite_weights
from dschat_ppo.types import Engine


def gathered(weight: Any) -> Tensor:
    """All elements of a partitioned parameter, flat, on every rank. Collective."""
    return dist.gather_cat(weight.ds_tensor.detach().view(-1).to(dist.device()))[: weight.ds_numel]


def refresh_whole_copy(weight: Any) -> None:
    """Renew the whole copy of a partitioned parameter, where ZeRO-3 keeps one because it is small.
    Collective then."""
    if is_partitioned(weight) and weight.ds_status == ZeroParamStatus.AVAILABLE:
        weight.data.copy_(gathered(weight).view(weight.ds_shape))


def copy_overlaps(
    mine: Mapping[str, tuple[int, Tensor]], ranks: Iterable[Mapping[str, Tensor]]
) -> bool:
    """Fill this rank's parts of parameters from those of all ranks of a saved run; returns whether
    any held a part. `mine`: name -> (number of its first element, flat part), changed in place.
    `ranks`: name -> part of each rank, in rank order, read one at a time; {} for a rank that held
    none."""
    seen = dict.fromkeys(mine, 0)
    any_held = False
    for state in ranks:
        heartbeat()
        any_held = any_held or bool(state)
        for name in state.keys() & mine.keys():
            saved = state[name].flatten()
            first, shard = mine[name]
            # both are slices of one flat tensor
            begin = max(first, seen[name])
            end = min(first + len(shard), seen[name] + len(saved))
            if begin < end:
                shard[begin - first : end - first] = saved[begin - seen[name] : end - seen[name]]
            seen[name] += len(saved)
    return any_held


class MovingAverage:
    """`average = decay * average + (1 - decay) * weights` after each update, in fp32 in host memory
    (Polyak averaging).

    Averages the parameters of `model` that train (of an adapter, its matrices), from their current
    values on. Under ZeRO-3 each rank averages its partition of each tensor. Otherwise the ranks
    divide the whole tensors among them.
    """

    def __init__(self, model: nn.Module, decay: float):
        self._decay = decay
        self._parameters: dict[str, Any] = {
            name: p for name, p in model.named_parameters() if p.requires_grad
        }
        self._owners = _owners(
            {name: p.numel() for name, p in self._parameters.items() if not is_partitioned(p)}
        )
        self._parts = dict[str, Tensor]()
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self.begin()

    def begin(self) -> None:
        """Reset the average to the current weights."""
        averaged_here = {
            name: p
            for name, p in self._parameters.items()
            if self._owners.get(name, dist.rank()) == dist.rank()
        }
        layout = torch.contiguous_format
        self._parts = {
            name: _held(weight).cpu().float().clone(memory_format=layout)
            for name, weight in averaged_here.items()
        }

    @torch.no_grad()
    def update(self) -> None:
        """Update the average; to be called after each optimizer step."""
        for name, average in self._parts.items():
            average.lerp_(self._on_host(_held(self._parameters[name])).float(), 1 - self._decay)

    def _on_host(self, weight: Tensor) -> Tensor:
        """A weight in host memory and its dtype, until the next call; from a GPU by pinned memory,
        which is faster."""
        if weight.device.type == "cpu":
            return weight
        if self._buffer.numel() < weight.nbytes:
            self._buffer = pinned(max(_held(self._parameters[name]).nbytes for name in self._parts))
        return self._buffer[: weight.nbytes].view(weight.dtype).view(weight.shape).copy_(weight)

    def gathered(self) -> dict[str, Tensor]:
        """The whole averages of the parameters that train, in their dtype, on rank 0; {} on other
        ranks. Collective."""
        averages = {}
        for name, weight in self._parameters.items():
            if is_partitioned(weight):
                average = dist.gather_cat(self._parts[name].to(dist.device())).cpu()
            else:
                average = dist.broadcast(self._parts.get(name, weight.detach()), self._owners[name])
            if dist.is_main():
                # ZeRO-3 empties `shape`
                shape = torch.Size(getattr(weight, "ds_shape", weight.shape))
                # without ZeRO-3's padding
                averages[name] = average.flatten()[: shape.numel()].view(shape).to(weight.dtype)
        return averages

    def state_dict(self) -> dict[str, Tensor]:
        """This rank's parts; {} if it holds none."""
        return dict(self._parts)

    def restore(self, ranks: Iterable[dict[str, Tensor]]) -> bool:
        """Restore from the parts of all ranks of a saved run, in rank order ({}: none); returns
        whether there was any. Their partitions may be others. `ranks` is read one at a time."""
        firsts = {
            name: 0 if name in self._owners else dist.rank() * p.numel()
            for name, p in self._parts.items()
        }
        return copy_overlaps(
            {name: (firsts[name], average.view(-1)) for name, average in self._parts.items()}, ranks
        )


def whole_averages(
    ranks: Iterable[dict[str, Tensor]], shapes: Mapping[str, torch.Size]
) -> dict[str, Tensor]:
    """Whole fp32 averages, by the `shapes` of the averaged parameters; `ranks` as in
    `MovingAverage.restore`."""
    shards: dict[str, list[Tensor]] = {}
    for state in ranks:
        for name in state.keys() & shapes.keys():
            shards.setdefault(name, []).append(state[name].flatten())
    averages = {}
    for name, rank_shards in shards.items():
        shape = shapes[name]
        # without the padding of ZeRO-3
        averages[name] = torch.cat(rank_shards)[: shape.numel()].view(shape)
    return averages


def pinned(size: int) -> Tensor:
    """Host memory that a GPU reaches without a copy in between, (size,) uint8."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


def _owners(sizes: dict[str, int]) -> dict[str, int]:
    """The rank that averages each tensor, so that all average about as many numbers; the same on
    every rank."""
    held = [0] * dist.world_size()
    owners = {}
    for name, size in sizes.items():
        owners[name] = held.index(min(held))
        held[owners[name]] += size
    return owners


def _held(weight: Any) -> Tensor:
    if is_partitioned(weight):
        return weight.ds_tensor.detach()
    return weight.detach()


PIECE = 2**24  # elements that are in fp32 at a time


class ReferenceSync:
    """`reference = mixup * actor + (1 - mixup) * reference`, in fp32, then rounded to the dtype of
    the weights: TR-DPO (Gorbatovski et al. 2024, https://arxiv.org/abs/2404.09656). `actor` and
    `reference` are engines around a `PolicyModel` with the same parameters. Each rank computes the
    elements of the reference that it holds."""

    def __init__(self, actor: Engine, reference: Engine, mixup: float):
        self._actor = actor
        self._mixup = mixup
        self._weights: dict[str, Any] = dict(reference.module.lm.named_parameters())
        self._sources: dict[str, Any] = dict(actor.module.lm.named_parameters())

    @torch.no_grad()
    def update(self) -> float:
        """Move the reference, between optimizer steps; returns the norm of the change over all
        parameters, divided by the norm before it. `NonFiniteError`, and no change, if a weight of
        the actor is not finite. Collective."""
        require_finite_weights("actor", self._actor)
        # of the change, and of the weights before
        squares = torch.zeros(2, dtype=torch.float64, device=dist.device())
        for name, weight in self._weights.items():
            heartbeat()
            first, part = own_part(weight)
            source = self._actor_part(name, first, part)
            # whole tensors are the same on all ranks
            counts = is_partitioned(weight) or dist.is_main()
            for new, theirs in zip(part.split(PIECE), source.split(PIECE), strict=True):
                before = new.to(torch.float32, copy=True)
                new.copy_(self._mixup * theirs.float() + (1 - self._mixup) * before)
                if counts:
                    norms = torch.stack([(new.float() - before).norm(), before.norm()])
                    squares += norms.double().square().to(squares.device)
            refresh_whole_copy(weight)
        moved, size = dist.all_reduce(squares).tolist()
        return sqrt(moved / size) if size else 0.0

    def _actor_part(self, name: str, first: int, part: Tensor) -> Tensor:
        """The actor's elements at the place of `part`, from `first` on. Collective if only the
        actor is partitioned."""
        source = self._sources[name]
        if not is_partitioned(source):
            found = source.detach().flatten()[first : first + part.numel()]
        elif is_partitioned(self._weights[name]):
            found = own_part(source)[1]
        else:
            found = gathered(source)
        return found.to(part.device)

    def state_dict(self) -> dict[str, Tensor]:
        """Flat parts of the reference that only this rank holds; whole tensors are those of rank
        0."""
        kept = {
            name: weight
            for name, weight in self._weights.items()
            if is_partitioned(weight) or dist.is_main()
        }
        return {name: own_part(weight)[1] for name, weight in kept.items()}

    @torch.no_grad()
    def restore(self, ranks: Iterable[dict[str, Tensor]]) -> bool:
        """Restore from the parts of all ranks of a saved run; see `copy_overlaps`. Collective."""
        found = copy_overlaps(
            {name: own_part(weight) for name, weight in self._weights.items()}, ranks
        )
        if found:
            for weight in self._weights.values():
                refresh_whole_copy(weight)
        return found
