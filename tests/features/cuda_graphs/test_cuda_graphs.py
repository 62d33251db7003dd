"""Graphs of decode steps at fixed addresses, on a stand-in for a GPU."""

import gc
from functools import cache

import pytest
import torch
from fake_graphs import FakeDevice, FakeGraph
from generation import assert_same, warnings_of
from generation import run as run_on
from pooled_runs import LITTLE, pooled, small_segments  # noqa: F401
from scripted_calls import SAMPLING as CALLS
from scripted_calls import STOPPING as CALL_ENDS
from scripted_calls import ScriptedCalls, reserved_for
from tiny_models import LENGTHS, new_model

from dschat_ppo.cpu_kernels import operations
from dschat_ppo.features.cuda_graphs.step_recorders import RolloutGraphs
from dschat_ppo.rollout import continuous_batching, generator, static_steps
from dschat_ppo.rollout.generation_request import GenerationConfig, RolloutRequest
from dschat_ppo.rollout.generator import generate_calls
from dschat_ppo.rollout.kv_cache import KVCache
from dschat_ppo.rollout.sampling import SamplingParameters, StoppingCriteria
from dschat_ppo.rollout.static_steps import StaticDecoder

OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 MiB")
SAMPLINGS = {
    "plain": SamplingParameters(temperature=1.3),
    "truncated": SamplingParameters(temperature=0.8, top_p=0.9, top_k=30, min_p=0.01),
    "penalty": SamplingParameters(temperature=0.9, repetition_penalty=1.3),
    "penalised nucleus": SamplingParameters(1.5, top_p=0.95, repetition_penalty=1.5),
}


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    """The stand-in replays PyTorch's operations; a GPU has no kernels and products for CPUs."""
    monkeypatch.setattr(operations, "kernels", lambda dtype: None)
    monkeypatch.setattr(generator, "can_prepack", lambda model: False)


@pytest.fixture
def device(monkeypatch) -> FakeDevice:
    return FakeDevice(monkeypatch)


def run(
    graphs=None,
    sampling="plain",
    rows=6,
    lengths=LENGTHS,
    model="llama",
    tokens=12,
    ends=(3, 5, 8, 17),
):
    stopping = StoppingCriteria(tokens, eos_ids=ends)
    return run_on(
        model, lengths, SAMPLINGS[sampling], stopping, recorder=graphs, rows=rows, static=True
    )


without_graphs = cache(run)


@pytest.mark.parametrize(
    ("model", "sampling"),
    [
        ("llama", "truncated"),
        ("gpt2", "plain"),
        ("mistral-window", "penalty"),
        ("mixtral", "truncated"),
    ],
)
def test_replayed_steps_equal_those_of_python(model, sampling, device, caplog):
    """No step asks the host, and all of them depend on the buffers alone; Mixtral runs its experts
    as one operator."""
    expected, graphs = without_graphs(model=model, sampling=sampling), RolloutGraphs()
    assert_same(run(graphs, model=model, sampling=sampling), expected, atol=0)
    assert not warnings_of(caplog) and not graphs.recorder.refusal
    assert graphs.recorder.captures == device.attempts > 0 and device.replays > 8
    assert device.stream is device.main and device.sync_mode == 0
    assert len(set(map(id, device.pools))) == 1
    assert device.streams == 1 and device.synchronised == device.emptied == 0


def test_calls_that_open_late_replay_the_graphs_of_the_generation_before(device, monkeypatch):
    """Recorded steps read the prompts, limits and seeds of sequences that open between them."""

    def answers(graphs):
        partner = ScriptedCalls(3, plan=0, schedule=0)
        config = GenerationConfig(CALLS, CALL_ENDS, rows=6)
        reserved = reserved_for(3)
        found = generate_calls(model, reserved, config, partner, recorder=graphs)
        return found, partner.turns

    model = new_model("llama")
    (expected, numbers), turns = answers(None)
    monkeypatch.setattr(RolloutRequest, "on_gpu", True)
    monkeypatch.setattr(continuous_batching, "CPU_POLL", continuous_batching.POLL)
    graphs = RolloutGraphs()
    for _ in range(2):
        captures = graphs.recorder.captures
        (found, found_numbers), found_turns = answers(graphs)
        assert found_numbers == numbers
        assert_same(found, expected)
        for episode, other_episode in zip(found_turns, turns, strict=True):
            for calls, other_calls in zip(episode, other_episode, strict=True):
                for call, other in zip(calls, other_calls, strict=True):
                    assert (call.ids, call.reason) == (other.ids, other.reason)
    assert graphs.recorder.captures < 2 * captures, "most graphs are those of the first time"
    assert captures > 0 and device.replays > 20


