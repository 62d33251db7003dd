"""CUDA graphs kept from one rollout to the next, on a stand-in for a GPU."""

import pytest
import torch
from fake_graphs import FakeDevice
from tiny_models import new_model, prompts_of

from dschat_ppo.rollout import pool_scheduler, rollout_graphs
from dschat_ppo.rollout.generator import GenerationConfig, generate
from dschat_ppo.rollout.kv_pool import KVPool
from dschat_ppo.rollout.rollout_graphs import RolloutGraphs
from dschat_ppo.rollout.sampling import SamplingParameters
from dschat_ppo.rollout.stopping_criteria import StoppingCriteria

FIRST, SECOND = (3, 9, 17, 5, 2, 11), (30, 1, 6, 6, 14, 4)  # prompt lengths
PENALTY = SamplingParameters(1.2, top_p=0.9, repetition_penalty=1.4)


@pytest.fixture
def device(monkeypatch) -> FakeDevice:
    return FakeDevice(monkeypatch)


@pytest.fixture
def model():
    return new_model("llama")


def rollout(model, graphs, lengths, seed=0, samples=1, sampling=PENALTY, limits=None):
    stopping = StoppingCriteria(20, eos_ids=(3, 5), min_new_tokens=2)
    config = GenerationConfig(sampling, stopping, samples, rows=5, static=True)
    seeds = torch.arange(seed, seed + samples * len(lengths))
    return generate(model, prompts_of(lengths), seeds, config, limits=limits, graphs=graphs)


def assert_equal(found, expected) -> None:
    assert torch.equal(found.response_ids, expected.response_ids)
    assert torch.equal(found.rollout_logprobs, expected.rollout_logprobs)
    assert torch.equal(found.finish_reason, expected.finish_reason)
    assert torch.equal(found.prompt_ids, expected.prompt_ids)


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


@pytest.mark.parametrize(("peak", "kept"), [(None, False), (0.8699, True), (0.8701, False)])
def test_a_larger_cache_is_kept_if_updates_leave_room_for_it(peak, kept, device, model, monkeypatch):
    """It takes 3 % of the memory, and updates `peak` of it; later they take 3 % more, because they hold the cache."""
    total = 2**30
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**40, total))
    graphs, peaks = RolloutGraphs(), {"train": peak and peak * total}
    monkeypatch.setattr(rollout_graphs, "largest_peak", peaks.get)
    monkeypatch.setattr(KVPool, "nbytes", int(0.03 * total) - 30_000)  # what else is kept takes less than that
    rollout(model, graphs, FIRST)
    for _ in range(2):
        before = device.attempts
        rollout(model, graphs, FIRST)
        assert (device.attempts == before) is kept
        peaks["train"] = peak and peak * total + int(0.03 * total)
    peaks["train"] = 0.95 * total  # longer rows came
    rollout(model, graphs, FIRST)
    assert graphs._kept is None


def test_a_pool_that_is_not_kept_begins_with_the_capacity_that_was_needed(device, model, monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**40, 0))
    for name in ("FIRST_TOKENS", "SEGMENT_STEP"):
        monkeypatch.setattr(pool_scheduler, name, 4)
    graphs, expected, growths, original = RolloutGraphs(), rollout(model, None, FIRST), [0], KVPool.repack

    def noting(self, sources, targets, capacity):
        growths[-1] += capacity > self.capacity
        original(self, sources, targets, capacity)

    monkeypatch.setattr(KVPool, "repack", noting)
    for _ in range(3):
        captures = graphs.recorder.captures
        assert_equal(rollout(model, graphs, FIRST), expected)
        assert graphs._kept is None and graphs.recorder.captures > captures
        growths.append(0)
    assert growths[0] > 1 and growths[1:] == [0, 0, 0]
    assert graphs.capacity(("another", 6), 100) == 1 and graphs.capacity(*graphs._capacities, 7) == 7


def test_nothing_is_kept_after_memory_ran_out(device, model, monkeypatch):
    graphs, original = RolloutGraphs(), KVPool.write_decode

    def failing(self, layer, slot_mapping, *others):
        if len(slot_mapping) == 2 * 5:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return original(self, layer, slot_mapping, *others)

    monkeypatch.setattr(KVPool, "write_decode", failing)
    rollout(model, graphs, FIRST)
    assert graphs.recorder.captures and graphs._kept is None
