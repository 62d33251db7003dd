"""Marks in texts, one character each, in place of content that is no text, such as images. Forms
see them as text; the chat template gets a part for each, and writes what stands for it."""

from __future__ import annotations

import re
from typing import Any

_FIRST_MARK = 0xF0000  # of a plane that no text uses
MOST_MARKS = 256  # of a row
PLACE = (
    "<image>"  # how a mark is shown; in texts of data sets such as LLaVA's the place of an image
)
_BASE64 = re.compile('(base64,|"base64": "|"bytes": ")([A-Za-z0-9+/]{200,}={0,2})')
MARK = re.compile(f"[{chr(_FIRST_MARK)}-{chr(_FIRST_MARK + MOST_MARKS - 1)}]")


def mark_of(index: int) -> str:
    """The mark of the content with this number, of one row."""
    return chr(_FIRST_MARK + index)


def index_of(mark: str) -> int:
    """The number of the content that a mark stands for."""
    return ord(mark) - _FIRST_MARK


def has_marks(content: Any) -> bool:
    """Whether a text has marks."""
    return isinstance(content, str) and MARK.search(content) is not None


def with_places(content: Any) -> Any:
    """A text with `PLACE` for each mark, as people read it; anything else as it is."""
    if not isinstance(content, str):
        return content
    return MARK.sub(PLACE, content)


def without_base64(text: str) -> str:
    """JSON for people, with the number of characters in place of content in base64."""
    return _BASE64.sub(lambda found: f"{found[1]}<{len(found[2])} characters of base64>", text)


def in_parts(content: Any) -> list[dict[str, str]]:
    """A text as the list of parts that chat templates of models with images take: text, and an
    image for each mark."""
    content_parts = list[dict[str, str]]()
    begin = 0
    for mark in MARK.finditer(content or ""):
        if mark.start() > begin:
            content_parts.append({"type": "text", "text": content[begin : mark.start()]})
        content_parts.append({"type": "image"})
        begin = mark.end()
    if content and begin < len(content):
        content_parts.append({"type": "text", "text": content[begin:]})
    return content_parts


def stands_in(words: str, text: str) -> bool:
    """Whether a text holds these words, each piece between marks by itself."""
    return all(piece.strip() in text for piece in MARK.split(words))
