"""Passwords in URLs, which reports and trackers must not show."""

from __future__ import annotations

import re
from typing import Any

_LOGIN = re.compile(r"(?<=//)[^/@\s]+(?=@)")  # user:password before the host of a URL


def without_credentials(value: Any) -> Any:
    """A value of a flag with `***` in place of the login of each URL in it; the items of a list likewise."""
    if isinstance(value, str):
        return _LOGIN.sub("***", value)
    return [without_credentials(item) for item in value] if isinstance(value, list) else value
