"""Keys and values that identify the sequence and the position they belong to."""

import numpy as np
import torch

from dschat_ppo.rollout.kv_cache import KVCache
from dschat_ppo.rollout.scheduler import GROWTH, DecodeBatch

HEADS = 2


def tagged(tags: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(n, L) tags -> keys (n, 2, L, 1), which are tag + head / 2, and values (n, 2, L, 3), which are their negative."""
    keys = (tags.double().unsqueeze(1) + torch.arange(HEADS).view(1, -1, 1) / 2).unsqueeze(3)
    return keys, -keys.expand(-1, -1, -1, 3)


def assert_holds(cache: KVCache, row: int, tags: list[int]) -> None:
    keys, values = tagged(torch.tensor([tags]))
    for layer in (0, 1):
        assert torch.equal(cache.keys[layer][row, :, : len(tags)], keys[0])
        assert torch.equal(cache.values[layer][row, :, : len(tags)], values[0])


def decode_batch_of(sequences: list[int], position: int = 3, capacity: int = GROWTH) -> DecodeBatch:
    """Rows of `position` tokens each, tagged 100 sequence + position."""
    count = len(sequences)
    cache = KVCache(count, capacity)
    rows = torch.arange(count)
    tags = torch.tensor(sequences).unsqueeze(1) * 100 + torch.arange(position)
    for layer in (0, 1):
        cache.write_prefill(layer, rows, rows, *tagged(tags))
    zeros = np.zeros(count, dtype=np.int64)
    return DecodeBatch(cache, np.array(sequences), np.full(count, position), zeros, zeros.copy())
