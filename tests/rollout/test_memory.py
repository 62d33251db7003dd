"""How many rows fit into memory, what happens when it runs out, and what is held twice."""

import gc
import sys
import weakref
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from generation import assert_same, run, warnings_of
from tiny_models import model_of, tokens_of
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from dschat_ppo.rollout import (
    cache_memory,
    continuous_batching,
    generator,
    running_batches,
    running_pool,
)
from dschat_ppo.rollout.cache_memory import cached_bytes, pool_limits, rows_for_memory
from dschat_ppo.rollout.kv_cache import KVCache, RowStates
from dschat_ppo.rollout.padded_batches import GROWTH_TOKENS, InPlaceLayer, new_cache
from dschat_ppo.rollout.running_pool import RunningPool
from dschat_ppo.rollout.sampling import SamplingParameters, StoppingCriteria
from dschat_ppo.rollout.sequence_buffers import SequenceBuffers

GIB = 2**30


def test_bytes_of_a_token_by_hand():
    """Keys and values of 2 layers, 2 heads of 8 numbers, 4 bytes each; gpt2 has 4 heads. The first
    layer of lfm2 is a convolution of 3 tokens with 32 numbers each."""
    assert cached_bytes(model_of("llama")) == (2 * 2 * 2 * 8 * 4, 0)
    assert cached_bytes(model_of("gpt2")) == (2 * 2 * 4 * 8 * 4, 0)
    assert cached_bytes(model_of("lfm2")) == (2 * 2 * 8 * 4, 3 * 32 * 4)


def test_rows_on_a_cpu_follow_the_free_memory_of_each_rank(monkeypatch):
    def rows_with(free: int, ranks: int = 1) -> int:
        monkeypatch.setattr(cache_memory, "available_memory", lambda: free)
        monkeypatch.setattr(cache_memory, "local_world_size", lambda: ranks)
        return rows_for_memory(model_of("llama"), 100)

    assert (rows_with(2 * 256 * 100 * 10), rows_with(2 * 256 * 100 * 10 - 1), rows_with(1000)) == (
        10,
        9,
        1,
    )
    assert rows_with(2 * 256 * 100 * 10, ranks=5) == 2
    assert rows_with(2**50) == cache_memory.MAX_ROWS


@pytest.fixture
def gpu(monkeypatch):
    """A function: a model on a GPU with `free` memory, `unused` of it in the allocator. A token
    takes 256 bytes, the logits of a row 24 x 48 = 1152."""

    def pretend(free: int, unused: int = 0) -> SimpleNamespace:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free - unused, 2**50))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 7 + unused)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 7)
        return SimpleNamespace(
            parameters=lambda: iter([SimpleNamespace(device=torch.device("cuda"))]),
            get_output_embeddings=lambda: SimpleNamespace(out_features=48),
        )

    monkeypatch.setattr(cache_memory, "cached_bytes", lambda model: (256, 0))
    return pretend


