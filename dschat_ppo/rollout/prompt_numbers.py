"""Which sequences that open late share a prompt."""

from __future__ import annotations

import numpy as np


class PromptNumbers:
    """Gives sequences the numbers of their prompts: `numbers` (A,) int64, which change in place.
    Sequences with one number share their prompt in the cache. No more numbers are in use than there
    are sequences."""

    def __init__(self, numbers: np.ndarray):
        self.numbers = numbers
        self._number_of = dict[tuple[int, ...], int]()  # the newest with these tokens
        self._ids_of = dict[int, tuple[int, ...]]()

    def give(
        self, sequence: int, ids: tuple[int, ...], waiting: np.ndarray, sharing: np.ndarray
    ) -> np.ndarray:
        """Give a sequence without a row the number of the sequences with the same prompt `ids`, if
        some wait to start (of `waiting` (n,)), or run and have it in the cache for several
        (`sharing` (m,)); else a number that no other sequence has. Returns those that wait,
        (k,)."""
        self.numbers[sequence] = -1
        prompt_number = self._number_of.get(ids)
        if prompt_number is not None:
            waits = waiting[self.numbers[waiting] == prompt_number]
            if len(waits) or (self.numbers[sharing] == prompt_number).any():
                self.numbers[sequence] = prompt_number
                return waits
        prompt_number = int(np.setdiff1d(np.arange(len(self.numbers)), self.numbers)[0])
        old_ids = self._ids_of.pop(prompt_number, None)
        if old_ids is not None and self._number_of.get(old_ids) == prompt_number:
            del self._number_of[old_ids]
        self.numbers[sequence] = prompt_number
        self._number_of[ids] = prompt_number
        self._ids_of[prompt_number] = ids
        return waiting[:0]
