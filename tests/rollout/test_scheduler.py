"""Rows, banks and stores without a model: every stored number says whose it is and where it belongs."""

import numpy as np
import pytest
import torch
from tagged_keys import HEADS, assert_holds, plain_bank, tagged

from dschat_ppo.rollout import scheduler as scheduler_module
from dschat_ppo.rollout.cuda_graphs import GraphedDecoder, reach_bucket, row_bucket
from dschat_ppo.rollout.decode_batch import DecodeBatch, merged, rounded_up
from dschat_ppo.rollout.decode_metadata import DecodeMetadata
from dschat_ppo.rollout.kv_cache import KVCache
from dschat_ppo.rollout.scheduler import MOST_BANKS, SMALL_BANK, Scheduler


class World:
    """Runs a scheduler with a clock in place of a model. Tags: of prompt tokens 1000 prompt + position, of generated
    ones -(1000 answer + position)."""

    def __init__(self, rng, prompt_length, prompt, rows, samples, share_from=0, fixed=False, tokens=1):
        self.rng, self.tokens = rng, tokens
        self.prompt_length, self.prompt = np.asarray(prompt_length), np.asarray(prompt)
        self.length = rng.integers(1, 25, len(prompt))  # tokens of each answer
        store = KVCache(rows, int(self.prompt_length.max()) + 60) if fixed else None
        self.scheduler = Scheduler(self.prompt_length, self.prompt, rows, samples, share_from, store)
        self.fixed = store
        self.clock: dict[int, int] = {}
        self.finished: list[int] = []
        self.admissions: list[int] = []
        self.prefix_rows = self.passes = self.most_active = 0

    def run(self, restart_at: int | None = None) -> None:
        steps = 0
        while self.scheduler.work_left():
            if steps == restart_at:
                self.restart()
            self.round()
            steps += 1
            assert steps < 5000
        assert sorted(self.finished) == list(range(len(self.prompt)))

    def restart(self) -> None:
        rows = max(1, self.scheduler.rows // 2)
        assert sorted(self.scheduler.restart(rows)) == sorted(self.clock)
        assert self.scheduler.active == 0
        self.admissions = [answer for answer in self.admissions if answer not in self.clock]
        self.clock = {}

    def round(self) -> None:
        before = {int(a) for bank in self.scheduler.banks for a in bank.answer}
        for work in self.scheduler.admit():
            self.prefill(work)
        now = [int(a) for bank in self.scheduler.banks for a in bank.answer]
        assert len(now) == len(set(now)) == self.scheduler.active <= self.scheduler.rows
        new = set(now) - before
        assert before <= set(now)
        self.admissions += new
        assert len(self.admissions) == len(set(self.admissions))
        self.clock |= dict.fromkeys(new, 0)
        assert now
        self.most_active = max(self.most_active, len(now))
        self.scheduler.make_room()
        assert sorted(a for bank in self.scheduler.banks for a in bank.answer.tolist()) == sorted(now)
        for bank in self.scheduler.banks:
            steps = [self.clock[answer] for answer in bank.answer.tolist()]
            assert (bank.position - self.prompt_length[bank.answer] + 1).tolist() == steps
        for _ in range(self.tokens):
            finished = self.decode()
        for answer in [a for a, done in finished.items() if done]:
            del self.clock[answer]
            self.finished.append(answer)
        mask = np.array([finished[int(a)] for bank in self.scheduler.banks for a in bank.answer])
        self.scheduler.advance(mask, self.tokens)
        left = [int(a) for bank in self.scheduler.banks for a in bank.answer]
        assert sorted(left) == sorted(self.clock)

    def prefill(self, work) -> None:
        self.passes += 1
        places = torch.arange(work.tokens)
        assert work.tokens == max(1, self.prompt_length[work.answers].max() - 1)
        assert len(work.answers) == 1 or work.tokens * len(work.answers) <= scheduler_module.PREFILL_TOKENS
        assert len(set(self.prompt[work.answers])) == len(work.answers)
        tags = torch.from_numpy(self.prompt[work.answers]).unsqueeze(1) * 1000 + places
        rows, source = torch.from_numpy(work.rows), torch.from_numpy(work.source)
        for layer in (0, 1):
            work.store.put_block(layer, rows, source, *tagged(tags))

    def decode(self) -> dict[int, bool]:
        banks = self.scheduler.banks
        lanes = DecodeMetadata.of(banks, torch.device("cpu"))
        first = 0
        for bank in banks:
            slots = lanes.slot[first : first + len(bank)].clone()
            if self.fixed is not None:
                assert len(banks) == 1
                assert bank.store is self.fixed or self.scheduler.fixed is bank.store
                slots += torch.tensor([self.clock[int(a)] for a in bank.answer]) - torch.from_numpy(
                    bank.position - self.prompt_length[bank.answer] + 1
                )
            self.check(bank, slots.tolist())
            position = slots + torch.from_numpy(bank.shared)
            tags = -(torch.from_numpy(bank.answer) * 1000 + position).unsqueeze(1)
            for layer in (0, 1):
                bank.store.put_token(layer, bank.store.lines(slots, HEADS), *tagged(tags))
            first += len(bank)
        assert len(lanes.answer) == first == len(self.clock)
        self.clock = {answer: count + 1 for answer, count in self.clock.items()}
        return {answer: count >= self.length[answer] for answer, count in self.clock.items()}

    def check(self, bank: DecodeBatch, slots: list[int]) -> None:
        """The rows of `bank` hold what they must before the token at `slots` is written."""
        view = bank.span(0, torch.tensor(slots)).prefix
        assert (view is None) == (bank.prefix is None)
        for row, answer in enumerate(bank.answer.tolist()):
            own, fed = int(self.prompt_length[answer]) - 1, self.clock[answer]
            prompt = [int(self.prompt[answer]) * 1000 + place for place in range(own)]
            generated = [-(answer * 1000 + own + t) for t in range(fed)]
            if bank.prefix is None:
                assert slots[row] == own + fed
                assert bank.shared[row] == 0
                assert_holds(bank.store, row, [*prompt, *generated]) if fed + own else None
                continue
            self.prefix_rows += 1
            assert (slots[row], int(bank.shared[row])) == (fed, own)
            assert_holds(bank.prefix, int(bank.prompt[row]), prompt)
            assert_holds(bank.store, row, generated) if fed else None
            assert int(view.length[row]) == own
            assert view.grid[bank.prompt[row]].tolist().count(row) >= 1
            assert view.grid.flatten()[view.cell[row]] == row
            assert view.cell[row] // view.grid.shape[1] == bank.prompt[row]


def groups(rng, prompts: int, samples: int, longest: int) -> tuple[np.ndarray, np.ndarray]:
    prompt = np.arange(prompts).repeat(samples)
    return rng.integers(1, longest + 1, prompts)[prompt], prompt


@pytest.mark.parametrize(("seed", "rows"), [(0, 1), (1, 3), (2, 8), (3, 50), (4, 50), (5, 200)])
@pytest.mark.parametrize("fixed", [False, True])
def test_every_answer_is_made_once_with_its_own_keys(seed, rows, fixed):
    rng = np.random.default_rng(seed)
    world = World(rng, *groups(rng, 40, 1, 30), rows=rows, samples=1, fixed=fixed, tokens=1 + 2 * fixed)
    world.run()
    assert world.most_active == min(rows, 40)
    assert world.prefix_rows == 0


@pytest.mark.parametrize(("seed", "rows"), [(0, 1), (1, 3), (2, 4), (3, 9), (4, 33), (5, 200)])
@pytest.mark.parametrize("share_from", [0, 8])
def test_answers_of_one_prompt_share_its_keys(seed, rows, share_from):
    rng = np.random.default_rng(seed)
    world = World(rng, *groups(rng, 12, 4, 30), rows=rows, samples=4, share_from=share_from)
    world.run()
    assert (world.prefix_rows > 0) == (share_from > 0 and rows > 1)


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("restart_at", [0, 1, 7, 25])
def test_answers_at_work_are_made_anew_after_a_restart(fixed, restart_at):
    rng = np.random.default_rng(restart_at)
    world = World(rng, *groups(rng, 12, 4, 30), rows=16, samples=4, share_from=0 if fixed else 3, fixed=fixed)
    world.run(restart_at)
    assert world.scheduler.rows == 8
    if fixed:
        assert (world.scheduler.fixed.rows, world.scheduler.fixed.capacity) == (8, world.fixed.capacity)


def test_prefills_are_cut_to_so_many_tokens(monkeypatch):
    monkeypatch.setattr(scheduler_module, "PREFILL_TOKENS", 64)
    for samples, share_from in ((1, 0), (3, 0), (3, 2)):
        rng = np.random.default_rng(0)
        world = World(rng, *groups(rng, 40, samples, 90), rows=40, samples=samples, share_from=share_from)
        world.run()
        assert world.passes > 10


def test_a_prompt_is_prefilled_once_for_the_answers_that_begin_together():
    scheduler = Scheduler(np.full(12, 9), np.arange(3).repeat(4), rows=8, samples=4)
    (work,) = scheduler.admit()
    assert work.answers.tolist() == [0, 4]
    assert work.rows.tolist() == list(range(8))
    assert work.source.tolist() == [0] * 4 + [1] * 4
    assert work.tokens == 8
    assert scheduler.admit() == []


def test_long_prompts_come_first_and_groups_stay_whole():
    scheduler = Scheduler(np.array([3, 3, 9, 9, 5, 5]), np.arange(3).repeat(2), rows=3, samples=2)
    scheduler.admit()
    assert scheduler.banks[0].answer.tolist() == [2, 3]  # the third row would divide a group
    assert scheduler.queue.tolist() == [4, 5, 0, 1]
    assert scheduler.banks[0].position.tolist() == [8, 8]


def test_free_rows_are_filled_once_there_are_enough_of_them():
    """An eighth of the rows, at least four."""
    scheduler = Scheduler(np.full(200, 4), np.arange(200), rows=64)
    scheduler.admit()
    assert scheduler.active == 64
    for finishing, admitted in ((7, 0), (1, 8)):
        finished = np.zeros(scheduler.active, dtype=bool)
        finished[:finishing] = True
        scheduler.advance(finished)
        before = scheduler.active
        scheduler.admit()
        assert scheduler.active - before == admitted


def test_prompts_of_very_different_lengths_get_banks_of_their_own():
    lengths = np.array([100] * 20 + [10] * 20)
    scheduler = Scheduler(lengths, np.arange(40), rows=40)
    scheduler.admit()
    assert [sorted(bank.answer.tolist()) for bank in scheduler.banks] == [list(range(20)), list(range(20, 40))]
    assert [bank.store.capacity for bank in scheduler.banks] == [128, 32]
    for few in (lengths[12:28], lengths[:25], lengths[15:]):  # less than `SMALL_BANK` on a side
        scheduler = Scheduler(few, np.arange(len(few)), rows=40)
        scheduler.admit()
        assert len(scheduler.banks) == 1


def test_small_banks_are_merged_and_never_more_than_a_few_are_left():
    rng = np.random.default_rng(1)
    world = World(rng, *groups(rng, 300, 1, 30), rows=120, samples=1)
    most = 0
    while world.scheduler.work_left():
        world.round()
        sizes = sorted(len(bank) for bank in world.scheduler.banks)
        most = max(most, len(sizes))
        assert len(sizes) <= MOST_BANKS
    assert most > 1
    scheduler = Scheduler(np.full(60, 4), np.arange(60), rows=60)
    scheduler.banks = [plain_bank(answers) for answers in ([0, 1], [2, 3, 4], list(range(5, 5 + SMALL_BANK)))]
    scheduler.make_room()
    assert sorted(len(bank) for bank in scheduler.banks) == [5, SMALL_BANK]


# Banks


@pytest.mark.parametrize("finished", [[0], [3], [0, 1], [2, 3], [0, 3], [1, 2], [0, 1, 2], [0, 2, 3], [0, 1, 2, 3], []])
def test_retired_rows_are_filled_by_the_last_ones(finished):
    bank = plain_bank([10, 11, 12, 13])
    mask = np.isin(np.arange(4), finished)
    bank.position += np.arange(4)
    bank.retire(mask)
    left = [answer for row, answer in enumerate([10, 11, 12, 13]) if row not in finished]
    assert sorted(bank.answer.tolist()) == left
    assert bank.position.tolist() == [answer - 10 + 3 for answer in bank.answer.tolist()]
    for row, answer in enumerate(bank.answer.tolist()):
        assert_holds(bank.store, row, [answer * 100 + place for place in range(3)])
    stay = [row for row in range(len(left)) if row not in finished]
    assert [bank.answer[row] for row in stay] == [10 + row for row in stay]  # these need not move


def test_merging_keeps_rows_in_order_and_their_keys():
    first, second = plain_bank([5, 6], position=3), plain_bank([7], position=40, capacity=64)
    both = merged(first, second)
    assert both.answer.tolist() == [5, 6, 7]
    assert both.position.tolist() == [3, 3, 40]
    assert both.store.capacity == 64
    for row, (answer, position) in enumerate([(5, 3), (6, 3), (7, 40)]):
        assert_holds(both.store, row, [answer * 100 + place for place in range(position)])


@pytest.mark.parametrize(("position", "capacity"), [(31, 32), (32, 64), (33, 64), (63, 64), (64, 96)])
def test_a_store_grows_when_the_next_token_would_not_fit(position, capacity):
    bank = plain_bank([1, 2], position=position, capacity=rounded_up(position))
    bank.make_room()
    assert bank.store.capacity == capacity
    for row, answer in enumerate((1, 2)):
        assert_holds(bank.store, row, [answer * 100 + place for place in range(position)])


def test_lengths_and_rows_of_buckets():
    assert [rounded_up(n) for n in (0, 1, 32, 33, 64)] == [0, 32, 32, 64, 64]
    assert [row_bucket(n, 12) for n in (1, 2, 3, 4, 5, 8, 9, 12)] == [1, 2, 4, 4, 8, 8, 12, 12]
    assert [reach_bucket(n, 700) for n in (1, 256, 257, 512, 513, 700)] == [256, 256, 512, 512, 700, 700]


# Steps at fixed addresses


def test_idle_and_finished_lanes_write_where_nobody_reads():
    """5 rows of 7 at work in a bucket of 7 lanes, 3 tokens at a time; row 1 finishes with its second token."""
    seen, spare, last = [], 99, 49
    store = KVCache(7, last + 1)

    def step(lanes, spans):
        seen.append([fact.tolist() for fact in (lanes.answer, lanes.position, lanes.slot)])
        (span,) = spans
        assert (span.first, span.count, span.store, span.prefix) == (0, 7, store, None)
        assert span.reach == last + 1
        finished = torch.zeros(7, dtype=torch.bool)
        finished[1] = len(seen) == 2
        return finished

    decoder = GraphedDecoder(step, store, spare, 3, torch.device("cpu"))
    bank = plain_bank([20, 21, 22, 23, 24], position=6)
    bank.position += np.arange(5)
    assert decoder.run(bank).tolist() == [False, True, False, False, False]
    idle = [(spare, 0, last)] * 2
    for number, facts in enumerate(seen):
        lanes = list(zip(*facts, strict=True))
        expected = [(20 + row, 6 + row + number, 6 + row + number) for row in range(5)]
        if number == 2:
            expected[1] = idle[0]
        assert lanes == expected + idle
    assert len(seen) == 3
