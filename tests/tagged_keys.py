"""Keys and values that say whose they are."""

import numpy as np
import torch

from dschat_ppo.rollout.decode_batch import GROWTH, DecodeBatch
from dschat_ppo.rollout.kv_cache import KVCache

HEADS = 2


def tagged(tags: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(n, L) tags -> keys (n, 2, L, 1), which are tag + head / 2, and values (n, 2, L, 3), which are minus that."""
    keys = (tags.double().unsqueeze(1) + torch.arange(HEADS).view(1, -1, 1) / 2).unsqueeze(3)
    return keys, -keys.expand(-1, -1, -1, 3)


def assert_holds(store: KVCache, row: int, tags: list[int]) -> None:
    keys, values = tagged(torch.tensor([tags]))
    for layer in (0, 1):
        assert torch.equal(store.keys[layer][row, :, : len(tags)], keys[0])
        assert torch.equal(store.values[layer][row, :, : len(tags)], values[0])


def plain_bank(answers: list[int], position: int = 3, capacity: int = GROWTH) -> DecodeBatch:
    """Rows that hold `position` tokens each, tagged 100 answer + place."""
    count = len(answers)
    store = KVCache(count, capacity)
    rows = torch.arange(count)
    for layer in (0, 1):
        store.put_block(layer, rows, rows, *tagged(rows_of(answers, position)))
    facts = (
        np.array(answers),
        np.full(count, position),
        np.zeros(count, dtype=np.int64),
        np.zeros(count, dtype=np.int64),
    )
    return DecodeBatch(store, *facts)


def rows_of(answers: list[int], position: int) -> torch.Tensor:
    return torch.tensor(answers).unsqueeze(1) * 100 + torch.arange(position)
