"""Which sequences that open late share a prompt."""

from __future__ import annotations

import numpy as np


class PromptNumbers:
    """Gives sequences the numbers of their prompts: `numbers` (A,) int64, which change in place.
    Sequences with one number have equal prompts, which the cache may hold once. No more numbers are
    in use than there are sequences."""

    def __init__(self, numbers: np.ndarray):
        self.numbers = numbers
        self._number_of = dict[tuple[int, ...], int]()
        self._ids_of = dict[int, tuple[int, ...]]()

    def give(self, sequence: int, ids: tuple[int, ...]) -> int:
        """Give a sequence, which has no row, the number of the prompt `ids`: one that is known, or
        one that no other sequence has."""
        self.numbers[sequence] = -1
        prompt_number = self._number_of.get(ids)
        if prompt_number is None:
            prompt_number = int(np.setdiff1d(np.arange(len(self.numbers)), self.numbers)[0])
            old_ids = self._ids_of.get(prompt_number)
            if old_ids is not None:
                del self._number_of[old_ids]
            self._number_of[ids] = prompt_number
            self._ids_of[prompt_number] = ids
        self.numbers[sequence] = prompt_number
        return prompt_number