@pytest.mark.parametrize("unused", [0, GIB])
def test_rows_on_a_gpu_take_all_memory_but_a_reserve_and_the_logits(unused, gpu):
    row = 256 * 100 + 1152
    assert rows_for_memory(gpu(2 * GIB + 10 * row, unused), 100) == 10
    assert rows_for_memory(gpu(2 * GIB + 10 * row - 1, unused), 100) == 9
    assert rows_for_memory(gpu(100 * GIB, unused), 90 * GIB // 256 // 500) == 499  # and the logits
    assert rows_for_memory(gpu(100 * GIB, unused), 100) == cache_memory.MAX_ROWS_GPU
    assert rows_for_memory(gpu(2 * GIB, unused), 100) == 1


def test_the_rows_of_a_pool_do_not_depend_on_their_length_on_a_gpu(gpu, monkeypatch):
    """As many as a tenth of the memory has logits for; they share the slots that fit into the
    rest."""
    most = cache_memory.MAX_ROWS_GPU
    assert pool_limits(gpu(20 * GIB), 0, 10**6) == (most, (18 * GIB - most * 1152) // 256)
    assert pool_limits(gpu(20 * GIB), 64, 100) == (64, 6400)
    assert pool_limits(gpu(3 * GIB), 64, 10**6) == (64, (GIB - 64 * 1152) // 256)
    assert pool_limits(gpu(2 * GIB), 64, 100) == (64, 0)  # the pool adds one sequence
    monkeypatch.setattr(
        cache_memory, "vocabulary_size", lambda model: 2**20
    )  # 24 MiB of logits a row
    assert pool_limits(gpu(4800 * 2**20), 0, 100)[0] == 20
    monkeypatch.setattr(cache_memory, "rows_for_memory", lambda model, length: 700 // length)
    assert pool_limits(model_of("llama"), 0, 70) == (
        10,
        700,
    ), "on a CPU, rows reserve their longest answer"
    assert pool_limits(model_of("llama"), 3, 70) == (3, 210)


# Memory runs out

OF_A_CPU = (
    "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you"
    " tried 8 bytes"
)
WAYS = {
    "batches": {},
    "shared": {"samples": 3},
    "pool": {"static": True},
    "shared pool": {"samples": 3, "static": True},
    "states": {"model": "lfm2", "samples": 3},
}


def fail_at(monkeypatch, place: str, when) -> None:
    """The cache runs out of memory at a write of a `prefill` or a `decode` step, or at a `move`,
    where `when(number of such calls)`: as on a GPU in a prefill, else as on a CPU."""
    calls = []

    def failing(original, place_of):
        def call(self, *args):
            if place_of(*args) == place:
                calls.append(1)
                if when(len(calls)):
                    raise (
                        torch.OutOfMemoryError("CUDA out of memory")
                        if place == "prefill"
                        else RuntimeError(OF_A_CPU)
                    )
            return original(self, *args)

        return call

    written = failing(
        KVCache.layer, lambda layer, keys, _: "decode" if keys.shape[2] == 1 else "prefill"
    )
    monkeypatch.setattr(KVCache, "layer", written)
    for method in ("move_rows", "move_slots"):
        monkeypatch.setattr(KVCache, method, failing(getattr(KVCache, method), lambda *_: "move"))


@cache
def undisturbed(way: str):
    return run(rows=8, **WAYS[way])


PLACES = [("prefill", 2), ("decode", 1), ("decode", 12), ("move", 1)]


@pytest.mark.parametrize(
    ("way", "place", "call"),
    [
        *((way, *place) for way in ("shared", "shared pool") for place in PLACES),
        ("states", "decode", 12),
        *(
            pytest.param(way, *place, marks=pytest.mark.release)
            for way in ("batches", "pool")
            for place in PLACES
        ),
    ],
)
def test_after_a_lack_of_memory_half_the_rows_give_the_same_responses(
    way, place, call, monkeypatch, caplog
):
    expected = undisturbed(way)
    fail_at(monkeypatch, place, lambda number: number == call)
    found = run(rows=8, **WAYS[way])
    (warning,) = warnings_of(caplog)
    assert "out of memory with 8 rows; continuing with 4" in warning
    assert_same(found, expected)


def test_no_state_of_the_failed_step_is_in_memory_when_generation_continues(monkeypatch):
    states, at_the_warning, original = [], [], RowStates.add

    def noting(self, *args):
        original(self, *args)
        states.extend(StorageWeakRef(table.untyped_storage()) for table in self._tables.values())

    def warned(before, after):
        gc.collect()
        at_the_warning.extend(storage.expired() for storage in states)

    monkeypatch.setattr(RowStates, "add", noting)
    monkeypatch.setattr(continuous_batching, "warn_of_memory", warned)
    fail_at(monkeypatch, "decode", lambda number: number == 12)
    run(rows=8, **WAYS["states"])
    assert at_the_warning and all(at_the_warning)


@pytest.mark.parametrize("way", ["batches", "pool"])
def test_a_single_row_that_does_not_fit_is_an_error(way, monkeypatch, caplog):
    fail_at(monkeypatch, "decode", lambda _: True)
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        run(rows=8, **WAYS[way])
    assert len(warnings_of(caplog)) == 3  # 8, 4, 2


@pytest.mark.parametrize(("most", "warnings"), [(1, 3), (3, 2), (5, 1)])
def test_a_padded_batch_without_memory_starts_again_with_half_the_rows(most, warnings, caplog):
    """Batches of more than `most` rows have no memory for their third pass, whose rows are 42
    tokens wide."""
    expected = run(rows=8, engine="padded")

    def fail(module, args, inputs):
        if len(inputs["input_ids"]) > most and inputs["attention_mask"].shape[1] == 42:
            raise RuntimeError(OF_A_CPU)

    hook = model_of("llama").register_forward_pre_hook(fail, with_kwargs=True)
    try:
        assert_same(run(rows=8, engine="padded"), expected)
    finally:
        hook.remove()
    assert len(warnings_of(caplog)) == warnings


# Lack of memory in episodes


class Counting:
    """Environments that answer an action with its first tokens, twice; every second time all of
    them together."""

    def __init__(self):
        self.calls, self.asked, self.polls = [], [], 0

    def end_turn(self, sequence, ids, end):
        self.calls.append((sequence, end, tuple(ids)))
        turn = sum(call[0] == sequence for call in self.calls)
        self.asked.append((sequence, [ids[0]] * (3 + sequence % 7) if turn < 3 else []))

    def observed(self, wait):
        self.polls += 1
        found, self.asked = (self.asked, []) if wait or self.polls % 2 else ([], self.asked)
        return found

    def cut(self, sequence, end):
        self.calls.append((sequence, end, "cut"))

    def stop(self, sequence):
        self.calls.append((sequence, "stop"))


def episodes(**how):
    turns = Counting()
    stopping = StoppingCriteria(30, eos_ids=tuple(range(3, 48, 5)))
    return run(rows=8, samples=3, stopping=stopping, partner=turns, **how), sorted(
        map(str, turns.calls)
    )


@cache
def undisturbed_episodes():
    return episodes()


def assert_same_episodes(found, calls):
    expected, expected_calls = undisturbed_episodes()
    assert_same(found, expected)
    assert found.episode_lengths.tolist() == expected.episode_lengths.tolist()
    assert calls == expected_calls, "no environment is asked twice"


@pytest.mark.parametrize(
    ("place", "call"),
    [("prefill", 2), ("prefill", 9), ("prefill", 16), ("decode", 12), ("decode", 150), ("move", 1)],
)
def test_episodes_go_on_after_a_lack_of_memory_and_ask_no_environment_again(
    place, call, monkeypatch, caplog
):
    """Prefills 9 and 16 read observations."""
    fail_at(monkeypatch, place, lambda number: number == call)
    assert_same_episodes(*episodes())
    assert ["continuing with 4" in line for line in warnings_of(caplog)] == [True]


def test_episodes_go_on_where_only_a_single_row_has_memory(monkeypatch, caplog):
    fail_at(monkeypatch, "decode", lambda number: number in (30, 60, 90))
    assert_same_episodes(*episodes())
    assert len(warnings_of(caplog)) == 3


@pytest.mark.parametrize("slots", [0, 150])
def test_episodes_whose_slots_run_out_stop_and_start_again(slots, monkeypatch):
    """0: as many as one episode may need. Also those stop that wait for their environments, and
    start when these have answered."""
    stopped, waited, stop = [], [], RunningPool.stop_for_slots

    def noting(self):
        parked = set(self.rows.sequences[self.rows.parked == 1].tolist())
        found = stop(self)
        stopped.extend(found)
        waited.extend(parked & set(found))
        return found

    monkeypatch.setattr(RunningPool, "stop_for_slots", noting)
    monkeypatch.setattr(generator, "pool_limits", lambda model, rows, length: (rows, slots))
    monkeypatch.setattr(continuous_batching, "CPU_POLL", continuous_batching.POLL)  # as on a GPU
    monkeypatch.setattr(running_pool, "FIRST_TOKENS", 2)
    monkeypatch.setattr(running_batches, "GROWTH", 4)
    assert_same_episodes(*episodes())
    assert len(stopped) > len(waited) > 0


def test_an_answer_of_an_environment_is_not_lost_when_memory_runs_out_right_then(
    monkeypatch, caplog
):
    numbers, original = [], SequenceBuffers.observe

    def failing(self, sequence, tokens):
        numbers.append(sequence)
        if len(numbers) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        original(self, sequence, tokens)

    monkeypatch.setattr(SequenceBuffers, "observe", failing)
    assert_same_episodes(*episodes())
    assert numbers[2] in numbers[3:] and len(warnings_of(caplog)) == 1


def test_an_episode_without_a_row_is_waited_for_when_no_other_is_left(monkeypatch, caplog):
    """The first one ends an action at once and loses its row; the second one runs into its
    limit."""
    greedy = {"prompts": (9, 40), "sampling": SamplingParameters(top_k=1)}
    (first, *_), others = tokens_of(run(stopping=StoppingCriteria(30), **greedy))
    assert first not in others
    turns = Counting()
    turns.observed = lambda wait: [(turns.asked.pop()[0], [])] if wait and turns.asked else []
    fail_at(monkeypatch, "decode", lambda number: number == 20)
    found = run(stopping=StoppingCriteria(30, eos_ids=(first,)), partner=turns, **greedy)
    assert found.response_lengths.tolist() == [1, 30] and len(warnings_of(caplog)) == 1
    assert turns.calls == [(0, 0, (first,)), (1, 29, "cut")]
    assert not turns.asked, "its environment was heard"


# Copies


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


@pytest.mark.parametrize(("way", "growing"), [("batches", "grow"), ("pool", "move_slots")])
def test_only_one_layer_is_in_memory_twice(way, growing, caches, monkeypatch):
    """Growing, merging and removing rows leave no copies: where one is made, there are keys and
    values of two layers of each cache once, and about as many caches as batches."""
    monkeypatch.setattr(running_batches, "GROWTH", 4)
    monkeypatch.setattr(running_pool, "FIRST_TOKENS", 2)
    original, made, callers = torch.Tensor.new_zeros, [], set()

    def allocating(like, *shape):
        if len(shape) == 4:
            tensors = sum(not storage.expired() for storage in made)
            assert tensors <= 2 * 2 * sum(cache() is not None for cache in caches)
            callers.add(sys._getframe(1).f_code.co_name)
        found = original(like, *shape)
        if len(shape) == 4:
            made.append(StorageWeakRef(found.untyped_storage()))
            assert sum(cache() is not None for cache in caches) <= 6
        return found

    monkeypatch.setattr(torch.Tensor, "new_zeros", allocating)
    run(rows=5, **WAYS[way])
    assert growing in callers


def test_the_layer_of_padded_batches_grows_in_place_and_returns_what_transformers_own_returns():
    ours, theirs, places = InPlaceLayer(), DynamicLayer(), []
    for length in (5, 1, GROWTH_TOKENS - 1, 1, 2 * GROWTH_TOKENS, 1):
        keys, values = torch.randn(2, 3, length, 4), torch.randn(2, 3, length, 6)
        for found, expected in zip(
            ours.update(keys, values), theirs.update(keys, values), strict=True
        ):
            assert torch.equal(found, expected)
        assert ours.get_seq_length() == theirs.get_seq_length()
        places.append(ours.buffers[0].data_ptr())
    assert places[0] == places[1] == places[2] != places[3], "spare capacity is used up first"
    assert new_cache(model_of("llama")).layer_class_to_replicate is InPlaceLayer
    mamba = new_cache(model_of("mamba"))
    assert isinstance(mamba, DynamicCache) and mamba.layer_class_to_replicate is not InPlaceLayer
