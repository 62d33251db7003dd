"""Random streams: one seed for all ranks where they must agree, one stream per rank where they must differ."""

from __future__ import annotations

import random

import numpy as np
import torch

from dschat_ppo.common.dist import rank


def seed_everything(seed: int) -> None:
    """Seed Python, numpy and torch (all devices) alike on every rank, so that new weights agree."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def seed_this_rank(seed: int) -> None:
    """Give torch's default stream (dropout) a seed of this rank's own, once the weights are made."""
    torch.manual_seed(rank_generator(seed, "cpu").initial_seed())


def rank_generator(seed: int, device: torch.device | str) -> torch.Generator:
    """A stream of this rank's own on `device`, reproducible from `seed`: ranks draw uncorrelated samples."""
    mixed = np.random.SeedSequence([seed, rank()]).generate_state(1, dtype=np.uint64)[0]
    return torch.Generator(device=device).manual_seed(int(mixed >> np.uint64(1)))


def shared_generator(seed: int, *path: int) -> torch.Generator:
    """A CPU stream that is the same on every rank; `path` (epoch, step, ...) separates its uses."""
    mixed = np.random.SeedSequence([seed, *path]).generate_state(1, dtype=np.uint64)[0]
    return torch.Generator().manual_seed(int(mixed >> np.uint64(1)))