def test_one_graph_is_captured_for_each_bucket_of_all_rollouts(device, monkeypatch):
    """From 40 rows to none: buckets of 40, 32, 16 and 4 rows."""
    steps, original = [], StaticDecoder._advance

    def counting(self, bucket):
        steps.append(bucket.rows)
        original(self, bucket)

    monkeypatch.setattr(StaticDecoder, "_advance", counting)
    graphs, lengths = RolloutGraphs(), tuple(1 + n % 9 for n in range(40))
    for _ in range(2):
        run(graphs, rows=40, lengths=lengths, tokens=48)
    assert graphs.recorder.captures == len(set(steps)) == 4
    # warm-ups and recordings, and before the first ones a step and a check for waits
    assert len(steps) == 2 * 4 + 2
    assert device.streams == 1
    assert len(set(map(id, device.pools))) == 1


@pytest.mark.parametrize("place", ["asks the host", "inside", "at end"])
def test_where_a_capture_cannot_succeed_steps_run_without_graphs(
    place, device, monkeypatch, caplog
):
    """A step that asks the host is never captured. An error at the end of a capture hides the first
    one, as in PyTorch. There is one attempt in all rollouts."""
    expected, graphs, engine = (
        without_graphs(),
        RolloutGraphs(),
        continuous_batching.ContinuousBatching,
    )
    original = engine._generate_tokens

    def asking(self, sequences, positions, *others):
        bool(positions.max() > 0)
        return original(self, sequences, positions, *others)

    if place == "asks the host":
        monkeypatch.setattr(engine, "_generate_tokens", asking)
    elif place == "inside":
        device.fail_inside.append((RuntimeError("CUDA error: operation not permitted"), True))
    else:
        device.fail_at_end.append(RuntimeError("CUDA error: operation failed"))
    for _ in range(2):
        assert_same(run(graphs), expected, atol=0)
        assert device.stream is device.main and device.sync_mode == 0
    assert (
        device.attempts == device.synchronised == (place != "asks the host")
        and not graphs.recorder.captures
    )
    (warning,) = warnings_of(caplog)
    assert ("waits for the GPU" if place == "asks the host" else "cannot be captured") in warning


@pytest.mark.parametrize("breaks", [False, True])
def test_a_capture_that_runs_out_of_memory_halves_the_rows(breaks, device, caplog):
    """If its end fails too, the allocator cannot be trusted with another capture."""
    expected, graphs = without_graphs(), RolloutGraphs()
    device.fail_inside.append((OUT_OF_MEMORY, breaks))
    found = run(graphs)
    assert found.response_ids.tolist() == expected.response_ids.tolist()
    assert device.stream is device.main
    warnings = warnings_of(caplog)
    assert "out of memory with 6 rows; continuing with 3" in warnings[-1]
    assert bool(graphs.recorder.refusal) is breaks and len(warnings) == 1 + breaks
    assert (device.attempts == 1) is breaks


@pytest.mark.parametrize("sampling", ["truncated", "penalised nucleus"])
def test_a_nucleus_larger_than_what_a_step_searches_gives_the_same_answers(
    sampling, device, monkeypatch
):
    """Steps search 4 of 48 tokens. Two polls are repeated, and later ones search all tokens at
    once."""
    expected = without_graphs(sampling=sampling, tokens=40)
    whole, original = [], StaticDecoder._generate

    def noting(self, rows, most_rows, searches_all):
        whole.append(searches_all)
        return original(self, rows, most_rows, searches_all)

    monkeypatch.setattr(StaticDecoder, "_generate", noting)
    monkeypatch.setattr(static_steps, "NUCLEUS_STATIC", 4)
    assert_same(run(RolloutGraphs(), sampling, tokens=40), expected, atol=0)
    assert whole[:4] == [False, True, False, True] and len(whole) > 6 and all(whole[4:])


FIRST, SECOND = (3, 9, 17, 5, 2, 11), (30, 1, 6, 6, 14, 4)  # prompt lengths
PENALTY = SamplingParameters(1.2, top_p=0.9, repetition_penalty=1.4)


@pytest.fixture
def model():
    return new_model("llama")


