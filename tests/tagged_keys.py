"""Keys and values that identify the sequence and the position they belong to."""

import numpy as np
import torch

from dschat_ppo.rollout.kv_cache import KVCache
from dschat_ppo.rollout.running_batches import GROWTH, DecodeBatch

HEADS = 2


def tagged(tags: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(n, L) tags -> keys (n, 2, L, 1), which are tag + head / 2, and values (n, 2, L, 3), which are their negative."""
    keys = (tags.double().unsqueeze(1) + torch.arange(HEADS).view(1, -1, 1) / 2).unsqueeze(3)
    return keys, -keys.expand(-1, -1, -1, 3)


def put(cache: KVCache, row: int, tags: torch.Tensor, slots: torch.Tensor | None = None) -> None:
    """Write tokens (L,) to `slots` (L,) of a row of both layers, by default to the first ones."""
    slots = torch.arange(len(tags)) if slots is None else slots
    for layer in (0, 1):
        new = tagged(tags.unsqueeze(0))
        for cached, states in zip(cache.layer(layer, *new), new, strict=True):
            cached[row, :, slots] = states[0]


def assert_holds(cache: KVCache, row: int, tags: list[int]) -> None:
    keys, values = tagged(torch.tensor([tags]))
    for layer in (0, 1):
        assert torch.equal(cache.keys[layer][row, :, : len(tags)], keys[0])
        assert torch.equal(cache.values[layer][row, :, : len(tags)], values[0])


def decode_batch_of(sequences: list[int], position: int = 3, capacity: int = GROWTH) -> DecodeBatch:
    """Rows of `position` tokens each, tagged 100 sequence + position."""
    count = len(sequences)
    cache = KVCache(count, capacity)
    for row, sequence in enumerate(sequences):
        put(cache, row, 100 * sequence + torch.arange(position))
    zeros = np.zeros(count, dtype=np.int64)
    return DecodeBatch(cache, np.array(sequences), np.full(count, position), zeros, zeros.copy())
