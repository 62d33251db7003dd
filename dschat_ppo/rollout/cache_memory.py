"""How many rows and slots of KV caches fit into memory, and what happens when it runs out."""

from __future__ import annotations

import logging

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from dschat_ppo.common.dist import is_main, local_world_size, on_gpu, rank
from dschat_ppo.common.host_memory import available_memory
from dschat_ppo.common.logging import print_line
from dschat_ppo.models.wrapped_models import vocabulary_size
from dschat_ppo.rollout.kv_cache import states_of

_log = logging.getLogger(__name__)

MAX_ROWS = 256  # on a CPU, more rows make a step longer and no token cheaper
MAX_ROWS_GPU = 1024  # on a GPU, rows share the time of reading the weights
MEMORY_SHARE = 0.5  # share of a CPU's free memory that the KV cache may take
# of a GPU's free memory: the larger of both is left for everything else
RESERVE_SHARE = 0.1
RESERVE_BYTES = 2 * 2**30
LOGITS_SHARE = 0.1  # share of a GPU's free memory that the logits of a step may take
LOGITS_BYTES = 6 * 4  # per row and token of the vocabulary: sampling holds about six fp32 copies


@torch.no_grad()
def cached_bytes(model: PreTrainedModel) -> tuple[int, int]:
    """Bytes of the keys and values of one token, and of the states of one row, measured by caching
    one token."""
    ids = torch.zeros(1, 1, dtype=torch.int64, device=next(model.parameters()).device)
    cache = DynamicCache(config=model.config)
    model(input_ids=ids, past_key_values=cache, use_cache=True)
    token_bytes = 0
    for layer in cache.layers:
        token_bytes += sum(
            tensor.nbytes for tensor in vars(layer).values() if isinstance(tensor, Tensor)
        )
    state_bytes = sum(state.nbytes for _, state in states_of(cache))
    return max(1, token_bytes), state_bytes


def rows_for_memory(model: PreTrainedModel, length: int) -> int:
    """How many sequences of `length` tokens fit into the free memory, at least 1. On a CPU they get
    `MEMORY_SHARE` of it; on a GPU all but a reserve, because generation needs little else."""
    device = next(model.parameters()).device
    token_bytes, state_bytes = cached_bytes(model)
    row_bytes = token_bytes * length + 2 * state_bytes  # those of a prefill are copied
    if device.type != "cuda":
        free = available_memory() // local_world_size()
        return max(1, min(MAX_ROWS, int(MEMORY_SHARE * free / row_bytes)))
    free, usable = _free_on_gpu(device)
    logits_bytes = vocabulary_size(model) * LOGITS_BYTES
    rows = min(usable / (row_bytes + logits_bytes), LOGITS_SHARE * free / logits_bytes)
    return max(1, min(MAX_ROWS_GPU, int(rows)))


def pool_limits(model: PreTrainedModel, rows: int, length: int) -> tuple[int, int]:
    """The largest number of running rows, `rows` if it is not 0, and the most slots of their KV
    pool. On a GPU the rows do not depend on `length`, the most tokens of a sequence, because a row
    takes slots as it grows; as many start as have room."""
    device = next(model.parameters()).device
    if device.type != "cuda":
        rows = rows or rows_for_memory(model, length)
        return rows, rows * length
    free, usable = _free_on_gpu(device)
    logits_bytes = vocabulary_size(model) * LOGITS_BYTES
    rows = rows or max(1, min(MAX_ROWS_GPU, int(LOGITS_SHARE * free / logits_bytes)))
    token_bytes, _ = cached_bytes(model)
    slots = (usable - rows * logits_bytes) // token_bytes
    return rows, max(0, min(rows * length, slots))


def _free_on_gpu(device: torch.device) -> tuple[int, int]:
    """Free bytes, and those that the KV cache may take of them: prefill, recorded steps and
    libraries need some."""
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free = torch.cuda.mem_get_info(device)[0] + unused
    return free, free - max(RESERVE_BYTES, int(RESERVE_SHARE * free))


def warn_of_memory(before: int, after: int) -> None:
    """Warn, on every rank, that generation continues with fewer rows; empty the CUDA cache."""
    line = f"rollout: rank {rank()} is out of memory with {before} rows; continuing with {after}"
    _log.warning(line)
    if not is_main():
        print_line(f"warning: {line}")
    if on_gpu():
        torch.cuda.empty_cache()