def rollout(model, graphs, lengths, sampling=PENALTY, **how):
    stopping = StoppingCriteria(20, eos_ids=(3, 5), min_new_tokens=2)
    return run_on(model, lengths, sampling, stopping, recorder=graphs, rows=5, static=True, **how)


def test_graphs_of_one_rollout_serve_the_next(device, model):
    """Of other prompts, seeds and limits, with updated weights; the first answers stay as they
    were."""
    graphs = RolloutGraphs()
    first = rollout(model, graphs, FIRST)
    kept = [
        part.clone() for part in (first.response_ids, first.rollout_logprobs, first.finish_reason)
    ]
    captures = graphs.recorder.captures
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.05)
    how = {"seeds": torch.arange(7, 13), "limits": torch.tensor([20, 3, 20, 8, 20, 1])}
    expected = rollout(model, RolloutGraphs(), SECOND, **how)
    before = device.attempts
    assert_same(rollout(model, graphs, SECOND, **how), expected, atol=0)
    assert device.attempts == before and graphs.recorder.captures == captures > 0
    assert all(
        map(torch.equal, kept, (first.response_ids, first.rollout_logprobs, first.finish_reason))
    )


@pytest.mark.parametrize(
    "other",
    [{"samples": 2}, {"sampling": SamplingParameters(0.7)}, {"lengths": (70, 2, 3, 4, 5, 6)}],
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
    """As with ZeRO-3, whose weights are gathered for each rollout: later, nothing is kept while the
    model trains."""
    graphs = RolloutGraphs()
    rollout(model, graphs, FIRST)
    for _ in range(2):
        captures, weight = graphs.recorder.captures, model.model.embed_tokens.weight
        weight.data = torch.roll(weight.data, 1, dims=0)
        assert_same(rollout(model, graphs, FIRST), rollout(model, RolloutGraphs(), FIRST), atol=0)
        assert graphs.recorder.captures > captures
        assert graphs._memory is None


def test_a_large_cache_is_not_kept(device, model, monkeypatch):
    graphs, sizes = RolloutGraphs(), []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**40, sizes[-1]))
    token = 2 * 2 * 2 * 8 * 4  # keys and values of 2 layers, 2 heads of 8 numbers
    slots = 1 + 5 * 20 + sum(sorted(FIRST)[1:]) - 5  # 5 rows of 20 tokens and their prompts
    for total, kept in ((50 * token * slots, False), (50 * 2 * token * slots, True)):
        sizes.append(total)
        rollout(model, graphs, FIRST)
        assert (graphs._memory is not None) is kept
    assert graphs._memory.pool.nbytes == token * slots


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


# The pool


@pytest.mark.usefixtures("small_segments")
@pytest.mark.parametrize(
    ("samples", "slots"),
    [
        (3, "little"),
        pytest.param(1, "little", marks=pytest.mark.release),
        pytest.param(3, "ample", marks=pytest.mark.release),
    ],
)
def test_graphs_stay_right_while_rows_move_and_the_pool_grows(samples, slots, monkeypatch):
    """A graph is captured again only after the pool has grown."""
    expected = pooled(samples=samples, static=False)
    monkeypatch.setattr(generator, "pool_limits", lambda *_: (6, LITTLE[slots]))
    growths, moves, original = [], [], KVCache.move_slots

    def noting(self, sources, targets, capacity):
        (growths if capacity != self.capacity else moves).append(len(sources))
        original(self, sources, targets, capacity)

    monkeypatch.setattr(KVCache, "move_slots", noting)
    device, graphs = FakeDevice(monkeypatch), RolloutGraphs()
    assert_same(pooled(samples=samples, recorder=graphs), expected)
    assert growths and moves and device.replays
    assert graphs.recorder.captures <= 4 * len(growths) * samples


@pytest.mark.usefixtures("small_segments")
def test_later_rollouts_find_a_pool_that_is_large_enough(monkeypatch):
    """The second one records buckets again that the first one used before its pool was as large."""
    FakeDevice(monkeypatch)
    graphs = RolloutGraphs()
    first, captures = pooled(recorder=graphs), []
    capacities, original = [], KVCache.move_slots
    monkeypatch.setattr(
        KVCache,
        "move_slots",
        lambda self, *args: capacities.append(args[2]) or original(self, *args),
    )
    for _ in range(2):
        assert_same(pooled(recorder=graphs), first)
        captures.append(graphs.recorder.captures)
    assert len(set(capacities)) == len(set(captures)) == 1
