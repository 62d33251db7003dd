"""The elements of a parameter that a rank holds: whole tensors, or partitions of ZeRO-3."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import Tensor

from dschat_ppo.common import dist
from dschat_ppo.common.heartbeat import heartbeat


def is_partitioned(weight: Any) -> bool:
    """Whether ZeRO-3 divides a parameter among the ranks."""
    return hasattr(weight, "ds_id")


def own_part(weight: Any) -> tuple[int, Tensor]:
    """(number of its first element, a flat view) of this rank's elements, without ZeRO-3's uninitialised padding."""
    if not is_partitioned(weight):
        return 0, weight.detach().view(-1)
    part = weight.ds_tensor.detach().view(-1)
    first = min(dist.rank() * part.numel(), weight.ds_numel)
    return first, part[: weight.ds_numel - first]


def gathered(weight: Any) -> Tensor:
    """All elements of a partitioned parameter, flat, on every rank. Collective."""
    return dist.gather_cat(weight.ds_tensor.detach().view(-1).to(dist.device()))[: weight.ds_numel]


def refresh_whole_copy(weight: Any) -> None:
    """Renew the whole copy of a partitioned parameter, where ZeRO-3 keeps one because it is small. Collective then."""
    if is_partitioned(weight) and weight.ds_status == ZeroParamStatus.AVAILABLE:
        weight.data.copy_(gathered(weight).view(weight.ds_shape))


def copy_overlaps(mine: Mapping[str, tuple[int, Tensor]], ranks: Iterable[Mapping[str, Tensor]]) -> bool:
    """Fill this rank's parts of parameters from those of all ranks of a saved run; returns whether any held a part.

    `mine`: name -> (number of its first element, flat part), changed in place. `ranks`: name -> part of each rank, in
    rank order, read one at a time; {} for a rank that held none.
    """
    seen = dict.fromkeys(mine, 0)
    found = False
    for state in ranks:
        heartbeat()
        found = found or bool(state)
        for name in state.keys() & mine.keys():
            saved = state[name].flatten()
            first, part = mine[name]
            # both are slices of one flat tensor
            begin, end = max(first, seen[name]), min(first + len(part), seen[name] + len(saved))
            if begin < end:
                part[begin - first : end - first] = saved[begin - seen[name] : end - seen[name]]
            seen[name] += len(saved)
    return found
