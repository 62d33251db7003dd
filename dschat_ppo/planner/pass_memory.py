"""What the passes of a model need while they run: activations, logits, and the KV cache of generation."""

from __future__ import annotations

from dschat_ppo.algorithms.fused_logprobs import BLOCK_BYTES, GPU_BLOCK_BYTES
from dschat_ppo.models.activation_memory import SMALLEST_ON_HOST
from dschat_ppo.planner.role_memory import FP32, Memory, Role
from dschat_ppo.rollout.memory import LOGITS_BYTES, LOGITS_SHARE, MAX_ROWS, MAX_ROWS_GPU, MEMORY_SHARE


def activations(role: Role, tokens: int, on_host: bool = False) -> Memory:
    """What the backward pass of a micro-batch needs: bytes per token (`SavedActivations`) x tokens.

    With gradient checkpointing: the inputs of the layers, and the whole of the layer that runs again. With tiled MLPs,
    one piece of as many tokens as a hidden state has numbers.

    Args:
        role: of the model.
        tokens: of the micro-batch on this rank.
        on_host: `--offload_activations`.
    """
    saved = role.parts.saved
    piece = saved.piece * min(tokens, role.parts.hidden)
    largest = max(saved.layers, default=0)
    if not role.checkpoints:
        kept, running = saved.whole * tokens, piece
    else:
        kept = (len(saved.layers) * saved.layer_input + saved.rest) * tokens
        running = largest * tokens + piece
    if on_host and role.on_gpu and kept > SMALLEST_ON_HOST:
        return Memory(largest * tokens + running, kept)
    return Memory.of(kept + running)


def forward_activations(role: Role, tokens: int) -> Memory:
    """What a pass without gradients needs: about what its largest layer would save."""
    saved = role.parts.saved
    return Memory.of(max(saved.layers, default=0) * tokens + 2 * saved.layer_input * tokens)


def head_memory(role: Role, tokens: int, with_gradient: bool = True) -> Memory:
    """Of the log-probs of `tokens` tokens by the fused head (`algorithms/fused_logprobs.py`): up to three blocks of
    fp32 logits, and with a gradient the states and their gradients in fp32, (s + 4) H bytes for each token.

    A scalar head needs next to nothing.
    """
    if role.parts.vocabulary <= 1:
        return Memory()
    block = min(GPU_BLOCK_BYTES if role.on_gpu else BLOCK_BYTES, FP32 * tokens * role.parts.vocabulary)
    states = (role.itemsize + FP32) * role.parts.hidden * tokens if with_gradient else 0
    return Memory.of(3 * block + states)


def sampling_logits(role: Role, rows: int) -> Memory:
    """Logits of a decode step: about six fp32 copies of (rows, V) (`rollout/memory.py`)."""
    return Memory.of(LOGITS_BYTES * rows * role.parts.vocabulary)


def running_rows(role: Role, rows: int, length: int, wanted: int, free: int) -> int:
    """Sequences that are decoded at a time, at least 1, as `rollout/memory.py` chooses them.

    Args:
        role: of the actor.
        rows: sequences of a rollout on this rank.
        length: tokens of the longest one.
        wanted: `--rollout_rows`; 0: as many as memory allows.
        free: bytes of the device that everything else leaves.
    """
    per_row = max(1, role.parts.kv_bytes * length)
    if not role.on_gpu:
        return max(1, min(rows, wanted or min(MAX_ROWS, int(MEMORY_SHARE * free / per_row))))
    logits = LOGITS_BYTES * role.parts.vocabulary
    most = wanted or min(MAX_ROWS_GPU, int(LOGITS_SHARE * max(free, 0) / logits))
    return max(1, min(rows, most, int(max(free, 0) / (per_row + logits))))


def kv_cache(role: Role, rows: int, length: int) -> Memory:
    """Keys and values of `rows` sequences of `length` tokens."""
    return Memory.of(role.parts.kv_bytes * rows * length)


def experience(rows: int, prompt: int, answer: int, on_host: bool, on_gpu: bool) -> Memory:
    """The rows of a PPO step, which every rank holds: 9 bytes (id, mask) for each token of the prompt, and 41 for each
    of the answer (id, two masks, and six or seven fp32 numbers, such as log-probs, values and advantages)."""
    return Memory.of(rows * (9 * prompt + 41 * answer), on_host and on_gpu)
