"""Lines of a data file that cannot be read: an error, or counted and left out (`--bad_rows`)."""

from __future__ import annotations

from dataclasses import dataclass

from dschat_ppo.errors import UserError

QUOTED_CHARACTERS = 200
AROUND_CHARACTERS = 40  # shown before and after a byte that is not UTF-8
NOT_UTF8 = "is not UTF-8 text (save the file as UTF-8)"
MOST_BAD = {"few": 0.01, "skip": 1.0, "error": 0.0}  # share of the rows of a data set that --bad_rows drops
WAY_OUT = "--bad_rows skip leaves such rows out"


def too_many(bad: int, rows: int, policy: str) -> bool:
    """Whether `--bad_rows` does not accept so many bad rows; if all are bad, no value does."""
    return bad > MOST_BAD[policy] * rows or 0 < rows == bad


def way_out(bad: int, rows: int, policy: str) -> str:
    """The hint at `--bad_rows skip` after a count, where that would help."""
    return "" if policy == "skip" or bad == rows else f"; {WAY_OUT}"


@dataclass
class BadLines:
    """Counts the bad lines of one file. `skip` leaves them out; otherwise the first one raises `UserError`."""

    skip: bool
    count: int = 0
    first: str = ""

    def add(self, place: str, cause: str, content: str, lines: int = 1) -> None:
        """Count a bad row of `lines` lines at `place`, such as "line 7". The error does not name the file. `cause`: a
        predicate, such as "is not JSON"; the first `QUOTED_CHARACTERS` of `content` are quoted."""
        shown = f"{content[:QUOTED_CHARACTERS]!r}" + ("..." if len(content) > QUOTED_CHARACTERS else "")
        message = f"{place} {cause}: {shown}"
        if not self.skip:
            raise UserError(f"{message}; {WAY_OUT}")
        self.first = self.first or message
        self.count += lines

    def forget(self) -> None:
        """Count from here on."""
        self.count, self.first = 0, ""

    def add_bytes(self, place: str, content: bytes) -> None:
        """Count a line that is not UTF-8; the text around its first bad byte is quoted."""
        self.add(place, NOT_UTF8, around_bad_byte(content))


def around_bad_byte(content: bytes) -> str:
    """The text around the first byte that is not UTF-8, which is shown as a backslash, x and its number."""
    try:
        content.decode()
    except UnicodeDecodeError as problem:
        place = len(content[: problem.start].decode())
        text = content.decode(errors="backslashreplace")
        first, end = max(0, place - AROUND_CHARACTERS), place + AROUND_CHARACTERS
        return ("..." if first else "") + text[first:end] + ("..." if end < len(text) else "")
    return content.decode()
