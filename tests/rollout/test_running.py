"""Continuous batching with a stand-in for the model: every cached number identifies its sequence
and position.

The tag of a prompt token is 1000 prompt + position, that of a generated token -(1000 sequence +
position).
"""

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import PretrainedConfig

from dschat_ppo.rollout import continuous_batching, running_batches, running_pool
from dschat_ppo.rollout.continuous_batching import ContinuousBatching
from dschat_ppo.rollout.generation_request import GenerationConfig, RolloutRequest
from dschat_ppo.rollout.kv_cache import SPARE, KVCache, PooledMetadata, PrefillMetadata
from dschat_ppo.rollout.running_batches import MAX_BATCHES, RunningBatches, Sequences
from dschat_ppo.rollout.running_pool import FreeSlots, RunningPool
from dschat_ppo.rollout.sampling import SamplingParameters, StoppingCriteria
from dschat_ppo.rollout.sequence_buffers import SequenceBuffers
from dschat_ppo.rollout.static_steps import StaticMemory
from dschat_ppo.types import PromptBatch

# tokens of an answer; of a poll and a segment; for which a new one has slots
LONGEST, STEP, FIRST = 32, 4, 5
OUT_OF_MEMORY = (
    "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: 8"
    " bytes"
)


@pytest.fixture(autouse=True)
def small(monkeypatch) -> None:
    monkeypatch.setattr(continuous_batching, "attention_replaced", lambda *_: nullcontext())
    monkeypatch.setattr(continuous_batching, "POLL", STEP)
    monkeypatch.setattr(running_pool, "FIRST_TOKENS", FIRST)
    monkeypatch.setattr(running_batches, "GROWTH", STEP)


