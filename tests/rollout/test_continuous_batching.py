"""Continuous batching that runs out of memory, and the memory that it releases."""

import gc
import logging
import sys
import weakref

import pytest
import torch
from tiny_models import model_of, prompts_of, tokens_of
from torch.multiprocessing.reductions import StorageWeakRef

from dschat_ppo.rollout import running_batches, running_pool
from dschat_ppo.rollout.generator import GenerationConfig, generate
from dschat_ppo.rollout.kv_cache import KVCache
from dschat_ppo.rollout.sampling import SamplingParameters, StoppingCriteria
from dschat_ppo.rollout.sequence_buffers import SequenceBuffers

MESSAGE = "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried 8 bytes"
PER_CACHE = 2 * 2  # keys and values of two layers
LENGTHS = (40, 9, 1, 33, 2, 17, 36, 5)
PENALTY = SamplingParameters(temperature=1.3, repetition_penalty=1.5)  # tokens marked as seen must be reset too
WAYS = {
    "continuous": {"samples": 1},
    "shared": {"samples": 3},
    "static": {"samples": 1, "static": True},
    "static samples": {"samples": 3, "static": True},
}


def run(rows: int = 8, **how):
    config = GenerationConfig(PENALTY, StoppingCriteria(12, eos_ids=(3, 5, 8, 17)), rows=rows, **how)
    seeds = torch.arange(len(LENGTHS) * config.samples)
    return generate(model_of("llama"), prompts_of(LENGTHS), seeds, config)


def assert_same(found, expected) -> None:
    assert tokens_of(found) == tokens_of(expected)
    assert torch.equal(found.finish_reason, expected.finish_reason)
    torch.testing.assert_close(found.rollout_logprobs, expected.rollout_logprobs, atol=2e-5, rtol=0)


def warnings_of(caplog) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name.startswith("dschat_ppo") and r.levelno == logging.WARNING]


def fail_at(monkeypatch, place: str, when) -> None:
    """The cache runs out of memory at a write of a `prefill` or a `decode` step, or at a `move`, where `when(number of
    such calls, rows of the step)`."""
    calls = []

    def failing(original, place_of):
        def call(self, *args):
            if place_of(*args) == place:
                calls.append(1)
                if when(len(calls), len(args[1])):
                    raise RuntimeError(MESSAGE)
            return original(self, *args)

        return call

    written = failing(KVCache.layer, lambda layer, keys, _: "decode" if keys.shape[2] == 1 else "prefill")
    monkeypatch.setattr(KVCache, "layer", written)
    for method in ("move_rows", "move_slots"):
        monkeypatch.setattr(KVCache, method, failing(getattr(KVCache, method), lambda *_: "move"))


@pytest.mark.parametrize(
    ("place", "call"), [("prefill", 1), ("prefill", 2), ("decode", 1), ("decode", 12), ("move", 1)]
)
@pytest.mark.parametrize("way", list(WAYS))
def test_after_a_lack_of_memory_half_the_rows_give_the_same_responses(way, place, call, monkeypatch, caplog):
    expected = run(**WAYS[way])
    fail_at(monkeypatch, place, lambda number, _: number == call)
    found = run(**WAYS[way])
    (warning,) = warnings_of(caplog)
    assert "out of memory with 8 rows" in warning
    assert "with 4" in warning
    assert_same(found, expected)


@pytest.mark.parametrize("way", list(WAYS))
def test_a_single_row_that_does_not_fit_is_an_error(way, monkeypatch, caplog):
    fail_at(monkeypatch, "decode", lambda *_: True)
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        run(**WAYS[way])
    assert len(warnings_of(caplog)) == 3  # 8, 4, 2


def test_a_lack_of_gpu_memory_is_handled_too(monkeypatch, caplog):
    expected, original, calls = run(), KVCache.layer, []

    def failing(self, *args):
        calls.append(1)
        if len(calls) == 5:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return original(self, *args)

    monkeypatch.setattr(KVCache, "layer", failing)
    assert_same(run(), expected)
    assert len(warnings_of(caplog)) == 1


@pytest.fixture
def caches(monkeypatch):
    """Weak references to every cache that is made, with the garbage collector disabled."""
    references, original = [], KVCache.__init__

    def noting(self, *args):
        original(self, *args)
        references.append(weakref.ref(self))

    monkeypatch.setattr(KVCache, "__init__", noting)
    gc.collect()
    gc.disable()
    yield references
    gc.enable()


@pytest.mark.parametrize("samples", [1, 3])
def test_keys_and_values_are_released_after_the_call(samples, caches):
    run(samples=samples)
    assert caches
    assert not [cache for cache in caches if cache() is not None]


@pytest.mark.parametrize(("how", "growing"), [({}, "grow"), ({"static": True}, "move_slots")], ids=["batches", "pool"])
def test_only_one_layer_is_in_memory_twice(how, growing, caches, monkeypatch):
    """Growing, merging and removing rows leave no copies: where one is made, there is each layer of a cache once, and
    there are about as many caches as batches."""
    monkeypatch.setattr(running_batches, "GROWTH", 4)
    monkeypatch.setattr(running_pool, "FIRST_TOKENS", 2)
    monkeypatch.setattr(running_pool, "SEGMENT_STEP", 2)
    original, made, callers = torch.Tensor.new_zeros, [], set()

    def allocating(like, *shape):
        if len(shape) == 4:
            tensors = sum(not storage.expired() for storage in made)
            assert tensors <= PER_CACHE * sum(cache() is not None for cache in caches)
            callers.add(sys._getframe(1).f_code.co_name)
        found = original(like, *shape)
        if len(shape) == 4:
            made.append(StorageWeakRef(found.untyped_storage()))
            assert sum(cache() is not None for cache in caches) <= 6
        return found

    monkeypatch.setattr(torch.Tensor, "new_zeros", allocating)
    run(rows=5, **how)
    assert growing in callers


@pytest.mark.parametrize("way", list(WAYS))
def test_sequences_go_back_to_the_queue_when_there_is_memory_again(way, caches, monkeypatch):
    """Resetting their buffers allocates a little on a GPU."""
    original, held = SequenceBuffers.reset, []

    def noting(self, *args):
        held.append(sum(cache().nbytes for cache in caches if cache() is not None))
        return original(self, *args)

    monkeypatch.setattr(SequenceBuffers, "reset", noting)
    fail_at(monkeypatch, "decode", lambda number, _: number == 9)
    run(**WAYS[way])
    assert held == [0, 0]  # the first one fills the buffers
