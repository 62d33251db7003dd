"""Token rows as text that a person can check: trained tokens, special tokens, line breaks and control characters.

With colours, trained tokens have a green background and special tokens are magenta. Without, trained tokens stand
between `⟦` and `⟧`. Line breaks are shown as `⏎`, tabs as `⇥`. Other control characters, which could change the state
of a terminal, and invisible ones are shown as escapes such as `\\x1b`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

from transformers import PreTrainedTokenizerBase

from dschat_ppo.data.sample_text import text_between
from dschat_ppo.errors import escaped

OPEN, CLOSE = "⟦", "⟧"
MOST_CHARACTERS = 1200  # of one text, unless --full
_TRAINED, _SPECIAL, _SPECIAL_TRAINED, _MARK, _RESET = "\x1b[30;42m", "\x1b[35m", "\x1b[95;42m", "\x1b[2m", "\x1b[0m"


@dataclass(frozen=True)
class Piece:
    """Consecutive tokens of one kind, as text.

    Attributes:
        text: decoded with special tokens.
        trained: whether the loss covers the tokens.
        special: whether they are special tokens.
    """

    text: str
    trained: bool
    special: bool


def pieces_of(
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], trained: Sequence[bool], prompt_tokens: int
) -> tuple[list[Piece], list[Piece]]:
    """The text of a token row, (of its prompt, of its answer), in pieces. Joined, they are the decoded row.

    Args:
        tokenizer: of the ids.
        ids: T token ids.
        trained: T bools, True where the loss covers the token.
        prompt_tokens: number of tokens before the answer.
    """
    special = special_ids(tokenizer)
    found: tuple[list[Piece], list[Piece]] = ([], [])
    end = 0
    kinds = [
        (place >= prompt_tokens, bool(mask), int(token) in special)
        for place, (token, mask) in enumerate(zip(ids, trained, strict=True))
    ]
    for (is_answer, is_trained, is_special), run in groupby(kinds):
        start, end = end, end + len(list(run))
        found[is_answer].append(Piece(text_between(tokenizer, ids, start, end), is_trained, is_special))
    return found


def special_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Ids of all special tokens, those that only a chat template uses included."""
    added = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    return added | set(tokenizer.all_special_ids)


def visible(text: str) -> str:
    """`text` with marks for line breaks and tabs, and escapes for characters that a terminal would not show."""
    return escaped(text).replace("\n", "⏎\n").replace("\t", "⇥")


def shortened(pieces: list[Piece], most: int = MOST_CHARACTERS) -> list[Piece]:
    """The pieces without the middle of long ones, so that at most about `most` characters of each remain."""
    return [
        piece if len(piece.text) <= most else Piece(_without_middle(piece.text, most), piece.trained, piece.special)
        for piece in pieces
    ]


def _without_middle(text: str, most: int) -> str:
    return f"{text[: most // 2]} [... {len(text) - most} characters not shown ...] {text[-(most // 2) :]}"


def text_of(pieces: list[Piece], colour: bool) -> str:
    """The pieces as text, with colours or brackets; line breaks inside are kept."""
    parts = []
    for is_trained, group in groupby(pieces, lambda piece: piece.trained):
        shown = "".join(_coloured(piece) if colour else visible(piece.text) for piece in group)
        parts.append(f"{OPEN}{shown}{CLOSE}" if is_trained and not colour else shown)
    return "".join(parts)


def _coloured(piece: Piece) -> str:
    if not piece.trained and not piece.special:
        return visible(piece.text)
    code = (_SPECIAL_TRAINED if piece.special else _TRAINED) if piece.trained else _SPECIAL
    return "\n".join(f"{code}{line}{_RESET}" if line else "" for line in visible(piece.text).split("\n"))


def indented(title: str, text: str, colour: bool) -> list[str]:
    """Lines of a text behind its title and a bar."""
    bar = f"{_MARK}|{_RESET}" if colour else "|"
    width = max(len(title), 12)
    return [
        f"    {(title if number == 0 else '').ljust(width)} {bar} {line}"
        for number, line in enumerate(text.removesuffix("\n").split("\n"))
    ]


def plain(pieces: list[Piece]) -> list[dict[str, Any]]:
    """The pieces for JSON."""
    return [asdict(piece) for piece in pieces]
