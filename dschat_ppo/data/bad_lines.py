"""Lines of a data file that cannot be read: an error, or counted and left out (`--bad_rows`)."""

from __future__ import annotations

from dataclasses import dataclass

from dschat_ppo.errors import UserError

QUOTED_CHARACTERS = 200


@dataclass
class BadLines:
    """Counts the bad lines of one file.

    Attributes:
        skip: True leaves them out, False raises at the first one.
        count: lines left out.
        first: place, cause and first characters of the first one; "" if there is none.
    """

    skip: bool
    count: int = 0
    first: str = ""

    def add(self, place: str, cause: str, content: str, lines: int = 1) -> None:
        """Count a bad line, or several that belong to one row.

        Args:
            place: such as "line 7".
            cause: a predicate, such as "is not JSON".
            content: of the line; its first `QUOTED_CHARACTERS` are quoted.
            lines: how many lines are left out.

        Raises:
            UserError: bad lines are errors. The message does not name the file.
        """
        shown = f"{content[:QUOTED_CHARACTERS]!r}" + ("..." if len(content) > QUOTED_CHARACTERS else "")
        message = f"{place} {cause}: {shown}"
        if not self.skip:
            raise UserError(message)
        self.first = self.first or message
        self.count += lines
