"""Static steps whose rows share a KV pool: the memory that they take, and the same answers with little of it."""

import pytest
import torch
from fake_graphs import FakeDevice
from test_flash_decode import LoopingKernel, flash_with
from tiny_models import model_of, new_model, prompts_of
from torch import Tensor

from dschat_ppo.rollout import continuous_batching, flash_decode, generator, running_pool
from dschat_ppo.rollout.cuda_graphs import RolloutGraphs
from dschat_ppo.rollout.generator import GenerationConfig, generate
from dschat_ppo.rollout.kv_cache import KVCache
from dschat_ppo.rollout.running_pool import RunningPool
from dschat_ppo.rollout.sampling import SamplingParameters, StoppingCriteria

LENGTHS = (1, 9, 30, 5, 17, 12)
BYTES_PER_TOKEN = 2 * 2 * 2 * 8 * 4  # keys and values of 2 layers, 2 heads of 8 numbers


@pytest.fixture
def largest(monkeypatch) -> list[int]:
    """Bytes of the pool after each write."""
    sizes, original = [0], KVCache.layer

    def watching(self, *args):
        found = original(self, *args)
        sizes.append(self.nbytes)
        return found

    monkeypatch.setattr(KVCache, "layer", watching)
    return sizes


def test_answers_much_shorter_than_the_longest_possible_one_take_little_memory(largest):
    """64 prompts of 30 to 64 tokens; the answers have 50 of 1,024 tokens, some up to 150."""
    model = new_model("llama", max_position_embeddings=2048)
    prompts, tokens = prompts_of(tuple(30 + n % 35 for n in range(64))), 1024
    stopping = StoppingCriteria(tokens, eos_ids=(3,))
    config = GenerationConfig(SamplingParameters(50.0), stopping, rows=64, static=True)
    rollout = generate(model, prompts, torch.arange(64), config)
    answers = rollout.response_mask.sum(dim=1)
    assert 30 < answers.float().mean() < 70 and answers.max() > 100
    reserved = (
        64 * (64 + tokens + continuous_batching.POLL + 2) * BYTES_PER_TOKEN
    )  # a row of the longest prompt and answer each
    assert 0 < max(largest) < 0.3 * reserved


