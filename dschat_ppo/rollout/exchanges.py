"""What continuous batching and a partner say to each other between two steps: which sequences ended
an action or a call, and which go on or begin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from dschat_ppo.rollout.partners import (
    CallPartner,
    ContinuedSequence,
    EndedCall,
    OpenedSequence,
    Partner,
    ReservedSequences,
)
from dschat_ppo.rollout.prompt_numbers import PromptNumbers
from dschat_ppo.rollout.running_batches import Sequences
from dschat_ppo.rollout.running_pool import RunningPool
from dschat_ppo.rollout.sequence_buffers import SequenceBuffers
from dschat_ppo.types import FinishReason


class HeldSequences:
    """The sequences of a pool that are in the hands of a partner. The row of such a sequence waits
    in the pool, or it has stopped because memory was short: then it starts again when the sequence
    goes on.

    `is_held` (A,) bool; `without_rows` are those of them that have no row.
    """

    def __init__(self, buffers: SequenceBuffers, sequences: Sequences, pool: RunningPool):
        self.buffers = buffers
        self.sequences = sequences
        self.pool = pool
        self.is_held = np.zeros(buffers.count, dtype=bool)
        self.without_rows = set[int]()

    def hold(self, sequence: int, count: int) -> None:
        """Let a sequence wait that has `count` response tokens."""
        self.pool.park(sequence, int(self.sequences.prompt_lengths[sequence]) + count - 1)
        self.is_held[sequence] = True

    def newest_ids(self, sequence: int, count: int) -> list[int]:
        """The tokens of the last action or call of a sequence, which ended with response token
        `count` - 1."""
        start = int(self.sequences.start_lengths[sequence])
        end = int(self.sequences.prompt_lengths[sequence]) + count
        ids: list[int] = self.buffers.token_ids[sequence, start:end].tolist()
        return ids

    def go_on(self, sequence: int, ids: Sequence[int]) -> int:
        """Let a sequence go on after tokens that it observed. Returns how many tokens before its
        new position its row has not cached; 0 if it has no row, and is the next one that starts.
        When memory runs out, it can be repeated."""
        count = int(self.buffers.response_lengths[sequence])
        self.buffers.observe(sequence, ids)
        start = int(self.sequences.prompt_lengths[sequence]) + count + len(ids)
        self.sequences.start_lengths[sequence] = start
        uncached = 0
        if sequence in self.without_rows:
            self.sequences.wait_first(np.array([sequence]))
        else:
            uncached = len(ids)
            self.pool.resume(sequence, start - 1)
        self.leave(sequence)
        return uncached

    def leave(self, sequence: int) -> None:
        """A sequence is not in the hands of the partner any more."""
        self.is_held[sequence] = False
        self.without_rows.discard(sequence)

    def lose_rows(self, sequences: np.ndarray) -> np.ndarray:
        """Note that these sequences (n,) have no rows any more. Returns those that nobody holds."""
        is_held = self.is_held[sequences]
        self.without_rows.update(sequences[is_held].tolist())
        return sequences[~is_held]


class TurnExchange:
    """The exchange with a `Partner`, which replies to each action of the sequences that all begin
    together."""

    def __init__(self, partner: Partner, held: HeldSequences):
        self.partner = partner
        self.held = held
        # replies that are not in the buffers yet
        self.observations = list[tuple[int, list[int]]]()

    @property
    def unfinished(self) -> int:
        """How many sequences are not finished."""
        waiting = len(self.held.sequences.waiting) + len(self.held.without_rows)
        return len(self.held.pool) + waiting

    @property
    def progress(self) -> tuple[int, int, str]:
        """What is done, of how many, and what it is."""
        count = self.held.buffers.count
        return count - self.unfinished, count, "answers"

    def hand_over(self, finished: list[int]) -> None:
        """Hand sequences that ended an action to the partner; let those go that a limit cut."""
        buffers = self.held.buffers
        counts = buffers.response_lengths[finished].tolist()
        reasons = buffers.finish_reasons[finished].tolist()
        for sequence, count, reason in zip(finished, counts, reasons, strict=True):
            if reason == FinishReason.LENGTH:
                self.held.pool.drop(sequence)
                self.partner.cut(sequence, count - 1)
            else:
                self.held.hold(sequence, count)
                ids = self.held.newest_ids(sequence, count)
                self.partner.end_turn(sequence, ids, count - 1)

    def observe(self) -> dict[int, int]:
        """Let the sequences go on that have a reply; those that have lost their rows wait for new
        ones. The call waits for a reply only if no row runs and none can begin.

        Returns for each sequence that goes on how many tokens are new to the cache: those before
        its new position, which the next decode step feeds. When memory runs out, no observation is
        lost: it stays in `observations` until the sequence has it.
        """
        buffers = self.held.buffers
        pool = self.held.pool
        is_idle = not len(pool.active)
        is_idle = is_idle and (len(pool) > 0 or not len(self.held.sequences.waiting))
        self.observations += self.partner.observed(is_idle and not self.observations)
        uncached = dict[int, int]()
        while self.observations:
            sequence, tokens = self.observations[0]
            new_length = int(buffers.response_lengths[sequence]) + len(tokens)
            if tokens and new_length < int(buffers.limits[sequence]):
                count = self.held.go_on(sequence, tokens)
                if count:
                    uncached[sequence] = count
            else:  # the exchange is over, or the observation leaves no token for an action
                pool.drop(sequence)
                self.held.leave(sequence)
                if tokens:
                    buffers.finish_reasons[sequence] = FinishReason.LENGTH
                    self.partner.stop(sequence)
            self.observations.pop(0)
        return uncached

    def make_room(self, rows: int, wanted: int) -> None:
        """Rows that wait for a reply keep their places: each of them goes on by itself."""


class CallExchange:
    """The exchange with a `CallPartner`, which opens, continues and closes sequences when it likes.
    `used` are the sequences that it opened."""

    def __init__(self, partner: CallPartner, held: HeldSequences, reserved: ReservedSequences):
        self.partner = partner
        self.held = held
        self.reserved = reserved
        held.is_held[:] = True
        held.without_rows.update(range(reserved.count))
        held.sequences.waiting = held.sequences.waiting[:0]
        self.used = set[int]()
        # calls that are not in the buffers yet
        self._opened = list[OpenedSequence]()
        self._continued = list[ContinuedSequence]()
        # sequences whose rows wait, the longest waiting first
        self._parked = dict[int, None]()
        # of sequences with a call that ended: the tokens up to the last one's end, and why it ended
        self._ends = dict[int, tuple[int, FinishReason]]()
        self._prompt_numbers = PromptNumbers(held.sequences.prompts)
        self._begun = 0  # calls
        self._ended = 0

    @property
    def unfinished(self) -> int:
        """0 if nothing runs, nothing waits, and nothing else will."""
        pool = self.held.pool
        return len(pool.active) + len(self.held.sequences.waiting) + self.partner.live

    @property
    def progress(self) -> tuple[int, int, str]:
        """What is done, of how many, and what it is."""
        return self._ended, self._begun, "calls"

    def hand_over(self, finished: list[int]) -> None:
        """Tell the partner of calls that ended."""
        buffers = self.held.buffers
        counts = buffers.response_lengths[finished].tolist()
        reasons = buffers.finish_reasons[finished].tolist()
        for sequence, count, reason in zip(finished, counts, reasons, strict=True):
            self.held.hold(sequence, count)
            self._parked[sequence] = None
            self._ends[sequence] = count, FinishReason(reason)
            self._ended += 1
            ids = self.held.newest_ids(sequence, count)
            logprobs = buffers.logprobs[sequence, count - len(ids) : count].tolist()
            call = EndedCall(sequence, ids, logprobs, count - 1, FinishReason(reason))
            self.partner.end_call(call)

    def observe(self) -> dict[int, int]:
        """Take what the partner closes, opens and continues; while nothing runs and nothing waits,
        this waits for it. Returns as `TurnExchange.observe`. When memory runs out, no call is
        lost."""
        is_idle = not len(self.held.pool.active) and not len(self.held.sequences.waiting)
        has_calls = bool(self._opened or self._continued)
        self._continued += self.partner.observed(is_idle and not has_calls)
        for sequence in self.partner.closed():
            self._close(sequence)
        self._opened += self.partner.opened()
        while self._opened:
            self._open(self._opened[0])
            self._opened.pop(0)
        uncached = dict[int, int]()
        while self._continued:
            call = self._continued[0]
            count = self._go_on(call)
            if count:
                uncached[call.sequence] = count
            self._continued.pop(0)
        return uncached

    def make_room(self, rows: int, wanted: int) -> None:
        """Let parked rows stop, the longest parked first, until the first `wanted` sequences of the
        queue can start, with at most `rows` rows. A program may wait for these before it continues
        those."""
        pool = self.held.pool
        waiting = self.held.sequences.waiting[:wanted]
        parked = [row for row in self._parked if row not in self.held.without_rows]
        for sequence in parked:
            has_room = rows - len(pool) >= wanted and pool.room_for(waiting, wanted) > 0
            if has_room or not len(waiting):
                return
            pool.drop(sequence)
            self.held.without_rows.add(sequence)

    def finish(self) -> list[int]:
        """End the sequences without a call that ended. Returns those that were opened, in
        order."""
        for sequence in self.used - set(self._ends):
            self.held.buffers.cut(sequence, 0, FinishReason.LENGTH)
        return sorted(self.used)

    def _close(self, sequence: int) -> None:
        """Let the row of a sequence go; a call of it that runs or waits is forgotten."""
        self._opened = [call for call in self._opened if call.sequence != sequence]
        self._continued = [call for call in self._continued if call.sequence != sequence]
        if not self.held.is_held[sequence]:
            waiting = self.held.sequences.waiting
            self.held.sequences.waiting = waiting[waiting != sequence]
            count, reason = self._ends.get(sequence, (0, FinishReason.LENGTH))
            self.held.buffers.cut(sequence, count, reason)
            self._begun -= 1
        self._let_row_go(sequence)

    def _let_row_go(self, sequence: int) -> None:
        """The partner holds a sequence, which has no row."""
        self.held.pool.drop(sequence)
        self.held.is_held[sequence] = True
        self.held.without_rows.add(sequence)
        self._parked.pop(sequence, None)

    def _open(self, opened: OpenedSequence) -> None:
        """Begin a sequence, and let it wait to start. Those that wait with the same prompt share
        it, and so do those that share it already."""
        sequence = opened.sequence
        pool = self.held.pool
        buffers = self.held.buffers
        sequences = self.held.sequences
        length = len(opened.prompt_ids)
        check_opened(opened, self.reserved, self.held.is_held)
        self._let_row_go(sequence)
        most_tokens = buffers.stopping.max_new_tokens
        limit = min(most_tokens, self.reserved.context_length - length)
        buffers.open(opened)
        buffers.begin_call(sequence, 0, min(opened.limit, limit), opened.stop_strings)
        self.used.add(sequence)
        self._ends.pop(sequence, None)
        sequences.prompt_lengths[sequence] = length
        sequences.start_lengths[sequence] = length
        sequences.limits[sequence] = limit
        prompt_number = self._prompt_numbers.give(sequence, tuple(opened.prompt_ids))
        waiting = sequences.waiting
        waits_with_it = waiting[sequences.prompts[waiting] == prompt_number]
        pool.measure(np.append(waits_with_it, sequence))
        sequences.wait_last(sequence)
        self.held.leave(sequence)
        self._begun += 1

    def _go_on(self, call: ContinuedSequence) -> int:
        """Let a sequence go on with a further call; see `HeldSequences.go_on`."""
        sequence = call.sequence
        count, _ = self._ends.get(sequence, (0, None))
        first = count + len(call.ids)
        left = int(self.held.sequences.limits[sequence]) - first
        check_continued(call, left, count > 0 and bool(self.held.is_held[sequence]))
        self.held.buffers.begin_call(sequence, first, min(call.limit, left), call.stop_strings)
        uncached = self.held.go_on(sequence, call.ids)
        self._parked.pop(sequence, None)
        self._begun += 1
        return uncached


Exchange = TurnExchange | CallExchange


def check_opened(
    opened: OpenedSequence, reserved: ReservedSequences, is_free: Mapping[int, bool] | np.ndarray
) -> None:
    """Raise `ValueError` if a sequence cannot be opened. `is_free`: whether no call of a sequence
    is running."""
    length = len(opened.prompt_ids)
    name = f"sequence {opened.sequence}"
    if not 0 <= opened.sequence < reserved.count:
        raise ValueError(f"{name}: {reserved.count} are reserved")
    if not is_free[opened.sequence]:
        raise ValueError(f"{name}: opened while a call of it is running")
    if not 0 < length <= min(reserved.prompt_width, reserved.context_length - 1):
        raise ValueError(
            f"{name}: a prompt of {length} tokens (from 1 to {reserved.prompt_width}, and below"
            f" {reserved.context_length})"
        )
    if opened.limit < 1:
        raise ValueError(f"{name}: a call of {opened.limit} tokens")


def check_continued(call: ContinuedSequence, left: int, is_free: bool) -> None:
    """Raise `ValueError` if a sequence cannot go on. `left`: tokens that it may still have;
    `is_free`: a call of it has ended, and no other one is running."""
    name = f"sequence {call.sequence}"
    if not is_free:
        raise ValueError(f"{name}: continued, but no call of it has ended")
    if left < 1 or call.limit < 1:
        raise ValueError(
            f"{name}: no token is left for a call of {call.limit} tokens, after {len(call.ids)} new"
            " ones"
        )
