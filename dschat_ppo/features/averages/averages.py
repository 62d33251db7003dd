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
from dschat_ppo.common.dist import is_partitioned, rank_shard
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
    """Fill this rank's shards of parameters from those of all ranks of a saved run, which may have
    divided the parameters otherwise; returns whether any rank had a shard.

    Args:
        mine: name -> (index of its first element, flat shard); the shards are changed in place.
        ranks: name -> shard of each rank, in rank order, read one at a time; {} for a rank that had
            none.
    """
    offsets = dict.fromkeys(mine, 0)  # of the next rank's shard in the flat parameter
    has_shards = False
    for state in ranks:
        heartbeat()
        has_shards = has_shards or bool(state)
        for name in state.keys() & mine.keys():
            saved = state[name].flatten()
            offset = offsets[name]
            first, shard = mine[name]
            # both are slices of one flat tensor
            begin = max(first, offset)
            end = min(first + len(shard), offset + len(saved))
            if begin < end:
                shard[begin - first : end - first] = saved[begin - offset : end - offset]
            offsets[name] += len(saved)
    return has_shards


class MovingAverage:
    """`average = decay * average + (1 - decay) * weights` after each update, in fp32 in host memory
    (Polyak averaging).

    Averages the parameters of `model` that train, from their current values on. Under ZeRO-3 each
    rank averages its partition of each tensor. Otherwise the ranks divide the whole tensors among
    them.
    """

    def __init__(self, model: nn.Module, decay: float):
        self._decay = decay
        self._parameters: dict[str, Any] = {
            name: weight for name, weight in model.named_parameters() if weight.requires_grad
        }
        self._owners = _owners(self._parameters)
        self._averages: dict[str, Tensor] = {}  # of this rank's partitions, or the whole tensors
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self.begin()

    def begin(self) -> None:
        """Reset the average to the current weights."""
        self._averages = {}
        for name, weight in self._parameters.items():
            if self._owners.get(name, dist.rank()) == dist.rank():
                values = _values_here(weight).cpu().float()
                self._averages[name] = values.clone(memory_format=torch.contiguous_format)

    @torch.no_grad()
    def update(self) -> None:
        """Update the average; to be called after each optimizer step."""
        for name, average in self._averages.items():
            weight = self._on_host(_values_here(self._parameters[name]))
            average.lerp_(weight.float(), 1 - self._decay)

    def _on_host(self, weight: Tensor) -> Tensor:
        """A weight in host memory and its dtype, until the next call; from a GPU by pinned memory,
        which is faster."""
        if weight.device.type == "cpu":
            return weight
        if self._buffer.numel() < weight.nbytes:
            sizes = [_values_here(self._parameters[name]).nbytes for name in self._averages]
            self._buffer = pinned(max(sizes))
        return self._buffer[: weight.nbytes].view(weight.dtype).view(weight.shape).copy_(weight)

    def gathered(self) -> dict[str, Tensor]:
        """The whole averages of the parameters that train, in their dtype, on rank 0; {} on other
        ranks. Collective."""
        averages = {}
        for name, weight in self._parameters.items():
            if is_partitioned(weight):
                average = dist.gather_cat(self._averages[name].to(dist.device())).cpu()
            else:
                average = self._averages.get(name, weight.detach())
                average = dist.broadcast(average, self._owners[name])
            if dist.is_main():
                # ZeRO-3 empties `shape`
                shape = torch.Size(getattr(weight, "ds_shape", weight.shape))
                # without ZeRO-3's padding
                averages[name] = average.flatten()[: shape.numel()].view(shape).to(weight.dtype)
        return averages

    def state_dict(self) -> dict[str, Tensor]:
        """This rank's shards of the averages; {} if it holds none."""
        return dict(self._averages)

    def restore(self, ranks: Iterable[dict[str, Tensor]]) -> bool:
        """Restore from the shards of all ranks of a saved run; see `copy_overlaps`. If no rank had
        one, the average begins from the weights of now."""
        shards = {}
        for name, average in self._averages.items():
            first = dist.rank() * average.numel()
            if name in self._owners:  # it is whole
                first = 0
            shards[name] = (first, average.view(-1))
        is_restored = copy_overlaps(shards, ranks)
        if not is_restored:
            self.begin()
        return is_restored


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


def _owners(parameters: Mapping[str, Any]) -> dict[str, int]:
    """The rank that averages each tensor that ZeRO-3 does not divide, so that all ranks average
    about as many elements; the same on every rank."""
    elements = [0] * dist.world_size()  # of each rank
    owners = {}
    for name, weight in parameters.items():
        if not is_partitioned(weight):
            owner = elements.index(min(elements))
            owners[name] = owner
            elements[owner] += weight.numel()
    return owners


def _values_here(weight: Any) -> Tensor:
    """This rank's partition of a parameter, or all of it if ZeRO-3 does not divide it."""
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
            first, shard = rank_shard(weight)
            actor_shard = self._actor_shard(name, first, shard)
            # whole tensors are the same on all ranks
            is_counted = is_partitioned(weight) or dist.is_main()
            pieces = zip(shard.split(PIECE), actor_shard.split(PIECE), strict=True)
            for reference, actor in pieces:
                before = reference.to(torch.float32, copy=True)
                reference.copy_(self._mixup * actor.float() + (1 - self._mixup) * before)
                if is_counted:
                    norms = torch.stack([(reference.float() - before).norm(), before.norm()])
                    squares += norms.double().square().to(squares.device)
            refresh_whole_copy(weight)
        change, size = dist.all_reduce(squares).tolist()
        if size == 0:
            return 0.0
        return sqrt(change / size)

    def _actor_shard(self, name: str, first: int, shard: Tensor) -> Tensor:
        """The actor's elements where `shard` has those of the reference, from element `first` of
        the parameter on. Collective if only the actor is partitioned."""
        source = self._sources[name]
        if not is_partitioned(source):
            elements = source.detach().flatten()[first : first + shard.numel()]
        elif is_partitioned(self._weights[name]):
            _, elements = rank_shard(source)
        else:
            elements = gathered(source)
        return elements.to(shard.device)

    def state_dict(self) -> dict[str, Tensor]:
        """Flat shards of the reference that this rank saves: its partitions, and on rank 0 the
        tensors that are whole on every rank."""
        shards = {}
        for name, weight in self._weights.items():
            if is_partitioned(weight) or dist.is_main():
                _, shards[name] = rank_shard(weight)
        return shards

    @torch.no_grad()
    def restore(self, ranks: Iterable[dict[str, Tensor]]) -> bool:
        """Restore from the shards of all ranks of a saved run; see `copy_overlaps`. Collective."""
        shards = {name: rank_shard(weight) for name, weight in self._weights.items()}
        is_restored = copy_overlaps(shards, ranks)
        if is_restored:
            for weight in self._weights.values():
                refresh_whole_copy(weight)
        return is_restored
