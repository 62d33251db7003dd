"""How many rows fit into memory, and which errors mean that it ran out."""

import pytest
import torch
from tiny_models import model_of

from dschat_ppo.rollout import memory
from dschat_ppo.rollout.memory import bytes_per_token, is_out_of_memory, rows_for_memory


def test_bytes_of_a_token_by_hand():
    """Keys and values of 2 layers, 2 heads of 8 numbers, 4 bytes each; gpt2 has 4 heads."""
    assert bytes_per_token(model_of("llama")) == 2 * 2 * 2 * 8 * 4
    assert bytes_per_token(model_of("gpt2")) == 2 * 2 * 4 * 8 * 4


def test_rows_follow_the_free_memory(monkeypatch):
    def rows_with(free: int) -> int:
        monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: type("Memory", (), {"available": free}))
        return rows_for_memory(model_of("llama"), 100)

    assert rows_with(2 * 256 * 100 * 10) == 10
    assert rows_with(2 * 256 * 100 * 10 - 1) == 9
    assert rows_with(1000) == 1
    assert rows_with(2**50) == memory.MAX_ROWS


@pytest.mark.parametrize(
    ("problem", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True),
        (RuntimeError("shape mismatch"), False),
        (RuntimeError("CUDA error: device-side assert triggered"), False),
    ],
)
def test_errors_that_mean_a_lack_of_memory(problem, expected):
    assert is_out_of_memory(problem) is expected
