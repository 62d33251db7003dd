"""Decode steps at fixed addresses, and graphs of them on a stand-in for a GPU."""

import gc
import logging
import weakref
from contextlib import suppress
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fake_graphs import FakeDevice, FakeGraph
from tiny_models import LENGTHS, model_of, new_model, prompts_of

from dschat_ppo.rollout import continuous_batching, cuda_graphs, running_pool
from dschat_ppo.rollout.cuda_graphs import GraphedDecoder, RolloutGraphs, StaticMemory, length_bucket, row_bucket
from dschat_ppo.rollout.generator import GenerationConfig, generate
from dschat_ppo.rollout.kv_cache import KVCache
from dschat_ppo.rollout.running_pool import PooledRows
from dschat_ppo.rollout.sampling import SamplingParameters, StoppingCriteria

OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 MiB")
SAMPLINGS = {
    "plain": SamplingParameters(temperature=1.3),
    "greedy": SamplingParameters(top_k=1),
    "truncated": SamplingParameters(temperature=0.8, top_p=0.9, top_k=30, min_p=0.01),
    "penalty": SamplingParameters(temperature=0.9, repetition_penalty=1.3),
    "penalised nucleus": SamplingParameters(1.5, top_p=0.95, repetition_penalty=1.5),
}


def test_buckets_of_rows_and_lengths():
    counts = (1, 4, 5, 16, 17, 32, 33, 64, 65, 700)
    assert [row_bucket(n, 700) for n in counts] == [4, 4, 16, 16, 32, 32, 64, 64, 128, 700]
    assert [row_bucket(n, 3) for n in (1, 3)] == [3, 3]
    assert [length_bucket(n, 700) for n in (1, 256, 257, 512, 513, 700)] == [256, 256, 512, 512, 700, 700]


def decoder_of(step, rows, spare=99, poll=3, reset=None, reads_all_slots=True, longest=600) -> GraphedDecoder:
    memory = StaticMemory(KVCache(1, 50), rows, 50, torch.device("cpu"))
    buffers = SimpleNamespace(count=spare, width=longest, is_end=[], reset=reset)
    return GraphedDecoder(step, np.full(spare, 2), memory, buffers, poll, lambda: reads_all_slots)


def rows_of(sequences: list[int], position: int, prefix: int = 0) -> PooledRows:
    """Row n has its own slots from 10 n + 1 on; all share `prefix` tokens from slot 45 on."""
    count = len(sequences)
    parts = sequences, np.full(count, position), np.arange(count) * 10 + 1, np.full(count, 10)
    return PooledRows(*map(np.array, parts), np.full(count, 45 * (prefix > 0)), np.full(count, prefix))


@pytest.mark.parametrize("prefix", [0, 4])
def test_idle_and_finished_entries_write_to_spare_places(prefix):
    """5 of 7 rows are running, in a bucket of 7 entries, 3 tokens at a time; row 1 finishes with its second token."""
    seen, spare = [], 99

    def step(sequences, positions, metadata, search):
        (batch,) = metadata
        parts = sequences, positions, batch.own, batch.starts, batch.prefix_starts, batch.prefix_lengths
        seen.append([part.tolist() for part in parts])
        assert (batch.first, batch.count, batch.cache.capacity, batch.prefix) == (0, 7, 50, None)
        assert batch.length == 256 and batch.shares is (prefix > 0)
        assert search.tokens == cuda_graphs.NUCLEUS_STATIC and not search.overflow.any()
        finished = torch.zeros(7, dtype=torch.bool)
        finished[1] = len(seen) == 2
        return finished

    rows = rows_of([20, 21, 22, 23, 24], 6, prefix)
    rows.positions += np.arange(5)
    assert decoder_of(step, 9, spare).run(rows, 7).tolist() == [False, True, False, False, False]
    idle = [(spare, 0, 0, 0, 0, 0)] * 2
    for number, parts in enumerate(seen):
        expected = [
            (20 + row, 6 + row + number, 6 + row + number - prefix, 10 * row + 1, 45 * (prefix > 0), prefix)
            for row in range(5)
        ]
        if number == 2:
            expected[1] = idle[0]
        assert list(zip(*parts, strict=True)) == expected + idle
    assert len(seen) == 3


@pytest.mark.parametrize(("reads_all_slots", "expected"), [(True, 256), (False, 600)])
def test_the_length_is_a_bucket_only_if_attention_reads_all_of_it(reads_all_slots, expected):
    lengths = []

    def step(sequences, positions, metadata, search):
        lengths.append(metadata[0].length)
        return torch.zeros(len(sequences), dtype=torch.bool)

    decoder_of(step, 2, reads_all_slots=reads_all_slots).run(rows_of([1], 6), 2)
    assert set(lengths) == {expected}


