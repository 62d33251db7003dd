"""How many rows fit into memory, and which errors mean that it ran out."""

from types import SimpleNamespace

import pytest
import torch
from tiny_models import model_of

from dschat_ppo.rollout import memory
from dschat_ppo.rollout.memory import bytes_per_token, pool_limits, rows_for_memory

GIB = 2**30


def test_bytes_of_a_token_by_hand():
    """Keys and values of 2 layers, 2 heads of 8 numbers, 4 bytes each; gpt2 has 4 heads."""
    assert bytes_per_token(model_of("llama")) == 2 * 2 * 2 * 8 * 4
    assert bytes_per_token(model_of("gpt2")) == 2 * 2 * 4 * 8 * 4


def test_rows_follow_the_free_memory(monkeypatch):
    def rows_with(free: int) -> int:
        monkeypatch.setattr(memory, "available_memory", lambda: free)
        return rows_for_memory(model_of("llama"), 100)

    assert rows_with(2 * 256 * 100 * 10) == 10
    assert rows_with(2 * 256 * 100 * 10 - 1) == 9
    assert rows_with(1000) == 1
    assert rows_with(2**50) == memory.MAX_ROWS


def pretend_gpu(monkeypatch, free: int, unused: int = 0) -> SimpleNamespace:
    """A model whose tokens take 256 bytes, and whose logits take 24 x 48 = 1152 bytes a row."""
    model = SimpleNamespace(
        parameters=lambda: iter([SimpleNamespace(device=torch.device("cuda"))]),
        get_output_embeddings=lambda: SimpleNamespace(out_features=48),
    )
    monkeypatch.setattr(memory, "bytes_per_token", lambda model: 256)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free - unused, 2**50))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 7 + unused)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 7)
    return model


def rows_on_gpu(monkeypatch, free: int, length: int = 100, unused: int = 0) -> int:
    return rows_for_memory(pretend_gpu(monkeypatch, free, unused), length)


@pytest.mark.parametrize("unused", [0, 2**30])
def test_rows_on_a_gpu_take_all_memory_but_a_reserve_and_the_logits(unused, monkeypatch):
    row = 256 * 100 + 1152
    assert rows_on_gpu(monkeypatch, 2 * GIB + 10 * row, unused=unused) == 10
    assert rows_on_gpu(monkeypatch, 2 * GIB + 10 * row - 1, unused=unused) == 9
    assert rows_on_gpu(monkeypatch, 100 * GIB, length=90 * GIB // 256 // 500, unused=unused) == 499  # and the logits
    assert rows_on_gpu(monkeypatch, 100 * GIB, unused=unused) == memory.MAX_ROWS_GPU
    assert rows_on_gpu(monkeypatch, 2 * GIB, unused=unused) == 1


def test_the_rows_of_a_pool_do_not_depend_on_their_length_on_a_gpu(monkeypatch):
    """As many as a tenth of the memory has logits for; they share the slots that fit into the rest."""
    limits = pool_limits(pretend_gpu(monkeypatch, 20 * GIB), 0, 10**6)
    assert limits == (memory.MAX_ROWS_GPU, (18 * GIB - memory.MAX_ROWS_GPU * 1152) // 256)
    assert pool_limits(pretend_gpu(monkeypatch, 20 * GIB), 64, 100) == (64, 6400)
    assert pool_limits(pretend_gpu(monkeypatch, 3 * GIB), 64, 10**6) == (64, (GIB - 64 * 1152) // 256)
    assert pool_limits(pretend_gpu(monkeypatch, 2 * GIB), 64, 100) == (64, 0)  # the pool adds one sequence
    monkeypatch.setattr(memory, "vocabulary_size", lambda model: 2**20)  # 24 MiB of logits a row
    assert pool_limits(pretend_gpu(monkeypatch, 4800 * 2**20), 0, 100)[0] == 20


def test_the_rows_of_a_pool_reserve_their_longest_answer_on_a_cpu(monkeypatch):
    monkeypatch.setattr(memory, "rows_for_memory", lambda model, length: 700 // length)
    assert pool_limits(model_of("llama"), 0, 70) == (10, 700)
    assert pool_limits(model_of("llama"), 3, 70) == (3, 210)
