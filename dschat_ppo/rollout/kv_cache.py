"""What a model keeps of the tokens before: preallocated keys and values with the metadata by which
attention writes and finds them, and the states of layers that carry one from token to token
(convolutions, linear attention, Mamba).

A model computes a row's state after a prefill if padding is on the left and masked: the layers make
it zero, and zeros leave a state of zero as it is. Steps of one token find the states of their rows
where transformers' cache has them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedConfig
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from dschat_ppo.models.backbone import has_states

SPARE = 0  # the slot of a pool that idle rows of a step read and write


class KVCache:
    """Keys and values per layer, `(rows, kv_heads, capacity, head_dim)`, written in place: token t
    of sequence r is in slot t of row r. A pool has one row, of whose slots each sequence has a
    segment. The first write to a layer allocates it, like the keys and values written. Memory is
    zeroed: a masked slot has a weight of 0, and 0 x NaN would be NaN."""

    def __init__(self, rows: int, capacity: int):
        self.rows = rows
        self.capacity = capacity
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all layers that are allocated."""
        return sum(cached.nbytes for cached in (*self.keys.values(), *self.values.values()))

    def layer(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """The whole cache of a layer, for keys and values like these, (n, kv_heads, L,
        head_dim)."""
        if layer not in self.keys:
            for cached, like in ((self.keys, keys), (self.values, values)):
                shape = self.rows, like.shape[1], self.capacity, like.shape[3]
                cached[layer] = like.new_zeros(shape)
        return self.keys[layer], self.values[layer]

    def move_rows(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy the rows `sources` over the rows `targets`."""
        cached = [*self.keys.values(), *self.values.values()]
        if cached:
            # one copy to the device for both
            rows = torch.tensor([list(sources), list(targets)], device=cached[0].device)
            source_rows, target_rows = rows
            for tensor in cached:
                tensor[target_rows] = tensor[source_rows]

    def move_slots(self, sources: np.ndarray, targets: np.ndarray, capacity: int) -> None:
        """Copy slots `sources` of all rows to `targets`, both (T,) int64, and change the capacity.
        All sources are read before a target is written. With the same capacity all tensors stay
        where they are; with another one, slots that are not targets are 0. At most one layer is in
        memory twice. After an error the contents are lost."""
        for cached in (self.keys, self.values):
            for layer in list(cached):
                slots = cached.pop(layer)
                read_slots = torch.from_numpy(sources).to(slots.device)
                written_slots = torch.from_numpy(targets).to(slots.device)
                moved = slots[:, :, read_slots]
                if capacity != self.capacity:
                    del slots
                    slots = moved.new_zeros(*moved.shape[:2], capacity, moved.shape[3])
                cached[layer] = slots.index_copy_(2, written_slots, moved)
                del slots, moved  # the next layer needs the memory
        self.capacity = capacity

    def grow(self, rows: int, capacity: int) -> None:
        """Keep only the first `rows` rows, and give them `capacity` slots. At most one layer is in
        memory twice. After an error the contents are lost."""
        self.rows = rows
        self.capacity = capacity
        for cached in (self.keys, self.values):
            for layer in list(cached):
                old = cached.pop(layer)
                cached[layer] = old.new_zeros(rows, old.shape[1], capacity, old.shape[3])
                cached[layer][:, :, : old.shape[2]] = old[:rows]
                del old  # the next layer needs the memory


@dataclass(frozen=True)
class Prefill:
    """Prompts that a `cache` gets: that of `sequences[i]` from slot `starts[i]` of row `rows[i]`
    on, all (m,) int64. If several sequences begin with one prompt, `sequences` names the same one
    of them wherever that prompt goes, so that it is computed once."""

    cache: KVCache
    sequences: np.ndarray
    rows: np.ndarray
    starts: np.ndarray


@dataclass
class PrefillMetadata:
    """A prefill: token `columns[i]` of row `source[i]` of the forward pass goes to slot `slots[i]`
    of row `rows[i]` of `cache`. All are (m,) int64. `padding` (n,) int64: columns before the first
    token of each row; None: 0. `history`: the rows of the pass go on after tokens in the cache, and
    attend to these too."""

    cache: KVCache
    rows: Tensor
    slots: Tensor
    source: Tensor
    columns: Tensor
    _: KW_ONLY
    padding: Tensor | None = None
    history: PooledMetadata | None = None
    # what the layers of a step share
    step_cache: dict[Any, Any] = field(default_factory=dict, init=False)

    def to_the_left(self, tensor: Tensor) -> Tensor:
        """(n, heads, L, d) with the tokens of each row from column 0 on, and copies of its last one
        behind them."""
        if self.padding is None:
            return tensor
        return _shifted(tensor, self.padding)

    def to_the_right(self, tensor: Tensor) -> Tensor:
        """Undo `to_the_left`; the padding gets the numbers of the first token."""
        if self.padding is None:
            return tensor
        return _shifted(tensor, -self.padding)


def _shifted(tensor: Tensor, distance: Tensor) -> Tensor:
    """`tensor` (n, heads, L, d) whose rows move to the left by `distance` (n,), to the right where
    it is negative; the first or last token fills up."""
    rows, _, length, _ = tensor.shape
    columns = torch.arange(length, device=tensor.device) + distance.unsqueeze(1)
    row = torch.arange(rows, device=tensor.device).unsqueeze(1)
    return tensor.transpose(1, 2)[row, columns.clamp(0, length - 1)].transpose(1, 2)


@dataclass
class SharedPrefix:
    """Keys and values of prompts that several rows of a decode batch share. `cache` holds one row
    per prompt. `lengths` (n,) int64 is the prefix length of each row of the batch. `grid` (prompts,
    width) int64 lists the rows of each prompt (any row in unused cells); `cells` (n,) int64 is the
    index of each row in the flattened grid."""

    cache: KVCache
    lengths: Tensor
    grid: Tensor
    cells: Tensor


@dataclass
class DecodeMetadata:
    """The rows of a decode step from `first` on that are the first rows of `cache`. `slots`
    (count,) int64 is where the new token of each row goes; a row attends to slots up to and
    including its own, after its `prefix`."""

    first: int
    cache: KVCache
    slots: Tensor
    prefix: SharedPrefix | None = None
    step_cache: dict[Any, Any] = field(default_factory=dict)  # what the layers of a step share

    @property
    def count(self) -> int:
        """Rows of the batch."""
        return len(self.slots)

    @cached_property
    def step_rows(self) -> slice:
        """The rows of the batch in the tensors of the step."""
        return slice(self.first, self.first + self.count)

    @property
    def length(self) -> int:
        """No row has more tokens in `cache`."""
        return self.cache.capacity

    @cached_property
    def rows(self) -> Tensor:
        """The row of `cache` to which the new token of each row goes, (count,) int64."""
        return torch.arange(len(self.slots), device=self.slots.device)

    @property
    def newest(self) -> Tensor:
        """The number of the new token of each row among the tokens in `cache`, (count,) int64."""
        return self.slots

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of all slots, (count, kv_heads, length, head_dim)."""
        return self.cache.keys[layer][: self.count], self.cache.values[layer][: self.count]

    def token_offsets(self, heads: int) -> Tensor:
        """What `operations.decode_attention` wants to know of the rows, (4, count) int64."""
        none = torch.zeros_like(self.slots)
        return torch.stack([self.slots, self.rows * (heads * self.cache.capacity), none, none])


@dataclass
class PooledMetadata:
    """A decode step of rows in a pool, a `KVCache` of one row. All tensors are (count,) int64.

    The tokens of a row are `prefix_lengths` tokens from slot `prefix_starts` on, which other rows
    may share (0: none), then tokens of the row alone, from slot `starts` on; the new token goes to
    the slot `offsets` after that. No row has more than `length` tokens. An idle row has 0
    everywhere.
    `shares` is whether some row has a prefix.

    With L new tokens of each row, `offsets` is (count, L), not descending, and the others are
    (count, 1).
    """

    cache: KVCache
    offsets: Tensor
    starts: Tensor
    prefix_starts: Tensor
    prefix_lengths: Tensor
    _: KW_ONLY
    length: int
    shares: bool
    first: int = 0
    prefix: None = None
    step_cache: dict[Any, Any] = field(default_factory=dict)  # what the layers of a step share

    @property
    def count(self) -> int:
        """Rows of the step."""
        return len(self.offsets)

    @cached_property
    def step_rows(self) -> slice:
        """The rows of the batch in the tensors of the step: all."""
        return slice(self.first, self.count)

    @cached_property
    def rows(self) -> Tensor:
        """The row of `cache` to which each new token goes: there is one."""
        return torch.zeros_like(self.offsets)

    @cached_property
    def slots(self) -> Tensor:
        """The slot to which each new token goes."""
        return self.starts + self.offsets

    @property
    def newest(self) -> Tensor:
        """The number of the new token of each row among all its tokens, shaped as `offsets`."""
        return self.prefix_lengths + self.offsets

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the first `length` tokens, (count, kv_heads, length, head_dim), copied
        from the pool. Places after the last new token repeat it."""
        keys = self.cache.keys[layer][0]
        values = self.cache.values[layer][0]
        heads = len(keys)
        if heads not in self.step_cache:
            starts = self._of_last_token(self.starts)
            prefix_starts = self._of_last_token(self.prefix_starts)
            prefix_lengths = self._of_last_token(self.prefix_lengths)
            last = self._of_last_token(self.newest)
            token = torch.arange(self.length, device=last.device).minimum(last)
            row_slots = starts + token - prefix_lengths
            # (count, length)
            slots = torch.where(token < prefix_lengths, prefix_starts + token, row_slots)
            planes = torch.arange(heads, device=slots.device).view(-1, 1) * self.cache.capacity
            self.step_cache[heads] = (slots.unsqueeze(1) + planes).flatten()  # count, head, token
        keys = keys.flatten(0, 1).index_select(0, self.step_cache[heads])
        values = values.flatten(0, 1).index_select(0, self.step_cache[heads])
        shape = self.count, heads, self.length, -1
        return keys.view(shape), values.view(shape)

    def _of_last_token(self, column: Tensor) -> Tensor:
        """(count,) or (count, L) -> (count, 1): what holds for the last new token of each row."""
        return column.view(self.count, -1)[:, -1:]

    def token_offsets(self, heads: int) -> Tensor:
        """What `operations.decode_attention` wants to know of the rows, (4, count) int64."""
        return torch.stack([self.offsets, self.starts, self.prefix_starts, self.prefix_lengths])


class RolloutCache(Cache):
    """Passes new keys and values through to the attention function, which writes them to the KV
    cache itself. Layers that carry a state have transformers' own cache layer for it: empty, so the
    next forward pass is a prefill."""

    def __init__(self, config: PreTrainedConfig | None = None) -> None:
        layers = []
        if config and has_states(config):
            layers = DynamicCache(config=config).layers
        super().__init__(layers=layers)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the same tensors."""
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0: positions are always given explicitly."""
        return 0


State = tuple[int, str, int]  # layer, attribute of its cache layer, index in it


def states_of(cache: Any) -> Iterator[tuple[State, Tensor]]:
    """The states in a cache of transformers, with one row for each row of the forward pass."""
    for layer_index, layer in enumerate(cache.layers):
        if not isinstance(layer, LinearAttentionCacheLayerMixin):
            continue
        for name in ("conv_states", "recurrent_states"):
            for index, state in getattr(layer, name).items():
                if state is not None:
                    yield (layer_index, name, index), state


class RowStates:
    """The states of running sequences, one row for each: the first rows of a table for each state
    of the model."""

    def __init__(self) -> None:
        self._sequences = np.array([], dtype=np.int64)  # of the rows
        self._tables: dict[State, Tensor] = {}
        self._cache = RolloutCache()

    def add(self, prefilled: RolloutCache, sequences: np.ndarray, source: np.ndarray) -> None:
        """Add rows for those of `sequences` (m,) that have none, after the prefill of their
        prompts, which were rows `source` (m,) int64 of it; -1: no token was fed, and the states are
        zero."""
        if not self._tables:
            self._cache = prefilled  # its layers know all but the states of a step
        new = ~np.isin(sequences, self._sequences)
        before = len(self._sequences)
        fed = np.flatnonzero(source[new] >= 0)
        self._sequences = np.concatenate([self._sequences, sequences[new]])
        for key, state in list(states_of(prefilled)):
            layer_index, name, index = key
            old = self._tables.pop(key, state[:0])
            if self._cache is not prefilled:  # whose view would keep the old table in memory
                getattr(self._cache.layers[layer_index], name)[index] = None
            table = state.new_zeros(len(self._sequences), *state.shape[1:])
            table[:before] = old[:before]
            rows = torch.from_numpy(before + fed).to(state.device)
            sources = torch.from_numpy(source[new][fed]).to(state.device)
            self._tables[key] = table.index_copy_(0, rows, state[sources])

    def of(self, sequences: np.ndarray) -> RolloutCache:
        """The cache for a step of `sequences` (n,), in this order; the others are forgotten."""
        order = np.argsort(self._sequences)
        source = order[np.searchsorted(self._sequences, sequences, sorter=order)]
        moved = np.flatnonzero(source != np.arange(len(sequences)))
        self._sequences = sequences
        for (layer_index, name, index), table in self._tables.items():
            if len(moved):
                rows = torch.from_numpy(moved).to(table.device)
                sources = torch.from_numpy(source[moved]).to(table.device)
                table[rows] = table[sources]
            getattr(self._cache.layers[layer_index], name)[index] = table[: len(sequences)]
        return self._cache
