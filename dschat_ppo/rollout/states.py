"""States of the layers that carry one from token to token: convolutions, linear attention, state-space layers.

A model computes a row's state after a prefill if padding is on the left and masked: the layers make it zero, and zeros
leave a state of zero as it is. Steps of one token find the states of their rows where transformers' cache has them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from dschat_ppo.rollout.attention import RolloutCache

State = tuple[int, str, int]  # layer, attribute of its cache layer, number


def states_of(cache: Any) -> Iterator[tuple[State, Tensor]]:
    """The states in a cache of transformers, with one row for each row of the forward pass."""
    for number, layer in enumerate(cache.layers):
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            for name in ("conv_states", "recurrent_states"):
                for index, state in getattr(layer, name).items():
                    if state is not None:
                        yield (number, name, index), state


class RowStates:
    """The states of running sequences, one row for each: the first rows of a table for each state of the model."""

    def __init__(self) -> None:
        self._sequences = np.array([], dtype=np.int64)  # of the rows
        self._tables: dict[State, Tensor] = {}
        self._cache = RolloutCache()

    def add(self, prefilled: RolloutCache, sequences: np.ndarray, source: np.ndarray) -> None:
        """Add rows for those of `sequences` (m,) that have none, after the prefill of their prompts, which were rows
        `source` (m,) int64 of it; -1: no token was fed, and the states are zero."""
        if not self._tables:
            self._cache = prefilled  # its layers know all but the states of a step
        new = ~np.isin(sequences, self._sequences)
        before, fed = len(self._sequences), np.flatnonzero(source[new] >= 0)
        self._sequences = np.concatenate([self._sequences, sequences[new]])
        for key, state in list(states_of(prefilled)):
            old = self._tables.pop(key, state[:0])
            if self._cache is not prefilled:  # whose view would keep the old table in memory
                getattr(self._cache.layers[key[0]], key[1])[key[2]] = None
            table = state.new_zeros(len(self._sequences), *state.shape[1:])
            table[:before] = old[:before]
            rows, sources = (torch.from_numpy(part).to(state.device) for part in (before + fed, source[new][fed]))
            self._tables[key] = table.index_copy_(0, rows, state[sources])

    def of(self, sequences: np.ndarray) -> RolloutCache:
        """The cache for a step of `sequences` (n,), in this order; the others are forgotten."""
        order = np.argsort(self._sequences)
        source = order[np.searchsorted(self._sequences, sequences, sorter=order)]
        moved = np.flatnonzero(source != np.arange(len(sequences)))
        self._sequences = sequences
        for (number, name, index), table in self._tables.items():
            if len(moved):
                rows, sources = (torch.from_numpy(part).to(table.device) for part in (moved, source[moved]))
                table[rows] = table[sources]
            getattr(self._cache.layers[number], name)[index] = table[: len(sequences)]
        return self._cache
