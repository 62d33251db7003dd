"""Pairs of responses: who meets whom, and who wins."""

from __future__ import annotations

import math
from collections.abc import Sequence
from hashlib import sha256


def rivals_of(texts: Sequence[str], most: int, seed: str) -> list[list[int]]:
    """For each response of a group the indices of its rivals: its neighbours on a ring, in turn on
    either side, at most `most`. The order of the ring depends on the texts and the seed alone, not
    on the order of the group."""
    size = len(texts)

    def drawn(index: int) -> tuple[str, int]:
        text = f"{seed}\n{texts[index]}"
        return sha256(text.encode("utf-8", "surrogatepass")).hexdigest(), index

    ring = sorted(range(size), key=drawn)
    rivals: list[list[int]] = [[] for _ in texts]
    for position, index in enumerate(ring):
        for distance in range(1, size):
            for step in (distance, -distance):
                rival = ring[(position + step) % size]
                if rival != index and rival not in rivals[index] and len(rivals[index]) < most:
                    rivals[index].append(rival)
    return rivals


def preference(first: Sequence[float], second: Sequence[float]) -> float:
    """The probability that the first of two responses is better, of the log-probs of the verdicts A
    and B in both orders. What a judge adds to the log-odds of a place cancels."""
    difference = (first[0] - first[1]) - (second[0] - second[1])
    return 0.5 + 0.5 * math.tanh(difference / 4)  # sigmoid(difference / 2)


def flips(first: Sequence[float], second: Sequence[float]) -> bool:
    """Whether the same place wins in both orders."""
    return (first[0] > first[1]) == (second[0] > second[1])
