"""Decode the values of a JSON file one by one, without the whole file in memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dschat_ppo.data.bad_lines import BATCH_BYTES, QUOTED_CHARACTERS
from dschat_ppo.errors import UserError

_LONGEST_WORD = 12  # of JSON outside a string, with some space: "\\ud83d\\ude00", "-Infinity"


def json_values(path: Path) -> Iterator[Any]:
    """The values of one array, or of a sequence of JSON values, decoded one by one: the file is never whole in
    memory."""
    decoder, number = json.JSONDecoder(), 0
    with path.open(encoding="utf-8-sig") as file:
        buffer = _read(file, number).lstrip()
        in_array = buffer.startswith("[")
        place = 1 if in_array else 0
        comma = False
        while True:
            place = _skip(buffer, place, " \t\r\n")
            if place == len(buffer):
                more = _read(file, number)
                if not more:
                    if in_array:
                        raise UserError(f"its array has no end after row {number}: the file is truncated")
                    return
                buffer, place = more, 0
                continue
            if in_array and buffer[place] == "," and comma:
                place, comma = place + 1, False
                continue
            if in_array and buffer[place] == "]" and (comma or number == 0):
                rest = buffer[place + 1 :] + file.read(BATCH_BYTES)
                if rest.strip():
                    raise UserError(f"has more text after the end of its array: {rest.strip()[:QUOTED_CHARACTERS]!r}")
                return
            if in_array and comma:
                raise UserError(
                    f"row {number} is not followed by a comma: {buffer[place : place + QUOTED_CHARACTERS]!r}"
                )
            try:
                value, end = decoder.raw_decode(buffer, place)
                if end == len(buffer) and not isinstance(value, (dict, list, str)):
                    raise json.JSONDecodeError("a number may continue", buffer, end)
            except RecursionError:
                raise UserError(f"row {number + 1} is nested too deeply") from None
            except json.JSONDecodeError as problem:
                may_continue = "Unterminated" in problem.msg or problem.pos >= len(buffer.rstrip()) - _LONGEST_WORD
                more = _read(file, number, at_least=len(buffer) - place) if may_continue else ""
                if not more:
                    cause = f"row {number + 1} is not JSON ({reason(problem)})"
                    if "Unterminated" in problem.msg or problem.pos >= len(buffer.rstrip()):
                        cause = f"row {number + 1} has no end: the file is truncated"
                    raise UserError(f"{cause}: {buffer[place : place + QUOTED_CHARACTERS]!r}") from None
                buffer, place = buffer[place:] + more, 0
                continue
            number, place, comma = number + 1, end, True
            yield value


def reason(problem: json.JSONDecodeError) -> str:
    """What is wrong, without the word before a place: Python's messages end with "at", ":" or neither."""
    return problem.msg.rstrip(": ").removesuffix(" at").removesuffix(" starting")


def _skip(buffer: str, place: int, letters: str) -> int:
    while place < len(buffer) and buffer[place] in letters:
        place += 1
    return place


def _read(file: Any, number: int, at_least: int = 0) -> str:
    try:
        return str(file.read(max(BATCH_BYTES, at_least)))
    except UnicodeDecodeError:
        raise UserError(f"is not UTF-8 text, in or after row {number + 1}; save the file as UTF-8") from None
