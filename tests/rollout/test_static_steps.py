"""Decode steps at fixed addresses, whose rows share a KV pool."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from generation import assert_same, run
from pooled_runs import LITTLE, pooled, small_segments  # noqa: F401
from tiny_models import LENGTHS, new_model

from dschat_ppo.cpu_kernels import operations
from dschat_ppo.rollout import continuous_batching, generator, static_steps
from dschat_ppo.rollout.kv_cache import KVCache
from dschat_ppo.rollout.running_pool import PooledRows, RunningPool
from dschat_ppo.rollout.sampling import SamplingParameters, StoppingCriteria
from dschat_ppo.rollout.static_steps import StaticDecoder, StaticMemory, row_bucket

BYTES_PER_TOKEN = 2 * 2 * 2 * 8 * 4  # keys and values of 2 layers, 2 heads of 8 numbers


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    """PyTorch's operations: a GPU has no kernels and products for CPUs."""
    monkeypatch.setattr(operations, "kernels", lambda dtype: None)
    monkeypatch.setattr(generator, "can_prepack", lambda model: False)


def test_buckets_of_rows():
    counts = (1, 4, 5, 16, 17, 32, 33, 64, 65, 700)
    assert [row_bucket(n, 700) for n in counts] == [4, 4, 16, 16, 32, 32, 64, 64, 128, 700]
    assert [row_bucket(n, 3) for n in (1, 3)] == [3, 3]


@pytest.mark.parametrize("prefix", [0, 4])
def test_idle_and_finished_entries_write_to_spare_places(prefix):
    """5 of 7 rows are running, in a bucket of 7 entries, 3 tokens at a time; row 1 finishes with
    its second token."""
    seen, spare = [], 99

    def step(sequences, positions, metadata, search):
        (batch,) = metadata
        parts = (
            sequences,
            positions,
            batch.offsets,
            batch.starts,
            batch.prefix_starts,
            batch.prefix_lengths,
        )
        seen.append([part.tolist() for part in parts])
        assert (batch.first, batch.count, batch.cache.capacity, batch.prefix) == (0, 7, 50, None)
        assert batch.length == 256 and batch.shares is (prefix > 0)
        assert search.tokens == static_steps.NUCLEUS_STATIC and not search.overflow.any()
        finished = torch.zeros(7, dtype=torch.bool)
        finished[1] = len(seen) == 2
        return finished

    buffers, row = (
        SimpleNamespace(count=spare, width=600, is_end=[], token_ids=torch.zeros(0)),
        np.arange(5),
    )
    memory = StaticMemory(buffers, KVCache(1, 50), 9, 50)
    # row n has its own slots from 10 n + 1 on; all share `prefix` tokens from slot 45 on
    rows = PooledRows(
        20 + row,
        6 + row,
        row * 0 + prefix,
        row * 0 + 45 * (prefix > 0),
        10 * row + 1,
        row * 0 + 10,
        row * 0,
    )
    decoder = StaticDecoder(step, np.full(spare, 2), memory, 3, lambda: True)
    assert decoder.run(rows, 7).tolist() == [False, True, False, False, False]
    idle = [(spare, 0, 0, 0, 0, 0)] * 2
    for number, parts in enumerate(seen):
        expected = [
            (
                20 + row,
                6 + row + number,
                6 + row + number - prefix,
                10 * row + 1,
                45 * (prefix > 0),
                prefix,
            )
            for row in range(5)
        ]
        if number == 2:
            expected[1] = idle[0]
        assert list(zip(*parts, strict=True)) == expected + idle
    assert len(seen) == 3


def noted_searches(monkeypatch) -> list[bool]:
    """Whether each poll searches the whole vocabulary."""
    searches, original = [], StaticDecoder._generate

    def noting(self, rows, most_rows, searches_all):
        searches.append(searches_all)
        return original(self, rows, most_rows, searches_all)

    monkeypatch.setattr(StaticDecoder, "_generate", noting)
    return searches


def test_a_nucleus_larger_than_what_a_step_searches_gives_the_same_answers(monkeypatch):
    """Steps search 4 of 48 tokens. Two polls are repeated, and later ones search all tokens at
    once."""
    sampling = SamplingParameters(1.5, top_p=0.95, repetition_penalty=1.5)
    stopping = StoppingCriteria(40, eos_ids=(3, 5, 8, 17))
    expected = run("llama", LENGTHS, sampling, stopping, rows=6, static=True)
    whole = noted_searches(monkeypatch)
    monkeypatch.setattr(static_steps, "NUCLEUS_STATIC", 4)
    found = run("llama", LENGTHS, sampling, stopping, rows=6, static=True)
    assert_same(found, expected, atol=0)
    assert whole[:4] == [False, True, False, True] and len(whole) > 6 and all(whole[4:])


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
    lengths, tokens = tuple(30 + n % 35 for n in range(64)), 1024
    stopping = StoppingCriteria(tokens, eos_ids=(3,))
    rollout = run(model, lengths, SamplingParameters(50.0), stopping, rows=64, static=True)
    answers = rollout.response_mask.sum(dim=1)
    assert 30 < answers.float().mean() < 70 and answers.max() > 100
    # for the longest prompt and answer
    reserved = 64 * (64 + tokens + continuous_batching.POLL + 2) * BYTES_PER_TOKEN
    assert 0 < max(largest) < 0.3 * reserved


@pytest.mark.usefixtures("small_segments")
@pytest.mark.parametrize(
    ("model", "samples", "stopping", "slots"),
    [
        ("llama", 3, "eos", "ample"),
        ("llama", 3, "stop strings", "little"),
        ("mistral-window", 3, "eos", "little"),
        *(
            pytest.param(*case, marks=pytest.mark.release)
            for case in (
                ("llama", 1, "eos", "little"),
                ("llama", 3, "eos", "little"),
                ("gpt2", 3, "eos", "one long row"),
            )
        ),
    ],
)
def test_the_answers_do_not_depend_on_the_memory(model, samples, stopping, slots, monkeypatch):
    expected = pooled(samples, stopping, model, static=False)
    preempted, original = [], RunningPool.stop_for_slots
    monkeypatch.setattr(
        RunningPool,
        "stop_for_slots",
        lambda self: preempted.append(original(self)) or preempted[-1],
    )
    monkeypatch.setattr(generator, "pool_limits", lambda *_: (6, LITTLE[slots]))
    assert_same(pooled(samples, stopping, model), expected)
    if model == "llama" and samples == 3:
        assert any(preempted) is (slots == "little")


@pytest.mark.usefixtures("small_segments")
def test_the_model_steps_wait_for_the_device_once_in_a_poll(monkeypatch):
    """Rows that move, and rows that go back to the queue, need no answer of the device either."""
    monkeypatch.setattr(generator, "pool_limits", lambda *_: (6, LITTLE["little"]))
    answers, inside, step = [], [], continuous_batching.ContinuousBatching._step
    for name in ("cpu", "item", "tolist", "__bool__"):
        original = getattr(torch.Tensor, name)
        monkeypatch.setattr(
            torch.Tensor,
            name,
            lambda self, *args, original=original: answers.append(1) or original(self, *args),
        )

    def counting(self):
        before = len(answers)
        step(self)
        inside.append(len(answers) - before)

    monkeypatch.setattr(continuous_batching.ContinuousBatching, "_step", counting)
    pooled(samples=3, sampling=SamplingParameters())
    assert len(inside) > 5 and set(inside) == {1}