def tagged(tags: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(n, L) tags -> keys (n, 2, L, 1), which are tag + head / 2, and values (n, 2, L, 3), which
    are their negative."""
    keys = (tags.double().unsqueeze(1) + torch.arange(2).view(1, -1, 1) / 2).unsqueeze(3)
    return keys, -keys.expand(-1, -1, -1, 3)


class World:
    """Generates `answers[i]` tokens for each sequence, in batches, or in a pool of at most
    `slots`."""

    def __init__(  # noqa: PLR0913
        self,
        monkeypatch,
        rng,
        prompt_lengths,
        rows,
        samples=1,
        share_from=0,
        slots=None,
        pool=None,
        answers=None,
    ):
        monkeypatch.setattr(continuous_batching, "MIN_SHARED_TOKENS", share_from)
        count, longest = len(prompt_lengths), max(prompt_lengths)
        self.prompt_lengths = np.asarray(prompt_lengths).repeat(samples)
        self.answers = (
            rng.integers(1, LONGEST + 1, count * samples)
            if answers is None
            else np.asarray(answers)
        )
        # left padding
        place = torch.arange(longest) - (longest - torch.tensor(prompt_lengths).unsqueeze(1))
        prompts = PromptBatch(1000 * torch.arange(count).unsqueeze(1) + place, place >= 0)
        config = GenerationConfig(SamplingParameters(top_k=1), StoppingCriteria(LONGEST), samples)
        seeds = torch.zeros(count * samples, dtype=torch.int64)
        request = RolloutRequest(prompts, seeds, torch.from_numpy(self.answers))
        self.buffers = SequenceBuffers(request, config, 4, STEP)
        memory = None
        if slots is not None:
            memory = StaticMemory(self.buffers, pool or KVCache(1, SPARE + 1), rows, slots)
        model = SimpleNamespace(config=PretrainedConfig())
        self.engine = ContinuousBatching(model, self.buffers, rows, memory=memory)
        self.engine._forward = self.forward
        self.samples = samples
        self.passes = self.shared = self.most_active = self.most_used = self.most_batches = 0

    def run(self) -> None:
        self.engine.run()
        assert self.buffers.response_lengths[:-1].tolist() == self.answers.tolist()

    def forward(self, ids, positions, cache, given=None) -> torch.Tensor:
        metadata, running = self.engine.attention.metadata, self.engine.running
        if isinstance(metadata, PrefillMetadata):
            self.passes += 1
            assert len(ids) == 1 or ids.numel() <= continuous_batching.MAX_PREFILL_TOKENS
            assert len(set(ids[:, 0].tolist())) == len(ids), "each prompt is computed once"
            tags = ids
        else:
            sequences = torch.from_numpy(running.rows.sequences)
            if isinstance(running, RunningPool):
                sequences = self.engine.memory.entries[0, : len(positions)]
                self.check_segments(running)
            else:
                self.most_batches = max(self.most_batches, len(running.batches))
                assert [batch.first for batch in metadata] == np.cumsum(
                    [0, *map(len, running.batches)]
                )[:-1].tolist()
            now = [sequence for sequence in sequences.tolist() if sequence < self.buffers.count]
            assert len(set(now)) == len(now) <= self.engine.rows
            self.most_active = max(self.most_active, len(now))
            # at the beginning of a poll
            for batch in metadata if positions[0, 0] == running.rows.positions[0] else ():
                self.check_rows(
                    batch, sequences[batch.first :].tolist(), positions[batch.first :, 0].tolist()
                )
            tags = -(1000 * sequences.unsqueeze(1) + positions)
        keys, values = tagged(tags)
        for layer in (0, 1):
            self.engine.attention(
                SimpleNamespace(layer_idx=layer), keys, keys, values, None, scaling=1.0
            )
        return torch.zeros(len(ids), 4)

    def check_rows(self, batch, sequences, positions) -> None:
        """Each row reads the tokens of its prompt and its answer, in order, before the new one is
        written."""
        for row, (sequence, position) in enumerate(
            zip(sequences[: batch.count], positions, strict=False)
        ):
            # an idle row, or the only token of a prompt
            if sequence == self.buffers.count or position == 0:
                continue
            fed = int(self.prompt_lengths[sequence]) - 1
            tags = [sequence // self.samples * 1000 + place for place in range(fed)]
            tags += [-(sequence * 1000 + place) for place in range(fed, position)]
            parts = []  # a cache, its row, the first slot and the number of tokens
            if isinstance(batch, PooledMetadata):
                prefix, own = int(batch.prefix_lengths[row]), int(batch.offsets[row])
                parts += [(batch.cache, 0, int(batch.prefix_starts[row]), prefix)] if prefix else []
                parts += [(batch.cache, 0, int(batch.starts[row]), own)] if own else []
                self.shared += prefix > 0
            else:
                if batch.prefix is not None:
                    cell, grid = int(batch.prefix.cells[row]), batch.prefix.grid
                    assert grid.flatten()[cell] == row
                    parts += [
                        (
                            batch.prefix.cache,
                            cell // grid.shape[1],
                            0,
                            int(batch.prefix.lengths[row]),
                        )
                    ]
                    self.shared += 1
                parts += [(batch.cache, row, 0, int(batch.slots[row]))] if batch.slots[row] else []
            keys, values = tagged(torch.tensor([tags]))
            for layer in (0, 1):
                for name, expected in (("keys", keys), ("values", values)):
                    found = [
                        getattr(c, name)[layer][place, :, first : first + n]
                        for c, place, first, n in parts
                    ]
                    assert torch.equal(torch.cat(found, dim=1), expected[0])

    def check_segments(self, running: RunningPool) -> None:
        rows, used = running.rows, [SPARE]
        for start, size, slots in zip(
            rows.starts.tolist(), rows.sizes.tolist(), rows.slots.tolist(), strict=True
        ):
            assert slots <= size
            used += range(start, start + size)
        for prompt, start in running._prefixes.items():
            used += range(start, start + int(self.prompt_lengths[prompt * self.samples]) - 1)
        assert len(used) == len(set(used)), "segments do not overlap"
        assert max(used) < running.pool.capacity <= running.most_slots
        self.most_used = max(self.most_used, len(used))
        numbers = running.sequences.prompts[rows.sequences]
        assert len(np.flatnonzero(np.diff(numbers))) + 1 == len(set(numbers)), (
            "rows of a prompt are together"
        )


SLOTS = pytest.mark.parametrize("slots", [None, 10**6], ids=["batches", "pool"])


@SLOTS
@pytest.mark.parametrize(("seed", "rows"), [(0, 1), (2, 8), (4, 200)])
def test_every_sequence_is_generated_once_from_its_own_keys(seed, rows, slots, monkeypatch):
    rng = np.random.default_rng(seed)
    world = World(monkeypatch, rng, rng.integers(1, 31, min(8 * rows, 40)), rows, slots=slots)
    world.run()
    assert world.most_active == min(rows, 40) and not world.shared
    assert world.most_batches <= MAX_BATCHES


@SLOTS
@pytest.mark.parametrize(
    ("seed", "rows", "share_from"), [(0, 1, 8), (3, 9, 0), (3, 9, 8), (5, 200, 8)]
)
def test_sequences_of_one_prompt_share_its_keys(seed, rows, share_from, slots, monkeypatch):
    rng = np.random.default_rng(seed)
    world = World(
        monkeypatch, rng, rng.integers(1, 31, min(2 * rows, 12)), rows, 4, share_from, slots
    )
    world.run()
    assert (world.shared > 0) == (share_from > 0 and (rows > 1 or slots is not None))


@SLOTS
def test_prefills_have_a_maximum_number_of_tokens(slots, monkeypatch):
    monkeypatch.setattr(continuous_batching, "MAX_PREFILL_TOKENS", 64)
    for samples, share_from in ((1, 0), (3, 2)):
        rng = np.random.default_rng(0)
        world = World(
            monkeypatch, rng, rng.integers(1, 91, 20), 20 * samples, samples, share_from, slots
        )
        world.run()
        assert world.passes > 10


def test_small_batches_are_merged_into_at_most_a_few(monkeypatch):
    rng = np.random.default_rng(1)
    world = World(monkeypatch, rng, rng.integers(1, 31, 200), 100)
    world.run()
    assert 1 < world.most_batches <= MAX_BATCHES


# Who starts


def test_long_prompts_come_first_and_groups_stay_together(monkeypatch):
    world = World(
        monkeypatch, np.random.default_rng(0), [3, 9, 5], rows=3, samples=2, answers=[9] * 6
    )
    assert world.engine.sequences.waiting.tolist() == [2, 3, 4, 5, 0, 1]
    with torch.no_grad():
        world.engine._step()
    assert world.engine.running.rows.sequences.tolist() == [2, 3]  # a third row would split a group
    assert world.engine.running.rows.positions.tolist() == [9, 9] and world.passes == 1


def sequences_of(prompt_lengths, limit=LONGEST, samples=1) -> Sequences:
    count = len(prompt_lengths)
    return Sequences(np.arange(count) // samples, np.array(prompt_lengths), np.full(count, limit))


def pool_of(sequences, most_slots=999) -> RunningPool:
    return RunningPool(sequences, KVCache(1, 1), most_slots, STEP, share_from=0)


def test_prompts_of_very_different_lengths_get_separate_batches():
    lengths = np.array([100] * 20 + [10] * 20)
    running = RunningBatches(sequences_of(lengths), 0)
    running.start(np.arange(40))
    assert [batch.rows.sequences.tolist() for batch in running.batches] == [
        list(range(20)),
        list(range(20, 40)),
    ]
    assert [batch.cache.capacity for batch in running.batches] == [100, 12]
    for few in (lengths[12:28], lengths[:25], lengths[15:]):  # fewer than `SMALL_BATCH` on one side
        running = RunningBatches(sequences_of(few), 0)
        running.start(np.arange(len(few)))
        assert len(running.batches) == 1


# Batches


def test_what_nobody_wrote_is_0_wherever_rows_and_slots_go():
    """A masked slot has a weight of 0, and 0 x NaN would be NaN."""
    cache, keys = KVCache(3, 5), torch.ones(2, 2, 1, 4)
    cache.layer(0, keys, keys[..., :3].bfloat16())
    assert cache.keys[0].shape == (3, 2, 5, 4) and cache.values[0].shape == (3, 2, 5, 3)
    assert (cache.keys[0].dtype, cache.values[0].dtype) == (torch.float32, torch.bfloat16)
    assert cache.nbytes == 3 * 2 * 5 * (4 * 4 + 3 * 2)
    cache.keys[0][:, :, :2] = 7.0
    cache.grow(2, 9)
    assert (
        cache.keys[0].shape == (2, 2, 9, 4)
        and not cache.keys[0][:, :, 2:].any()
        and cache.keys[0][:, :, :2].all()
    )
    cache.move_slots(np.array([1, 0]), np.array([11, 4]), 12)
    written = np.isin(np.arange(12), [11, 4])
    assert not cache.keys[0][:, :, ~written].any() and cache.keys[0][:, :, written].all()


# Pools


def test_when_slots_run_out_the_rows_that_wait_stop_first_if_that_is_set():
    """Rows of 8 slots, of which four more are needed; sequence 1 has the longest answer but waits,
    sequence 0 the shortest that does not."""
    sequences = sequences_of([1, 1, 1])
    for parked_first, stopped in ((True, [1]), (False, [0])):
        pool = RunningPool(sequences, KVCache(1, 1), 999, STEP, 0, parked_first)
        pool.start(np.arange(3))
        pool.rows.positions = np.array([6, 8, 7])
        pool.park(1, 8)
        pool.most_slots = SPARE + 1 + int(pool.rows.sizes.sum())
        assert pool.stop_for_slots() == stopped
        pool.clear()


def test_free_slots_are_taken_from_the_first_run_with_room_and_join_again():
    free = FreeSlots(1, 20)
    assert free.take([3, 5]) == [1, 4] and free.take([12]) is None and free.take([11]) == [9]
    free.give_back(1, 3)
    free.give_back(9, 11)
    assert (
        free.take([4]) == [9] and free.take([3, 8]) is None and free.take([2, 1, 7]) == [1, 3, 13]
    )
    assert free.take([1]) is None
    for start, size in ((4, 5), (1, 2), (13, 7), (3, 1), (9, 4)):
        free.give_back(start, size)
    assert free.take([19]) == [1]
    assert FreeSlots(1, 1).take([1]) is None


@pytest.mark.parametrize(("seed", "samples", "share_from"), [(0, 1, 0), (0, 4, 8), (3, 4, 8)])
def test_sequences_finish_with_fewer_slots_than_they_need_together(
    seed, samples, share_from, monkeypatch
):
    """From slots for one long sequence to slots for about a third of the rows."""
    rng, stopped, original = np.random.default_rng(seed), [], RunningPool.stop_for_slots
    monkeypatch.setattr(
        RunningPool, "stop_for_slots", lambda self: stopped.append(original(self)) or stopped[-1]
    )
    lengths = rng.integers(1, 31, 40 // samples)
    world = World(monkeypatch, rng, lengths, 20, samples, share_from, slots=63 + 60 * seed)
    world.run()
    assert 0 < world.most_used <= world.engine.running.most_slots
    if seed == 0:
        assert any(stopped)
    running = world.engine.running
    assert running._prefixes == {} and running._free.take([running.pool.capacity - SPARE - 1]) == [
        SPARE + 1
    ]


def test_a_stopped_sequence_is_not_lost_when_memory_runs_out_right_after(monkeypatch):
    """At the first layout of the same step."""
    rng, stopped, failed = np.random.default_rng(0), [], []
    stop, move = RunningPool.stop_for_slots, KVCache.move_slots

    def noting(self):
        stopped[:] = stop(self)
        return stopped[:]

    def failing(self, *args):
        if stopped and not failed:
            failed.extend(stopped)
            raise RuntimeError(OUT_OF_MEMORY)
        return move(self, *args)

    monkeypatch.setattr(RunningPool, "stop_for_slots", noting)
    monkeypatch.setattr(KVCache, "move_slots", failing)
    world = World(monkeypatch, rng, rng.integers(1, 31, 40), 20, slots=63)
    world.run()
    assert failed and world.engine.rows == 10


def test_the_answers_of_a_short_prompt_get_copies_of_one_computation():
    sequences = sequences_of([9] * 4, limit=9, samples=2)
    for running in (pool_of(sequences), RunningBatches(sequences, 0)):
        (prefill,) = running.start(np.arange(4))
        assert prefill.sequences.tolist() == [0, 0, 2, 2]


def test_a_wave_starts_only_if_all_rows_can_double_once():
    """10 sequences of 8 slots, which may need 43: 150 slots are enough for 9 to start, if each is
    to have 16."""
    running = pool_of(sequences_of([4] * 10, limit=40), most_slots=150)
    assert running.room_for(np.arange(10), 4) == 9
    running.start(np.arange(9))
    assert running.rows.sizes.tolist() == [8] * 9 and running.pool.capacity == SPARE + 1 + 9 * 8
    assert running.room_for(np.array([9]), 1) == 0
    running.advance(np.arange(9) < 1, 1)
    assert running.room_for(np.array([9]), 1) == 1
    assert running.room_for(np.array([9]), 2) == 0, "too few to be worth a pass"


def test_the_sequences_with_the_shortest_answers_stop_when_slots_run_out():
    """Prompts of 2, 12 and 22 tokens in rows of 31: the next poll needs 36 slots a row."""
    running = pool_of(sequences_of([2, 12, 22], limit=99))
    running.start(np.arange(3))
    running.rows.positions[:] = running.rows.sizes[:] = 31
    running.most_slots = SPARE + 1 + 2 * 36
    assert running.stop_for_slots() == [2] and running.rows.sequences.tolist() == [0, 1]


def test_a_row_that_needs_more_slots_than_it_has_keeps_what_it_holds():
    """The second row goes on after 40 tokens that it observed, of which none is in the pool, which
    has 11 slots."""
    running = pool_of(sequences_of([4, 4], limit=60))
    running.start(np.arange(2))
    slots = torch.arange(running.pool.capacity, dtype=torch.float32).view(1, 1, -1, 1)
    running.pool.layer(0, slots, slots)[0].copy_(slots)
    held = [
        range(start, start + size)
        for start, size in zip(running.rows.starts, running.rows.sizes, strict=True)
    ]
    running.park(1, 7)
    running.resume(1, 47)
    assert running.stop_for_slots() == []
    running.reserve_slots()
    assert running.rows.sizes[1] >= 47 + STEP
    for row, before in enumerate(held):
        start, count = running.rows.starts[row], min(running.rows.slots[row], len(before))
        assert running.pool.keys[0][0, 0, start : start + count, 0].tolist() == list(before)[:count]
