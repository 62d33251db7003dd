"""The scheduler without a model: every cached number identifies its sequence and position."""

import numpy as np
import pytest
import torch
from tagged_keys import HEADS, assert_holds, decode_batch_of, tagged

from dschat_ppo.rollout import scheduler as scheduler_module
from dschat_ppo.rollout.scheduler import MAX_BATCHES, SMALL_BATCH, DecodeBatch, DecodeInputs, Scheduler


class World:
    """Runs a scheduler with a clock in place of a model.

    The tag of a prompt token is 1000 prompt + position, that of a generated token -(1000 sequence + position).
    """

    def __init__(self, rng, prompt_lengths, prompts, rows, samples, share_from=0):
        self.rng = rng
        self.prompt_lengths, self.prompts = np.asarray(prompt_lengths), np.asarray(prompts)
        self.length = rng.integers(1, 25, len(prompts))  # tokens of each sequence
        self.scheduler = Scheduler(self.prompt_lengths, self.prompts, rows, samples, share_from)
        self.clock: dict[int, int] = {}
        self.finished: list[int] = []
        self.admissions: list[int] = []
        self.prefix_rows = self.passes = self.most_active = 0

    def run(self, preempt_at: int | None = None) -> None:
        steps = 0
        while self.scheduler.has_unfinished():
            if steps == preempt_at:
                self.preempt()
            self.round()
            steps += 1
            assert steps < 5000
        assert sorted(self.finished) == list(range(len(self.prompts)))

    def preempt(self) -> None:
        rows = max(1, self.scheduler.rows // 2)
        assert sorted(self.scheduler.preempt(rows)) == sorted(self.clock)
        assert self.scheduler.num_running == 0
        self.admissions = [sequence for sequence in self.admissions if sequence not in self.clock]
        self.clock = {}

    def round(self) -> None:
        before = {int(a) for batch in self.scheduler.batches for a in batch.sequences}
        for prefill in self.scheduler.admit():
            self.prefill(prefill)
        now = [int(a) for batch in self.scheduler.batches for a in batch.sequences]
        assert len(now) == len(set(now)) == self.scheduler.num_running <= self.scheduler.rows
        new = set(now) - before
        assert before <= set(now)
        self.admissions += new
        assert len(self.admissions) == len(set(self.admissions))
        self.clock |= dict.fromkeys(new, 0)
        assert now
        self.most_active = max(self.most_active, len(now))
        self.scheduler.reserve_slots()
        assert sorted(a for batch in self.scheduler.batches for a in batch.sequences.tolist()) == sorted(now)
        for batch in self.scheduler.batches:
            steps = [self.clock[sequence] for sequence in batch.sequences.tolist()]
            assert (batch.positions - self.prompt_lengths[batch.sequences] + 1).tolist() == steps
        finished = self.decode()
        for sequence in [a for a, done in finished.items() if done]:
            del self.clock[sequence]
            self.finished.append(sequence)
        mask = np.array([finished[int(a)] for batch in self.scheduler.batches for a in batch.sequences])
        self.scheduler.advance(mask)
        left = [int(a) for batch in self.scheduler.batches for a in batch.sequences]
        assert sorted(left) == sorted(self.clock)

    def prefill(self, prefill) -> None:
        self.passes += 1
        places = torch.arange(prefill.tokens)
        assert prefill.tokens == max(1, self.prompt_lengths[prefill.sequences].max() - 1)
        count = len(prefill.sequences)
        assert count == 1 or prefill.tokens * count <= scheduler_module.MAX_PREFILL_TOKENS
        assert len(set(self.prompts[prefill.sequences])) == len(prefill.sequences)
        tags = torch.from_numpy(self.prompts[prefill.sequences]).unsqueeze(1) * 1000 + places
        rows, source = torch.from_numpy(prefill.rows), torch.from_numpy(prefill.source)
        for layer in (0, 1):
            prefill.cache.write_prefill(layer, rows, source, *tagged(tags))

    def decode(self) -> dict[int, bool]:
        batches = self.scheduler.batches
        inputs = DecodeInputs.of(batches, torch.device("cpu"))
        first = 0
        for batch in batches:
            slots = inputs.slots[first : first + len(batch)].clone()
            self.check(batch, slots.tolist())
            position = slots + torch.from_numpy(batch.prefix_lengths)
            tags = -(torch.from_numpy(batch.sequences) * 1000 + position).unsqueeze(1)
            for layer in (0, 1):
                batch.cache.write_decode(layer, batch.cache.slot_mapping(slots, HEADS), *tagged(tags))
            first += len(batch)
        assert len(inputs.sequences) == first == len(self.clock)
        self.clock = {sequence: count + 1 for sequence, count in self.clock.items()}
        return {sequence: count >= self.length[sequence] for sequence, count in self.clock.items()}

    def check(self, batch: DecodeBatch, slots: list[int]) -> None:
        """Check the contents of all rows of `batch` before the token at `slots` is written."""
        shared = batch.metadata(0, torch.tensor(slots)).prefix
        assert (shared is None) == (batch.prefix is None)
        for row, sequence in enumerate(batch.sequences.tolist()):
            own, fed = int(self.prompt_lengths[sequence]) - 1, self.clock[sequence]
            prompt = [int(self.prompts[sequence]) * 1000 + place for place in range(own)]
            generated = [-(sequence * 1000 + own + t) for t in range(fed)]
            if batch.prefix is None:
                assert slots[row] == own + fed
                assert batch.prefix_lengths[row] == 0
                assert_holds(batch.cache, row, [*prompt, *generated]) if fed + own else None
                continue
            self.prefix_rows += 1
            assert (slots[row], int(batch.prefix_lengths[row])) == (fed, own)
            assert_holds(batch.prefix, int(batch.prefix_rows[row]), prompt)
            assert_holds(batch.cache, row, generated) if fed else None
            assert int(shared.lengths[row]) == own
            assert shared.grid[batch.prefix_rows[row]].tolist().count(row) >= 1
            assert shared.grid.flatten()[shared.cells[row]] == row
            assert shared.cells[row] // shared.grid.shape[1] == batch.prefix_rows[row]


def groups(rng, prompts: int, samples: int, longest: int) -> tuple[np.ndarray, np.ndarray]:
    """Prompt lengths and prompt numbers of all sequences."""
    numbers = np.arange(prompts).repeat(samples)
    return rng.integers(1, longest + 1, prompts)[numbers], numbers


@pytest.mark.parametrize(("seed", "rows"), [(0, 1), (1, 3), (2, 8), (3, 50), (4, 50), (5, 200)])
def test_every_sequence_is_generated_once_from_its_own_keys(seed, rows):
    rng = np.random.default_rng(seed)
    world = World(rng, *groups(rng, 40, 1, 30), rows=rows, samples=1)
    world.run()
    assert world.most_active == min(rows, 40)
    assert world.prefix_rows == 0


@pytest.mark.parametrize(("seed", "rows"), [(0, 1), (1, 3), (2, 4), (3, 9), (4, 33), (5, 200)])
@pytest.mark.parametrize("share_from", [0, 8])
def test_sequences_of_one_prompt_share_its_keys(seed, rows, share_from):
    rng = np.random.default_rng(seed)
    world = World(rng, *groups(rng, 12, 4, 30), rows=rows, samples=4, share_from=share_from)
    world.run()
    assert (world.prefix_rows > 0) == (share_from > 0 and rows > 1)


@pytest.mark.parametrize("preempt_at", [0, 1, 7, 25])
def test_preempted_sequences_start_again_with_half_the_rows(preempt_at):
    rng = np.random.default_rng(preempt_at)
    world = World(rng, *groups(rng, 12, 4, 30), rows=16, samples=4, share_from=3)
    world.run(preempt_at)
    assert world.scheduler.rows == 8


def test_prefills_have_a_maximum_number_of_tokens(monkeypatch):
    monkeypatch.setattr(scheduler_module, "MAX_PREFILL_TOKENS", 64)
    for samples, share_from in ((1, 0), (3, 0), (3, 2)):
        rng = np.random.default_rng(0)
        world = World(rng, *groups(rng, 40, samples, 90), rows=40, samples=samples, share_from=share_from)
        world.run()
        assert world.passes > 10


def test_a_prompt_is_prefilled_once_for_sequences_that_start_together():
    scheduler = Scheduler(np.full(12, 9), np.arange(3).repeat(4), rows=8, samples=4)
    (prefill,) = scheduler.admit()
    assert prefill.sequences.tolist() == [0, 4]
    assert prefill.rows.tolist() == list(range(8))
    assert prefill.source.tolist() == [0] * 4 + [1] * 4
    assert prefill.tokens == 8
    assert scheduler.admit() == []


def test_long_prompts_come_first_and_groups_stay_together():
    scheduler = Scheduler(np.array([3, 3, 9, 9, 5, 5]), np.arange(3).repeat(2), rows=3, samples=2)
    scheduler.admit()
    assert scheduler.batches[0].sequences.tolist() == [2, 3]  # a third row would split a group
    assert scheduler.waiting.tolist() == [4, 5, 0, 1]
    assert scheduler.batches[0].positions.tolist() == [8, 8]


def test_free_rows_are_filled_when_enough_are_free():
    """An eighth of the rows, at least four."""
    scheduler = Scheduler(np.full(200, 4), np.arange(200), rows=64)
    scheduler.admit()
    assert scheduler.num_running == 64
    for finishing, admitted in ((7, 0), (1, 8)):
        finished = np.zeros(scheduler.num_running, dtype=bool)
        finished[:finishing] = True
        scheduler.advance(finished)
        before = scheduler.num_running
        scheduler.admit()
        assert scheduler.num_running - before == admitted


def test_prompts_of_very_different_lengths_get_separate_batches():
    lengths = np.array([100] * 20 + [10] * 20)
    scheduler = Scheduler(lengths, np.arange(40), rows=40)
    scheduler.admit()
    assert [sorted(batch.sequences.tolist()) for batch in scheduler.batches] == [list(range(20)), list(range(20, 40))]
    assert [batch.cache.capacity for batch in scheduler.batches] == [128, 32]
    for few in (lengths[12:28], lengths[:25], lengths[15:]):  # fewer than `SMALL_BATCH` on one side
        scheduler = Scheduler(few, np.arange(len(few)), rows=40)
        scheduler.admit()
        assert len(scheduler.batches) == 1


def test_small_batches_are_merged_into_at_most_a_few():
    rng = np.random.default_rng(1)
    world = World(rng, *groups(rng, 300, 1, 30), rows=120, samples=1)
    most = 0
    while world.scheduler.has_unfinished():
        world.round()
        sizes = sorted(len(batch) for batch in world.scheduler.batches)
        most = max(most, len(sizes))
        assert len(sizes) <= MAX_BATCHES
    assert most > 1
    scheduler = Scheduler(np.full(60, 4), np.arange(60), rows=60)
    parts = ([0, 1], [2, 3, 4], list(range(5, 5 + SMALL_BATCH)))
    scheduler.batches = [decode_batch_of(sequences) for sequences in parts]
    scheduler.reserve_slots()
    assert sorted(len(batch) for batch in scheduler.batches) == [5, SMALL_BATCH]