def test_a_poll_in_which_a_nucleus_overflows_is_repeated_over_the_whole_vocabulary():
    """Also for a row that overflows and then finishes; not for an idle one. After two such polls at once."""
    log, overflowing = [], {5}

    def step(sequences, positions, metadata, search):
        log.append((search.tokens is None, sequences.tolist(), positions.tolist()))
        if search.tokens is not None:
            search.overflow.logical_or_(torch.tensor([int(sequence) in overflowing for sequence in sequences]))
        return sequences == 5

    rewound = []
    decoder = decoder_of(step, 4, poll=2, reset=lambda *rows: rewound.append(rows))
    both = rows_of([4, 5], 3)
    tokens = [([4, 5, 99, 99], [3, 3, 0, 0]), ([4, 99, 99, 99], [4, 0, 0, 0])]
    for _ in range(2):
        log.clear()
        assert decoder.run(both, 4).tolist() == [False, True]
        assert log == [(whole, *parts) for whole in (False, True) for parts in tokens]
    assert rewound == [([4, 5], [2, 2])] * 2  # a prompt of 2 tokens, and 2 tokens that stay
    log.clear()
    decoder.run(both, 4)
    assert [whole for whole, *_ in log] == [True, True] and len(rewound) == 2
    overflowing = {99}  # row 5 is idle once it has finished
    assert decoder_of(step, 4, reset=lambda *rows: rewound.append(rows)).run(rows_of([5], 3), 4).all()
    assert len(rewound) == 2


def test_graphs_of_a_pool_that_has_grown_are_forgotten():
    memory = StaticMemory(KVCache(1, 50), 2, 90, torch.device("cpu"))
    memory.graphs["bucket"] = object()
    none = np.array([], dtype=np.int64)
    memory.pool.move_slots(none, none, 50)
    assert memory.graphs
    memory.pool.move_slots(none, none, 60)
    assert not memory.graphs


# Graphs


@pytest.fixture
def device(monkeypatch) -> FakeDevice:
    return FakeDevice(monkeypatch)


def run(graphs=None, sampling="plain", rows=6, lengths=LENGTHS, model="llama", tokens=12, **stopping):
    stopping = StoppingCriteria(tokens, **({"eos_ids": (3, 5, 8, 17)} | stopping))
    config = GenerationConfig(SAMPLINGS[sampling], stopping, rows=rows, static=True)
    return generate(model_of(model), prompts_of(lengths), torch.arange(len(lengths)), config, graphs=graphs)


def assert_equal(found, expected) -> None:
    assert torch.equal(found.response_ids, expected.response_ids)
    assert torch.equal(found.rollout_logprobs, expected.rollout_logprobs)
    assert torch.equal(found.finish_reason, expected.finish_reason)
    assert torch.equal(found.prompt_ids, expected.prompt_ids)


def warnings_of(caplog) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name.startswith("dschat_ppo") and r.levelno == logging.WARNING]


@pytest.mark.parametrize(("model", "sampling"), [
    ("llama", "plain"), ("llama", "greedy"), ("llama", "truncated"), ("llama", "penalty"),
    ("gpt2", "plain"), ("mistral-window", "penalty"), ("mixtral", "truncated"),
])  # fmt: skip
def test_replayed_steps_equal_those_of_python(model, sampling, device, caplog):
    """No step asks the host, and all of them depend on the buffers alone; Mixtral runs its experts as one operator."""
    expected, graphs = run(model=model, sampling=sampling), RolloutGraphs()
    assert_equal(run(graphs, model=model, sampling=sampling), expected)
    assert not warnings_of(caplog) and not graphs.recorder.refusal
    assert graphs.recorder.captures == device.attempts > 0 and device.replays > 8
    assert device.stream is device.main and device.sync_mode == 0
    assert len(set(map(id, device.pools))) == 1
    assert device.streams == 1 and device.synchronised == device.emptied == 0


def test_one_graph_is_captured_for_each_bucket_of_all_rollouts(device, monkeypatch):
    """From 40 rows to none: buckets of 40, 32, 16 and 4 rows."""
    steps, original = [], GraphedDecoder._advance

    def counting(self, bucket):
        steps.append(bucket.rows)
        original(self, bucket)

    monkeypatch.setattr(GraphedDecoder, "_advance", counting)
    graphs, lengths = RolloutGraphs(), tuple(1 + n % 9 for n in range(40))
    for _ in range(2):
        run(graphs, rows=40, lengths=lengths, tokens=48)
    assert graphs.recorder.captures == len(set(steps)) == 4
    assert len(steps) == 2 * 4 + 2  # warm-ups and recordings, and before the first ones a step and a check for waits
    assert device.streams == 1
    assert len(set(map(id, device.pools))) == 1