def decode(rows):
    return ["".join(chr(97 + token // 7) + chr(65 + token % 7) for token in row) for row in rows]


STOPPING = {
    "eos": StoppingCriteria(30, eos_ids=(3, 8)),
    "stop strings": StoppingCriteria(30, eos_ids=(3,), stop_strings=("Ab", "dC"), decode=decode),
}
LITTLE = {"ample": 10**6, "little": 110, "one long row": 0}


@pytest.fixture
def small_segments(monkeypatch) -> None:
    """Segments that fill up in the middle of an answer, and shared prompts of 8 tokens."""
    monkeypatch.setattr(running_pool, "FIRST_TOKENS", 5)
    monkeypatch.setattr(running_pool, "SEGMENT_STEP", 4)
    monkeypatch.setattr(continuous_batching, "MIN_SHARED_TOKENS", 8)


def run(model="llama", samples=1, stopping="eos", static=True, graphs=None, rows=6, sampling=None):
    sampling = sampling or SamplingParameters(1.3, repetition_penalty=1.2)
    config = GenerationConfig(sampling, STOPPING[stopping], samples, rows=rows, static=static)
    seeds = torch.arange(samples * len(LENGTHS))
    return generate(model_of(model), prompts_of(LENGTHS), seeds, config, graphs=graphs)


def assert_same(found, expected) -> None:
    assert torch.equal(found.response_ids, expected.response_ids)
    assert torch.equal(found.finish_reason, expected.finish_reason)
    torch.testing.assert_close(found.rollout_logprobs, expected.rollout_logprobs, atol=2e-5, rtol=0)


CASES = [("llama", 1, "eos"), ("llama", 3, "eos"), ("llama", 3, "stop strings"), ("mistral-window", 3, "eos")]


@pytest.mark.parametrize(
    ("model", "samples", "stopping", "slots"),
    [*((*case, slots) for case in CASES for slots in ("ample", "little")), ("gpt2", 3, "eos", "one long row")],
)
def test_the_answers_do_not_depend_on_the_memory(model, samples, stopping, slots, small_segments, monkeypatch):
    expected = run(model, samples, stopping, static=False)
    preempted, original = [], RunningPool.stop_for_slots
    monkeypatch.setattr(RunningPool, "stop_for_slots", lambda self: preempted.append(original(self)) or preempted[-1])
    monkeypatch.setattr(generator, "pool_limits", lambda *_: (6, LITTLE[slots]))
    assert_same(run(model, samples, stopping), expected)
    if slots == "ample":
        assert not any(preempted)
    if (model, samples, stopping, slots) == ("llama", 3, "eos", "little"):
        assert any(preempted)


@torch.library.custom_op("tests::looping_kernel", mutates_args=())
def looping_kernel(
    query: Tensor, keys: Tensor, values: Tensor, numbers: Tensor, starts: Tensor, used: Tensor, longest: int,
    scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """One operator for a recorded step, as the kernel is."""
    return LoopingKernel()(query, keys, values, numbers, starts, used, longest, scale)


@pytest.mark.parametrize(
    ("samples", "slots", "kernel"),
    [(1, "ample", "products"), (1, "little", "flash"), (3, "ample", "flash"), (3, "little", "products")],
)
def test_graphs_stay_right_while_rows_move_and_the_pool_grows(samples, slots, kernel, small_segments, monkeypatch):
    """A graph is captured again only after the pool has grown."""
    expected = run(samples=samples, static=False)
    if kernel == "flash":
        monkeypatch.setattr(continuous_batching, "flash_decode", lambda device: flash_with(looping_kernel))
        flash_decode._agrees.cache_clear()
    monkeypatch.setattr(generator, "pool_limits", lambda *_: (6, LITTLE[slots]))
    growths, moves, original = [], [], KVCache.move_slots

    def noting(self, sources, targets, capacity):
        (growths if capacity != self.capacity else moves).append(len(sources))
        original(self, sources, targets, capacity)

    monkeypatch.setattr(KVCache, "move_slots", noting)
    device, graphs = FakeDevice(monkeypatch), RolloutGraphs()
    assert_same(run(samples=samples, graphs=graphs), expected)
    assert growths and moves and device.replays
    assert graphs.recorder.captures <= 4 * len(growths) * samples


def test_later_rollouts_find_a_pool_that_is_large_enough(small_segments, monkeypatch):
    """The second one records buckets again that the first one used before its pool was as large."""
    FakeDevice(monkeypatch)
    graphs = RolloutGraphs()
    first, captures = run(graphs=graphs), []
    capacities, original = [], KVCache.move_slots
    monkeypatch.setattr(KVCache, "move_slots", lambda self, *args: capacities.append(args[2]) or original(self, *args))
    for _ in range(2):
        assert_same(run(graphs=graphs), first)
        captures.append(graphs.recorder.captures)
    assert len(set(capacities)) == len(set(captures)) == 1


def test_the_model_steps_wait_for_the_device_once_in_a_poll(small_segments, monkeypatch):
    """Rows that move, and rows that go back to the queue, need no answer of the device either."""
    monkeypatch.setattr(generator, "pool_limits", lambda *_: (6, LITTLE["little"]))
    polls, answers = [], []
    original_run, original_cpu = continuous_batching.GraphedDecoder.run, torch.Tensor.cpu
    monkeypatch.setattr(
        continuous_batching.GraphedDecoder, "run", lambda self, *args: polls.append(1) or original_run(self, *args)
    )
    for name in ("cpu", "item", "tolist", "__bool__"):
        original = getattr(torch.Tensor, name)
        monkeypatch.setattr(
            torch.Tensor, name, lambda self, *args, original=original: answers.append(1) or original(self, *args)
        )
    inside, step = [], continuous_batching.ContinuousBatching._step

    def counting(self):
        before = len(answers)
        step(self)
        inside.append(len(answers) - before)

    monkeypatch.setattr(continuous_batching.ContinuousBatching, "_step", counting)
    run(samples=3, sampling=SamplingParameters())
    assert original_cpu is not torch.Tensor.cpu and len(polls) == len(inside) > 5
    assert set(inside) == {1}
