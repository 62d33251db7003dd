"""The scheduler of a KV pool without a model: every cached number identifies its sequence and position."""

import numpy as np
import pytest
import torch
from tagged_keys import HEADS, tagged

from dschat_ppo.rollout import pool_scheduler, scheduler
from dschat_ppo.rollout.kv_cache import SPARE, KVPool
from dschat_ppo.rollout.pool_scheduler import PoolScheduler

POLL = 4


class World:
    """Runs a scheduler with a clock in place of a model.

    The tag of a prompt token is 1000 prompt + position, that of a generated token -(1000 sequence + position).
    """

    def __init__(
        self, rng, prompt_lengths, prompts, rows, samples=1, share_from=0, most_slots=10**6, longest=40, pool=None
    ):
        self.prompt_lengths, self.prompts = np.asarray(prompt_lengths), np.asarray(prompts)
        self.length = rng.integers(1, longest, len(prompts))  # tokens of each sequence
        self.scheduler = PoolScheduler(
            self.prompt_lengths, self.prompts, np.full(len(prompts), longest), rows, pool or KVPool(SPARE + 1),
            most_slots, POLL, samples, share_from,
        )  # fmt: skip
        self.clock: dict[int, int] = {}
        self.finished: list[int] = []
        self.starts: list[int] = []
        self.passes = self.most_active = self.most_used = self.computed = self.shared_rows = 0
        self.preempted: list[int] = []

    def run(self, preempt_at: int | None = None) -> None:
        rounds = 0
        while self.scheduler.has_unfinished():
            if rounds == preempt_at:
                self.preempt()
            self.round()
            rounds += 1
            assert rounds < 3000
        assert sorted(self.finished) == list(range(len(self.prompts)))
        assert self.scheduler._prefixes == {}
        free = self.scheduler._free.take([self.scheduler.pool.capacity - SPARE - 1])
        assert free == [SPARE + 1], "all slots are free, in one run"

    def preempt(self) -> None:
        assert sorted(self.scheduler.preempt(max(1, self.scheduler.rows // 2))) == sorted(self.clock)
        assert self.scheduler.num_running == self.scheduler.pool.nbytes == 0
        self.clock = {}

    def round(self) -> None:
        before = set(self.clock)
        for prefill in self.scheduler.admit():
            self.prefill(prefill)
        running = self.scheduler.running
        now = running.sequences.tolist()
        assert now and len(now) == len(set(now)) == self.scheduler.num_running <= self.scheduler.rows
        assert before <= set(now)
        self.starts += set(now) - before
        self.clock |= dict.fromkeys(set(now) - before, 0)
        self.most_active = max(self.most_active, len(now))
        for sequence in (preempted := self.scheduler.reserve_slots()):
            del self.clock[sequence]
        self.preempted += preempted
        self.check()
        for _ in range(POLL):
            self.decode()
        done = np.array([self.clock[sequence] >= self.length[sequence] for sequence in self.sequences()])
        self.finished += [sequence for sequence, end in zip(self.sequences(), done, strict=True) if end]
        self.clock = {sequence: self.clock[sequence] for sequence in self.sequences() if sequence not in self.finished}
        self.scheduler.advance(done, POLL)
        assert sorted(self.sequences()) == sorted(self.clock)

    def sequences(self) -> list[int]:
        return self.scheduler.running.sequences.tolist()

    def prefill(self, prefill) -> None:
        self.passes += 1
        self.computed += len(prefill.sequences)
        assert prefill.tokens == max(1, self.prompt_lengths[prefill.sequences].max() - 1)
        count = len(prefill.sequences)
        assert count == 1 or prefill.tokens * count <= scheduler.MAX_PREFILL_TOKENS
        assert len(set(self.prompts[prefill.sequences])) == count
        tags = torch.from_numpy(self.prompts[prefill.sequences]).unsqueeze(1) * 1000 + torch.arange(prefill.tokens)
        rows, source = torch.from_numpy(prefill.rows), torch.from_numpy(prefill.source)
        for layer in (0, 1):
            prefill.cache.write_prefill(layer, rows, source, *tagged(tags))

    def decode(self) -> None:
        """One token of each row; a row that has all its tokens is idle until the next check."""
        rows, pool = self.scheduler.running, self.scheduler.pool
        tokens = np.array([self.clock[sequence] for sequence in self.sequences()])
        fed = tokens - (rows.positions - self.prompt_lengths[rows.sequences] + 1)
        idle = tokens >= self.length[rows.sequences]
        slots = np.where(idle, SPARE, rows.starts + rows.slots + fed)
        assert ((fed + rows.slots < rows.sizes) | idle).all()
        tags = -(rows.sequences * 1000 + rows.positions + fed)
        for layer in (0, 1):
            mapping = pool.slot_mapping(torch.from_numpy(slots), HEADS)
            pool.write_decode(layer, mapping, *tagged(torch.from_numpy(tags).unsqueeze(1)))
        for sequence in np.array(self.sequences())[~idle]:
            self.clock[int(sequence)] += 1

    def check(self) -> None:
        """Check all segments and what they hold."""
        rows, pool = self.scheduler.running, self.scheduler.pool
        used = [SPARE]
        for row, sequence in enumerate(self.sequences()):
            prompt, own, fed = self.prompts[sequence], self.prompt_lengths[sequence] - 1, self.clock[sequence]
            tags = [prompt * 1000 + place for place in range(own)] + [-(sequence * 1000 + own + t) for t in range(fed)]
            prefix, start = int(rows.prefix_lengths[row]), int(rows.starts[row])
            assert prefix in (0, own) and len(tags) - prefix == rows.slots[row]
            places = [int(rows.prefix_starts[row]) + n for n in range(prefix)]
            places += [start + n for n in range(len(tags) - prefix)]
            used += range(start, start + int(rows.sizes[row]))
            self.shared_rows += prefix > 0
            if tags:
                for layer in (0, 1):
                    keys, values = tagged(torch.tensor([tags]))
                    assert torch.equal(pool.keys[layer][:, places], keys[0])
                    assert torch.equal(pool.values[layer][:, places], values[0])
        for prompt, start in self.scheduler._prefixes.items():
            used += range(start, start + int(self.prompt_lengths[self.prompts == prompt][0]) - 1)
        assert len(used) == len(set(used)), "segments do not overlap"
        assert max(used) < pool.capacity <= self.scheduler.most_slots
        self.most_used = max(self.most_used, len(used))
        numbers = self.prompts[rows.sequences]
        assert len(np.flatnonzero(np.diff(numbers))) + 1 == len(set(numbers)), "rows of a prompt are together"


@pytest.fixture(autouse=True)
def small_segments(monkeypatch) -> None:
    monkeypatch.setattr(pool_scheduler, "FIRST_TOKENS", 5)
    monkeypatch.setattr(pool_scheduler, "SEGMENT_STEP", 4)


def groups(rng, prompts: int, samples: int, longest: int) -> tuple[np.ndarray, np.ndarray]:
    """Prompt lengths and prompt numbers of all sequences."""
    numbers = np.arange(prompts).repeat(samples)
    return rng.integers(1, longest + 1, prompts)[numbers], numbers


@pytest.mark.parametrize(("seed", "rows"), [(0, 1), (1, 3), (2, 8), (3, 50)])
def test_every_sequence_is_generated_once_from_its_own_keys(seed, rows):
    rng = np.random.default_rng(seed)
    world = World(rng, *groups(rng, 40, 1, 30), rows=rows)
    world.run()
    assert world.most_active == min(rows, 40)
    assert not world.shared_rows and not world.preempted


@pytest.mark.parametrize(("seed", "rows"), [(0, 1), (1, 3), (2, 4), (3, 9), (4, 33), (5, 200)])
@pytest.mark.parametrize("share_from", [0, 8])
def test_sequences_of_one_prompt_share_its_keys(seed, rows, share_from):
    rng = np.random.default_rng(seed)
    world = World(rng, *groups(rng, 12, 4, 30), rows=rows, samples=4, share_from=share_from)
    world.run()
    assert (world.shared_rows > 0) == (share_from > 0)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("samples", "share_from"), [(1, 0), (4, 8)])
def test_sequences_finish_with_fewer_slots_than_they_need_together(seed, samples, share_from):
    """From slots for one long sequence to slots for about a third of the rows."""
    rng = np.random.default_rng(seed)
    world = World(
        rng, *groups(rng, 40 // samples, samples, 30), rows=20, samples=samples, share_from=share_from,
        most_slots=71 + 60 * seed,
    )  # fmt: skip
    world.run()
    assert world.most_used <= world.scheduler.most_slots
    assert len(world.starts) == 40 + len(world.preempted)
    if seed == 0:
        assert world.preempted


def test_a_pool_that_is_too_small_for_one_sequence_may_grow_to_it():
    world = World(np.random.default_rng(0), [30, 30], [0, 1], rows=2, most_slots=0)
    world.run()
    assert world.scheduler.most_slots == SPARE + 1 + 29 + 40


@pytest.mark.parametrize("preempt_at", [0, 1, 7])
def test_preempted_sequences_start_again_with_half_the_rows(preempt_at):
    rng = np.random.default_rng(preempt_at)
    world = World(rng, *groups(rng, 12, 4, 30), rows=16, samples=4, share_from=3, most_slots=1600)
    world.run(preempt_at)
    assert (world.scheduler.rows, world.scheduler.most_slots) == (8, 800)


@pytest.mark.parametrize(("samples", "share_from", "rows"), [(1, 0, 40), (1, 0, 9), (4, 8, 40)])
@pytest.mark.parametrize("equal", [False, True])
def test_a_pool_with_the_capacity_of_an_equal_rollout_does_not_grow(samples, share_from, rows, equal):
    """Neither the same pool nor a new one. Segments move together instead, with all slots in use."""
    rng = np.random.default_rng(0)
    lengths, prompts = groups(rng, 40 // samples, samples, 30)
    lengths = np.full_like(lengths, 30) if equal else lengths
    answers, pool, versions = rng.integers(1, 40, 40), None, []
    for kept in (False, True, False):
        pool = pool if kept or pool is None else KVPool(pool.capacity)
        before = 0 if pool is None else pool.version
        world = World(rng, lengths, prompts, rows, samples, share_from, pool=pool)
        world.length = np.full(40, 40) if equal else answers
        world.run()
        pool = world.scheduler.pool
        versions.append(pool.version - before)
    assert versions[0] > 1 and versions[1:] == [0, 0]
    larger = World(rng, lengths + 60, prompts, rows, samples, share_from, longest=90, pool=pool)
    larger.length = np.full(40, 90)
    larger.run()
    assert pool.version > 0, "what needs more slots than there are makes it grow"


def test_prefills_have_a_maximum_number_of_tokens(monkeypatch):
    monkeypatch.setattr(scheduler, "MAX_PREFILL_TOKENS", 64)
    for samples, share_from in ((1, 0), (3, 0), (3, 2)):
        rng = np.random.default_rng(0)
        world = World(rng, *groups(rng, 40, samples, 90), rows=40, samples=samples, share_from=share_from)
        world.run()
        assert world.passes > 10


def test_a_prompt_in_the_pool_is_not_computed_again():
    """12 sequences of one prompt, 8 at a time: four start when four have finished."""
    world = World(np.random.default_rng(0), np.full(12, 20), np.zeros(12, dtype=int), rows=8, samples=2, share_from=5)
    world.length = np.array([30, 3, 3, 3, 3, 30, 30, 30, 3, 3, 3, 3])
    world.run()
    assert world.computed == 1 and world.most_active == 8


def test_a_segment_doubles_when_it_is_full():
    world = World(np.random.default_rng(0), [7], [0], rows=1)
    world.length, sizes = np.array([40]), []
    while world.scheduler.has_unfinished():
        world.round()
        sizes += world.scheduler.running.sizes.tolist()
    assert sorted(set(sizes)) == [12, 24, 46]  # 6 + 5 rounded up; twice that; 6 + 40 at most


def test_rows_that_fit_their_segments_stay_where_they_are():
    """A row that grows into free slots does not move the others."""
    world = World(np.random.default_rng(0), [20, 3, 3], [0, 1, 2], rows=3)
    world.length = np.array([5, 30, 40])
    moved = []
    while world.scheduler.has_unfinished():
        before = dict(zip(world.sequences(), world.scheduler.running.starts.tolist(), strict=True))
        world.round()
        after = dict(zip(world.sequences(), world.scheduler.running.starts.tolist(), strict=True))
        moved.append([sequence for sequence in after if sequence in before and before[sequence] != after[sequence]])
    assert any(len(sequences) == 1 for sequences in moved)


def test_a_wave_starts_only_if_all_rows_can_double_once():
    """10 sequences of 8 slots, which may need 43: 150 slots are enough for 9 to start, if each is to have 16."""
    lengths = np.full(10, 4)
    scheduler = PoolScheduler(lengths, np.arange(10), np.full(10, 40), 10, KVPool(1), 150, POLL)
    scheduler.admit()
    assert scheduler.running.sizes.tolist() == [8] * 9
    assert scheduler.pool.capacity == SPARE + 1 + 9 * 8
    assert scheduler.admit() == []
    scheduler.advance(np.arange(9) < 1, 1)
    scheduler.admit()
    assert scheduler.num_running == 9


def test_the_shortest_answer_goes_back_to_the_front_of_the_queue():
    scheduler = PoolScheduler(np.full(6, 4), np.arange(6), np.full(6, 40), 3, KVPool(1), 60, POLL)
    scheduler.admit()
    assert scheduler.running.sequences.tolist() == [0, 1, 2]
    scheduler.running.positions = np.array([25, 13, 20])
    scheduler.running.sizes, scheduler.running.starts = np.array([28, 14, 17]), np.array([1, 29, 43])
    assert scheduler.reserve_slots() == [1]
    assert scheduler.waiting.tolist() == [1, 3, 4, 5]
    assert scheduler.running.sequences.tolist() == [0, 2]
    assert (scheduler.running.sizes >= [29, 24]).all()
