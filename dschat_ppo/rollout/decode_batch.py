"""A bank: rows that generate together and share one key-value store."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from dschat_ppo.rollout.attention import SharedPrefix, Span
from dschat_ppo.rollout.kv_cache import KVCache, repack, unshared

FACTS = ("answer", "position", "shared", "prompt")
GROWTH = 32  # tokens by which a store grows: less copies more often, more attends to empty slots


def rounded_up(length: int) -> int:
    """`length` up to a multiple of `GROWTH`."""
    return -(-length // GROWTH) * GROWTH


@dataclass(eq=False)
class DecodeBatch:
    """Rows 0 .. n-1 of `store` are at work; each fact about them is one entry of a numpy int64 array (n,).

    `answer` is the row of `SequenceBuffers`; `position` the position of the token that is fed next; `shared` how many
    tokens of its prompt are in `prefix` and not in `store` (0 without one); `prompt` its row in `prefix`.
    """

    store: KVCache
    answer: np.ndarray
    position: np.ndarray
    shared: np.ndarray
    prompt: np.ndarray
    prefix: KVCache | None = None
    _view: SharedPrefix | None = None

    def __len__(self) -> int:
        return len(self.answer)

    @property
    def slot(self) -> np.ndarray:
        """Where the next token of each row goes in `store`."""
        return self.position - self.shared

    def make_room(self) -> None:
        """Grow the store if the next token of a row would not fit."""
        needed = int(self.slot.max()) + 1
        if needed > self.store.capacity:
            self.store = repack([(self.store, len(self))], rounded_up(needed))

    def unshare(self) -> None:
        """Give each row its part of the prefix, so that the bank can be merged with others."""
        if self.prefix is not None:
            self.store = unshared(self.store, self.prefix, self.prompt.tolist(), self.shared.tolist())
            self.prefix, self._view = None, None
            self.shared, self.prompt = np.zeros_like(self.shared), np.zeros_like(self.prompt)

    def retire(self, finished: np.ndarray) -> None:
        """Drop rows where `finished` (n,) is True; the last rows that go on move into the holes."""
        left = int((~finished).sum())
        holes = np.flatnonzero(finished[:left])
        movers = left + np.flatnonzero(~finished[left:])
        if len(holes):
            self.store.move_rows(movers.tolist(), holes.tolist())
        for name in FACTS:
            values = getattr(self, name)
            values[holes] = values[movers]
            setattr(self, name, values[:left].copy())
        self._view = None

    def extend(self, answer: np.ndarray, position: np.ndarray) -> None:
        """More rows after the last one."""
        nothing = np.zeros_like(answer)
        for name, new in zip(FACTS, (answer, position, nothing, nothing), strict=True):
            setattr(self, name, np.concatenate([getattr(self, name), new]))

    def span(self, first: int, slots: torch.Tensor) -> Span:
        """The bank's part of a decode step whose rows begin at `first`; `slots` as in `Span`."""
        if self.prefix is not None and self._view is None:
            self._view = self._shared_prefix(self.prefix, slots.device)
        return Span(first, len(self), self.store, slots, self.store.capacity, self._view)

    def _shared_prefix(self, store: KVCache, device: torch.device) -> SharedPrefix:
        counts = np.bincount(self.prompt, minlength=store.rows)
        order = np.argsort(self.prompt, kind="stable")
        place = np.empty_like(order)
        place[order] = np.arange(len(order)) - (np.cumsum(counts) - counts)[self.prompt[order]]
        grid = np.zeros((store.rows, counts.max()), dtype=np.int64)
        grid[self.prompt, place] = np.arange(len(self))
        cell = self.prompt * grid.shape[1] + place
        return SharedPrefix(store, *(torch.from_numpy(facts).to(device) for facts in (self.shared, grid, cell)))


def merged(first: DecodeBatch, second: DecodeBatch) -> DecodeBatch:
    """One bank of the rows of two that share no prefix."""
    answer, position, shared, prompt = (np.concatenate([getattr(first, name), getattr(second, name)]) for name in FACTS)
    capacity = max(rounded_up(int(bank.slot.max()) + 1) for bank in (first, second))
    store = repack([(first.store, len(first)), (second.store, len(second))], capacity)
    return DecodeBatch(store, answer, position, shared, prompt)
