"""How a flag names a function of one's own: `FILE.py:FUNCTION`. `common/own_functions.py` loads it."""

from __future__ import annotations

import re

_FORM = re.compile(r".+\.py:[^\W\d]\w*", re.DOTALL)


def is_own_function(name: str) -> bool:
    """Whether this is `FILE.py:FUNCTION`; the file need not exist."""
    return _FORM.fullmatch(name) is not None


class OrOwnFunction(tuple[str, ...]):
    """The choices of a flag that takes a function of one's own too."""

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or (isinstance(name, str) and is_own_function(name))
