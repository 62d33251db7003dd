"""Random numbers: one seed for all ranks where draws must agree, one for each rank where they must
differ."""

from __future__ import annotations

import os
import random

import numpy as np
import torch

from dschat_ppo.common.dist import rank


def seed_everything(seed: int) -> None:
    """Seed Python, numpy and torch (all devices), equally on every rank, so that new weights
    agree."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def set_deterministic(deterministic: bool) -> None:
    """Choose whether PyTorch uses deterministic algorithms only; an operation that has none then
    raises `RuntimeError`. Others may differ at each execution, for example because the threads of a
    GPU add in the order in which they finish. Call it before anything runs on a GPU: cuBLAS reads
    its setting when it starts."""
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(deterministic)


def seed_this_rank(seed: int) -> None:
    """Seed the default generator of torch (dropout) differently on each rank, once the weights are
    made."""
    torch.manual_seed(_mixed(seed, rank()))


def shared_generator(seed: int, *path: int) -> torch.Generator:
    """A CPU generator that is equal on every rank; `path` (epoch, step, ...) separates its uses."""
    return torch.Generator().manual_seed(_mixed(seed, *path))


def _mixed(*path: int) -> int:
    """A seed of 63 bits from all integers of `path`."""
    state = np.random.SeedSequence(path).generate_state(1, dtype=np.uint64)
    return int(state[0] >> np.uint64(1))


def splitmix64(state: np.ndarray) -> np.ndarray:
    """The output function of SplitMix64 (Steele, Lea and Flood 2014): uint64 -> well-mixed uint64,
    elementwise."""
    z = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


SPLITMIX_STEP = np.uint64(0x9E3779B97F4A7C15)


def row_seeds(first: int, count: int, *path: int) -> torch.Tensor:
    """Seeds of the responses `first .. first + count - 1`, (count,) int64; `path` (run seed, step,
    ...) separates uses. A seed depends only on the number of the response, not on the rank that
    generates it."""
    base = np.random.SeedSequence([len(path), *path]).generate_state(1, dtype=np.uint64)
    counters = np.arange(first + 1, first + count + 1, dtype=np.uint64)
    return torch.from_numpy(splitmix64(base + counters * SPLITMIX_STEP).view(np.int64))
