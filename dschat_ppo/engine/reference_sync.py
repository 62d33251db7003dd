"""Reference sync: the reference moves towards the actor while PPO runs."""

from __future__ import annotations

from collections.abc import Iterable
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from dschat_ppo.common import dist
from dschat_ppo.common.heartbeat import heartbeat
from dschat_ppo.engine.weight_parts import (
    copy_overlaps,
    gathered,
    is_partitioned,
    own_part,
    refresh_whole_copy,
)
from dschat_ppo.models.saving import require_finite_weights
from dschat_ppo.types import Engine

PIECE = 2**24  # elements that are in fp32 at a time


class ReferenceSync:
    """`reference = mixup * actor + (1 - mixup) * reference`, in fp32, then rounded to the dtype of the weights.

    As in TR-DPO (Gorbatovski et al. 2024, https://arxiv.org/abs/2404.09656). `actor` and `reference` are engines around
    a `PolicyModel`, with parameters of the same names and shapes. Each rank computes the elements of the reference that
    it holds: its partition under ZeRO-3, else whole tensors; the actor may differ in that. The reference then is part
    of the state of the run.
    """

    def __init__(self, actor: Engine, reference: Engine, mixup: float):
        self._actor = actor
        self._mixup = mixup
        self._weights: dict[str, Any] = dict(reference.module.lm.named_parameters())
        self._sources: dict[str, Any] = dict(actor.module.lm.named_parameters())

    @torch.no_grad()
    def update(self) -> float:
        """Move the reference, between optimizer steps. Collective.

        Returns how far: the norm of the change over all parameters, divided by the norm before it. If a weight of the
        actor is not finite, it raises `NonFiniteError` and changes nothing.
        """
        require_finite_weights("actor", self._actor)
        squares = torch.zeros(2, dtype=torch.float64, device=dist.device())  # of the change, and of the weights before
        for name, weight in self._weights.items():
            heartbeat()
            first, part = own_part(weight)
            source = self._actor_part(name, first, part)
            counts = is_partitioned(weight) or dist.is_main()  # whole tensors are the same on all ranks
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
        """The actor's elements at the place of `part`, from `first` on. Collective if only the actor is partitioned."""
        source = self._sources[name]
        if not is_partitioned(source):
            found = source.detach().flatten()[first : first + part.numel()]
        elif is_partitioned(self._weights[name]):
            found = own_part(source)[1]
        else:
            found = gathered(source)
        return found.to(part.device)

    def state_dict(self) -> dict[str, Tensor]:
        """Flat parts of the reference that only this rank holds; whole tensors are those of rank 0."""
        kept = {name: weight for name, weight in self._weights.items() if is_partitioned(weight) or dist.is_main()}
        return {name: own_part(weight)[1] for name, weight in kept.items()}

    def has_layout_of(self, part: dict[str, Tensor]) -> bool:
        """Whether `part`, saved by this rank of a run on as many ranks, has the same tensors and partitions."""
        mine = {name: own_part(weight)[1].shape for name, weight in self._weights.items()}
        return {name: saved.shape for name, saved in part.items()} == mine

    @torch.no_grad()
    def load_state_dict(self, part: dict[str, Tensor]) -> None:
        """Restore the `state_dict` of this rank, saved with the same layout. Collective, as `load_parts`."""
        for name, weight in self._weights.items():
            own_part(weight)[1].copy_(part[name])
            refresh_whole_copy(weight)

    @torch.no_grad()
    def load_parts(self, ranks: Iterable[dict[str, Tensor]]) -> bool:
        """Restore from the parts of all ranks of a saved run; see `copy_overlaps`. Collective, as `load_state_dict`."""
        found = copy_overlaps({name: own_part(weight) for name, weight in self._weights.items()}, ranks)
        if found:
            for weight in self._weights.values():
                refresh_whole_copy(weight)
        return found
