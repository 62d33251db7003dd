"""Pairs of responses: who meets whom, and who wins."""

from __future__ import annotations

import math
from collections.abc import Sequence
from hashlib import sha256


def rivals_of(texts: Sequence[str], most: int, seed: str) -> list[list[int]]:
    """For each response of a group the indices of its rivals: all others; or, if `most` is less,
    its neighbours on a ring, in turn on either side. The order of the ring depends on the texts and
    the seed alone, not on the order of the group. Equal texts are one place on the ring, so they
    have the same rivals."""
    size = len(texts)
    if most >= size - 1:
        return [[rival for rival in range(size) if rival != index] for index in range(size)]

    def drawn(text: str) -> str:
        return sha256(f"{seed}\n{text}".encode("utf-8", "surrogatepass")).hexdigest()

    ring = sorted(dict.fromkeys(texts), key=drawn)
    if len(ring) == 1:  # any other is equal
        return [[(index + 1) % size] for index in range(size)]
    rivals_of_text: dict[str, list[int]] = {}
    for position, text in enumerate(ring):
        neighbours = []
        for distance in range(1, len(ring)):
            neighbours += [(position + distance) % len(ring), (position - distance) % len(ring)]
        others = [ring[neighbour] for neighbour in dict.fromkeys(neighbours)]
        rivals_of_text[text] = [texts.index(other) for other in others if other != text][:most]
    return [rivals_of_text[text] for text in texts]


def preference(first: Sequence[float], second: Sequence[float]) -> float:
    """The probability that the first of two responses is better, of the log-probs of the verdicts A
    and B in both orders. What a judge adds to the log-odds of a place cancels."""
    difference = (first[0] - first[1]) - (second[0] - second[1])
    return 0.5 + 0.5 * math.tanh(difference / 4)  # sigmoid(difference / 2)


def flips(first: Sequence[float], second: Sequence[float]) -> bool:
    """Whether the same place wins in both orders; False if a verdict is missing."""
    if not all(map(math.isfinite, (*first, *second))):
        return False
    return (first[0] > first[1]) == (second[0] > second[1])