def asks_host(monkeypatch) -> None:
    original = continuous_batching.ContinuousBatching._generate_tokens

    def asking(self, sequences, positions, *others):
        bool(positions.max() > 0)
        return original(self, sequences, positions, *others)

    monkeypatch.setattr(continuous_batching.ContinuousBatching, "_generate_tokens", asking)


def test_steps_that_ask_the_host_are_never_captured(device, monkeypatch, caplog):
    expected, graphs = run(), RolloutGraphs()
    asks_host(monkeypatch)
    for _ in range(2):
        assert_equal(run(graphs), expected)
        assert device.stream is device.main and device.sync_mode == 0
    assert device.attempts == graphs.recorder.captures == 0
    (warning,) = warnings_of(caplog)
    assert "waits for the GPU" in warning


@pytest.mark.parametrize("place", ["inside", "at end"])
def test_after_a_failed_capture_steps_run_without_graphs(place, device, caplog):
    """The error at the end hides the first one, as in PyTorch. There is one attempt in all rollouts."""
    expected, graphs = run(), RolloutGraphs()
    if place == "inside":
        device.fail_inside.append((RuntimeError("CUDA error: operation not permitted"), True))
    else:
        device.fail_at_end.append(RuntimeError("CUDA error: operation failed"))
    for _ in range(2):
        assert_equal(run(graphs), expected)
        assert device.stream is device.main
    assert device.attempts == device.synchronised == 1
    (warning,) = warnings_of(caplog)
    assert "cannot be captured" in warning


@pytest.mark.parametrize("breaks", [False, True])
def test_a_capture_that_runs_out_of_memory_halves_the_rows(breaks, device, caplog):
    """If its end fails too, the allocator cannot be trusted with another capture."""
    expected, graphs = run(), RolloutGraphs()
    device.fail_inside.append((OUT_OF_MEMORY, breaks))
    found = run(graphs)
    assert found.response_ids.tolist() == expected.response_ids.tolist()
    assert device.stream is device.main
    warnings = warnings_of(caplog)
    assert "out of memory with 6 rows; continuing with 3" in warnings[-1]
    assert bool(graphs.recorder.refusal) is breaks and len(warnings) == 1 + breaks
    assert (device.attempts == 1) is breaks


@pytest.mark.parametrize("fails", [False, True])
def test_what_a_rollout_used_is_freed_at_once(fails, device, monkeypatch):
    """Also after an error: nothing waits for the collection of garbage."""
    made, original = [], GraphedDecoder.__init__

    def noting(self, *arguments):
        original(self, *arguments)
        made.append(weakref.ref(self))

    monkeypatch.setattr(GraphedDecoder, "__init__", noting)
    if fails:
        device.fail_inside.append((ValueError("no error of memory"), False))
    gc.disable()
    try:
        with suppress(ValueError):
            run(RolloutGraphs())
        assert not device.fail_inside
        assert [reference() for reference in made] == [None]
    finally:
        gc.enable()


@pytest.mark.parametrize(("sampling", "recorded"), [
    ("truncated", True), ("penalised nucleus", True), ("penalised nucleus", False),
])  # fmt: skip
def test_a_nucleus_larger_than_what_a_step_searches_gives_the_same_answers(sampling, recorded, device, monkeypatch):
    """Steps search 4 of 48 tokens. Two polls are repeated, and later ones search all tokens at once."""
    expected = run(sampling=sampling, tokens=40)
    whole, original = [], GraphedDecoder._generate

    def noting(self, rows, most_rows, everywhere):
        whole.append(everywhere)
        return original(self, rows, most_rows, everywhere)

    monkeypatch.setattr(GraphedDecoder, "_generate", noting)
    monkeypatch.setattr(cuda_graphs, "NUCLEUS_STATIC", 4)
    assert_equal(run(RolloutGraphs() if recorded else None, sampling, tokens=40), expected)
    assert whole[:4] == [False, True, False, True] and len(whole) > 6 and all(whole[4:])


FIRST, SECOND = (3, 9, 17, 5, 2, 11), (30, 1, 6, 6, 14, 4)  # prompt lengths
PENALTY = SamplingParameters(1.2, top_p=0.9, repetition_penalty=1.4)


@pytest.fixture
def model():
    return new_model("llama")


