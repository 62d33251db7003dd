"""When a response ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dschat_ppo.types import LateEnds

Decode = Callable[[list[list[int]]], list[str]]

TAIL = 8  # tokens decoded beyond those that a stop string can span, for tokens that are no text by themselves


@dataclass(frozen=True)
class StoppingCriteria:
    """What ends a response. The token that ends it belongs to the response. `max_new_tokens` is at least 1. Tokens of
    `eos_ids` and `stop_ids` cannot be sampled before `min_new_tokens` tokens. `stop_strings` end a response once its
    decoded text contains one of them; they need `decode` (rows of ids -> texts)."""

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
        """All tokens that end a response."""
        return (*self.eos_ids, *self.stop_ids)

    @property
    def late_ends(self) -> LateEnds | None:
        """The tokens that cannot be sampled before `min_new_tokens`; None if there are none."""
        return LateEnds(self.ids, self.min_new_tokens) if self.ids and self.min_new_tokens else None

    @property
    def reach(self) -> int:
        """How many of the last tokens can take part in a stop string: at most one per byte, plus `TAIL`."""
        return max((len(text.encode()) for text in self.stop_strings), default=0) + TAIL

    def found_in_text(self, tails: list[list[int]]) -> list[bool]:
        """Whether the newest token of each response completed a stop string; `tails`: its last `reach` ids, or all."""
        if self.decode is None or not tails:
            return [False] * len(tails)
        return [any(stop in text for stop in self.stop_strings) for text in self.decode(tails)]
