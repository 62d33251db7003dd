"""How many rows fit into memory, and how a lack of memory is recognised and reported."""

from __future__ import annotations

import logging

import psutil
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from dschat_ppo.common.dist import is_main, local_world_size, rank
from dschat_ppo.common.logging import print_line

_log = logging.getLogger(__name__)

MAX_ROWS = 256  # chosen from memory; more rows make a step longer and no token cheaper
MEMORY_SHARE = 0.5  # share of the free memory that the KV cache may take
_MESSAGES = ("DefaultCPUAllocator: can't allocate memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


@torch.no_grad()
def bytes_per_token(model: PreTrainedModel) -> int:
    """Bytes of the keys and values of one token of one row, measured by caching one token."""
    ids = torch.zeros(1, 1, dtype=torch.int64, device=next(model.parameters()).device)
    cache = DynamicCache(config=model.config)
    model(input_ids=ids, past_key_values=cache, use_cache=True)
    cached = [t for layer in cache.layers for t in vars(layer).values() if isinstance(t, Tensor)]
    return max(1, sum(t.nbytes for t in cached))


def rows_for_memory(model: PreTrainedModel, length: int) -> int:
    """How many sequences of `length` tokens fit into `MEMORY_SHARE` of the free memory, at least 1."""
    device = next(model.parameters()).device
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        free = torch.cuda.mem_get_info(device)[0] + unused
    else:
        free = psutil.virtual_memory().available // local_world_size()
    return max(1, min(MAX_ROWS, int(MEMORY_SHARE * free / (bytes_per_token(model) * length))))


def is_out_of_memory(problem: RuntimeError) -> bool:
    """Whether memory ran out: PyTorch's CUDA allocator has an exception class, the other allocators only messages."""
    return isinstance(problem, torch.OutOfMemoryError) or any(message in str(problem) for message in _MESSAGES)


def warn_of_memory(before: int, after: int) -> None:
    """Warn, on every rank, that generation continues with fewer rows; empty the CUDA cache."""
    line = f"rollout: rank {rank()} is out of memory with {before} rows; continuing with {after}"
    _log.warning(line)
    if not is_main():
        print_line(line)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