def rollout(model, graphs, lengths, seed=0, samples=1, sampling=PENALTY, limits=None):
    stopping = StoppingCriteria(20, eos_ids=(3, 5), min_new_tokens=2)
    config = GenerationConfig(sampling, stopping, samples, rows=5, static=True)
    seeds = torch.arange(seed, seed + samples * len(lengths))
    return generate(model, prompts_of(lengths), seeds, config, limits=limits, graphs=graphs)


def test_graphs_of_one_rollout_serve_the_next(device, model):
    """Of other prompts, seeds and limits, with updated weights; the first answers stay as they were."""
    graphs = RolloutGraphs()
    first = rollout(model, graphs, FIRST)
    kept = [part.clone() for part in (first.response_ids, first.rollout_logprobs, first.finish_reason)]
    captures = graphs.recorder.captures
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.05)
    limits = torch.tensor([20, 3, 20, 8, 20, 1])
    expected = rollout(model, RolloutGraphs(), SECOND, seed=7, limits=limits)
    before = device.attempts
    assert_equal(rollout(model, graphs, SECOND, seed=7, limits=limits), expected)
    assert device.attempts == before and graphs.recorder.captures == captures > 0
    assert all(map(torch.equal, kept, (first.response_ids, first.rollout_logprobs, first.finish_reason)))


@pytest.mark.parametrize(
    "other", [{"samples": 2}, {"sampling": SamplingParameters(0.7)}, {"lengths": (70, 2, 3, 4, 5, 6)}]
)
def test_another_shape_or_sampling_needs_other_graphs(other, device, model):
    graphs = RolloutGraphs()
    rollout(model, graphs, FIRST)
    captures = graphs.recorder.captures
    how = {"lengths": FIRST, **other}
    expected = rollout(model, None, **how)
    found = rollout(model, graphs, **how)
    assert found.response_ids.tolist() == expected.response_ids.tolist()
    assert graphs.recorder.captures > captures


def test_weights_that_move_end_it(device, model):
    """As with ZeRO-3, whose weights are gathered for each rollout: later, nothing is kept while the model trains."""
    graphs = RolloutGraphs()
    rollout(model, graphs, FIRST)
    for _ in range(2):
        captures, weight = graphs.recorder.captures, model.model.embed_tokens.weight
        weight.data = torch.roll(weight.data, 1, dims=0)
        assert_equal(rollout(model, graphs, FIRST), rollout(model, RolloutGraphs(), FIRST))
        assert graphs.recorder.captures > captures
        assert graphs._kept is None


def test_a_large_cache_is_not_kept(device, model, monkeypatch):
    graphs, sizes = RolloutGraphs(), []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**40, sizes[-1]))
    token = 2 * 2 * 2 * 8 * 4  # keys and values of 2 layers, 2 heads of 8 numbers
    slots = 1 + 5 * 20 + sum(sorted(FIRST)[1:]) - 5  # 5 rows of 20 tokens and their prompts
    for total, kept in ((50 * token * slots, False), (50 * 2 * token * slots, True)):
        sizes.append(total)
        rollout(model, graphs, FIRST)
        assert (graphs._kept is not None) is kept
    assert graphs._kept.memory.pool.nbytes == token * slots


def test_a_pool_that_grows_after_a_capture_is_recorded_again(device, monkeypatch):
    """Graphs of the smaller pool die; the others need new memory."""
    for name in ("FIRST_TOKENS", "SEGMENT_STEP"):
        monkeypatch.setattr(running_pool, name, 4)
    graphs, expected = RolloutGraphs(), run(tokens=30, eos_ids=())
    assert_equal(run(graphs, tokens=30, eos_ids=()), expected)
    assert not graphs.recorder.refusal and device.attempts == graphs.recorder.captures
    assert len(set(device.pools)) > 1


@pytest.mark.parametrize("fails", [False, True])
def test_no_garbage_is_collected_while_a_graph_is_recorded(fails, device, monkeypatch):
    """It may hold the memory of older graphs, and to free that breaks a capture."""
    collects, begin, end = [], FakeGraph.capture_begin, FakeGraph.capture_end

    def noted(original):
        return lambda self, **how: collects.append(gc.isenabled()) or original(self, **how)

    monkeypatch.setattr(FakeGraph, "capture_begin", noted(begin))
    monkeypatch.setattr(FakeGraph, "capture_end", noted(end))
    if fails:
        device.fail_inside.append((RuntimeError("CUDA error: operation not permitted"), True))
    run(RolloutGraphs())
    assert collects and not any(collects) and gc.isenabled()
