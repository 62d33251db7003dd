"""When an answer ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Decode = Callable[[list[list[int]]], list[str]]

TAIL = 8  # tokens looked at beyond those, for tokens that are no text by themselves


@dataclass(frozen=True)
class StoppingCriteria:
    """What ends an answer. The token that ends it belongs to it.

    `max_new_tokens` at least 1; no token of `eos_ids` or `stop_ids` comes before `min_new_tokens` tokens are there;
    `stop_strings` end an answer once its decoded text holds one of them, which needs `decode` (rows of ids -> texts).
    """

    max_new_tokens: int
    eos_ids: tuple[int, ...] = ()
    stop_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    min_new_tokens: int = 0
    decode: Decode | None = None

    def __post_init__(self) -> None:
        if self.stop_strings and self.decode is None:
            raise ValueError("stop strings need a decoder")

    @property
    def ids(self) -> tuple[int, ...]:
        """All tokens that end an answer."""
        return (*self.eos_ids, *self.stop_ids)

    @property
    def reach(self) -> int:
        """How many of an answer's last tokens can take part in a stop string: at most one for each of its bytes."""
        return max((len(text.encode()) for text in self.stop_strings), default=0) + TAIL

    def found_in_text(self, tails: list[list[int]]) -> list[bool]:
        """Whether the newest token of each answer completed a stop string.

        Args:
            tails: the last `reach` ids of each answer, or all of a shorter one.
        """
        if self.decode is None or not tails:
            return [False] * len(tails)
        return [any(stop in text for stop in self.stop_strings) for text in self.decode(tails)]
