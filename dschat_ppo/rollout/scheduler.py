"""Continuous batching: which rows are at work, which prompts come next."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from dschat_ppo.rollout.decode_batch import DecodeBatch, merged, rounded_up
from dschat_ppo.rollout.kv_cache import KVCache

MOST_BANKS = 4  # each costs some small operations a layer
SMALL_BANK = 16  # rows that are not worth a bank of their own
SAME_LENGTH = 0.75  # rows of a new bank are at least this long, in units of its longest
PREFILL_TOKENS = 8192  # of one forward pass


@dataclass(frozen=True)
class Prefill:
    """One forward pass over prompts: `answers[i]` stands for the prompt of row i of the pass; what that row yields goes
    to `rows[j]` of `store` for each j with `source[j] == i`."""

    store: KVCache
    answers: np.ndarray
    rows: np.ndarray
    source: np.ndarray
    tokens: int


class Scheduler:
    """Hands out waves of waiting answers whenever rows are free.

    Args:
        prompt_length: (A,) int64, prompt length of each answer.
        prompt: (A,) int64, number of its prompt; answers of one prompt stand together.
        rows: most answers at work at a time.
        samples: answers of each prompt.
        share_from: prompts at least this long are stored once for all their answers of a wave; 0: never.
        fixed: a store of `rows` rows that never moves nor grows (CUDA graphs want fixed addresses); all rows are then
            one bank in it. None: banks come and go as needed.
    """

    def __init__(
        self, prompt_length: np.ndarray, prompt: np.ndarray, rows: int, samples: int = 1, share_from: int = 0,
        fixed: KVCache | None = None,
    ):  # fmt: skip
        self.prompt_length = prompt_length
        self.prompt = prompt
        self.rows = rows
        self.samples = samples
        self.share_from = share_from
        self.fixed = fixed
        self.queue = np.lexsort((np.arange(len(prompt)), prompt, -prompt_length))
        self.banks: list[DecodeBatch] = []

    @property
    def active(self) -> int:
        """Answers at work."""
        return sum(len(bank) for bank in self.banks)

    def work_left(self) -> bool:
        """Whether anything is at work or waiting."""
        return bool(self.banks) or len(self.queue) > 0

    def admit(self) -> list[Prefill]:
        """New banks for the free rows, if enough are free; returns the forward passes that fill them."""
        free = self.rows - self.active
        worthwhile = min(max(4, self.rows // 8, self.samples), self.rows, len(self.queue))
        if not len(self.queue) or free < worthwhile:
            return []
        if free >= self.samples:
            free -= free % self.samples
        wave, self.queue = self.queue[:free], self.queue[free:]
        if self.fixed is not None:
            return self._extend(self.fixed, wave)
        return [prefill for part in self._similar(wave) for prefill in self._open_bank(part)]

    def _extend(self, store: KVCache, answers: np.ndarray) -> list[Prefill]:
        if not self.banks:
            none = np.array([], dtype=np.int64)
            self.banks = [DecodeBatch(store, none, none, none, none)]
        first = self.active
        self.banks[0].extend(answers, self.prompt_length[answers] - 1)
        _, leaders, source = np.unique(self.prompt[answers], return_index=True, return_inverse=True)
        return list(self._passes(store, answers[leaders], source, first))

    def _similar(self, wave: np.ndarray) -> Iterator[np.ndarray]:
        """Parts of a wave (longest first) whose prompts are of similar length, none of them small."""
        start = 0
        for end in range(1, len(wave) + 1):
            lengths, left = self.prompt_length[wave[start:end]], len(wave) - end
            if end == len(wave):
                yield wave[start:]
            elif end - start >= SMALL_BANK <= left and self.prompt_length[wave[end]] < SAME_LENGTH * lengths[0]:
                yield wave[start:end]
                start = end

    def _open_bank(self, answers: np.ndarray) -> list[Prefill]:
        _, leaders, source = np.unique(self.prompt[answers], return_index=True, return_inverse=True)
        stored = np.maximum(self.prompt_length[answers] - 1, 1)  # the last token is fed by the first decode step
        shares = 0 < self.share_from <= stored.min() and len(leaders) < len(answers)
        target = KVCache(len(leaders) if shares else len(answers), 0)
        bank = DecodeBatch(
            store=KVCache(len(answers), rounded_up(1)) if shares else target,
            answer=answers.copy(),
            position=self.prompt_length[answers] - 1,
            shared=stored if shares else np.zeros_like(stored),
            prompt=source if shares else np.zeros_like(stored),
            prefix=target if shares else None,
        )
        target.capacity = int(stored.max()) if shares else rounded_up(int(stored.max()) + 1)
        self.banks.append(bank)
        places = np.arange(len(leaders)) if shares else source
        return list(self._passes(target, answers[leaders], places))

    def _passes(self, store: KVCache, leaders: np.ndarray, source: np.ndarray, first: int = 0) -> Iterator[Prefill]:
        """Forward passes over the prompts of `leaders`, each within `PREFILL_TOKENS`, into rows from `first` on."""
        order = np.argsort(-self.prompt_length[leaders], kind="stable")
        start = 0
        while start < len(order):
            tokens = max(int(self.prompt_length[leaders[order[start]]]) - 1, 1)
            part = order[start : start + max(1, PREFILL_TOKENS // tokens)]
            row_of = np.full(len(leaders), -1)
            row_of[part] = np.arange(len(part))
            rows = np.flatnonzero(row_of[source] >= 0)
            yield Prefill(store, leaders[part], first + rows, row_of[source[rows]], tokens)
            start += len(part)

    def make_room(self) -> None:
        """Merge small banks and grow stores, so that the next step can write."""
        if self.fixed is not None:
            return
        for bank in self.banks:
            if len(bank) <= SMALL_BANK // 2 and len(self.banks) > 1:
                bank.unshare()
        plain = sorted((bank for bank in self.banks if bank.prefix is None), key=len)
        while len(plain) > 1 and (len(plain) > MOST_BANKS or len(plain[0]) + len(plain[1]) <= SMALL_BANK):
            new = merged(plain[0], plain[1])
            self.banks = [bank for bank in self.banks if bank not in plain[:2]] + [new]
            plain = sorted([*plain[2:], new], key=len)
        for bank in self.banks:
            bank.make_room()

    def advance(self, finished: np.ndarray, tokens: int = 1) -> None:
        """Every row has got some tokens; drop the finished ones.

        Args:
            finished: (n,) bool over the rows of all banks in order.
            tokens: how many.
        """
        first = 0
        for bank in self.banks:
            mine = finished[first : first + len(bank)]
            first += len(bank)
            bank.position += tokens
            if mine.any():
                bank.retire(mine)
        self.banks = [bank for bank in self.banks if len(bank)]

    def restart(self, rows: int) -> list[int]:
        """Put all answers at work back into the queue and go on with fewer rows; returns them."""
        busy = np.concatenate([bank.answer for bank in self.banks]) if self.banks else np.array([], dtype=np.int64)
        self.banks = []
        self.queue = np.concatenate([busy, self.queue])
        self.rows = rows
        if self.fixed is not None:
            self.fixed = KVCache(rows, self.fixed.capacity)
        return busy.tolist()
