"""The grammar that reward functions and judges share:
`[SOURCE=]NAME[?key=value&key=value][:weight]`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import parse_qsl

from dschat_ppo.config.ppo_flags import split_weight
from dschat_ppo.errors import UserError


@dataclass(frozen=True)
class SourceText:
    """What the text of a reward source says."""

    name: str
    weight: float
    sources: tuple[str, ...]  # data sources whose rows it scores; (): all
    settings: tuple[tuple[str, str], ...]


def parse_source_text(text: str, as_given: str, is_path: Callable[[str], bool]) -> SourceText:
    """Read the text of a reward source. Settings are percent-decoded, and `+` stays a plus.

    Args:
        text: it.
        as_given: the flag and the text, for messages.
        is_path: whether what precedes the settings is there, so that a `=` in it ends no route.
    """
    sources, unrouted = _split_route(text, as_given, is_path)
    name, mark, query = unrouted.partition("?")
    if mark:
        query, weight = split_weight(query)
    else:
        name, weight = split_weight(name)
    settings = parse_qsl(query.replace("+", "%2B"), keep_blank_values=True)
    if len(dict(settings)) < len(settings):
        raise UserError(f"{as_given}: a setting is given twice")
    if not math.isfinite(weight):
        raise UserError(f"{as_given}: the weight must be finite, got {weight}")
    return SourceText(name, weight, sources, tuple(settings))


def _split_route(
    text: str, as_given: str, is_path: Callable[[str], bool]
) -> tuple[tuple[str, ...], str]:
    """`"math,gsm8k=my.py:score"` -> (("math", "gsm8k"), "my.py:score"); a path that contains `=` is
    no route."""
    head = text.partition("?")[0]
    names, mark, _ = head.partition("=")
    if not mark or is_path(head):
        return (), text
    sources = tuple(dict.fromkeys(name.strip() for name in names.split(",")))
    if not all(sources):
        raise UserError(
            f"{as_given}: expected a data source before '=', or several separated by commas"
        )
    return sources, text[len(names) + 1 :]
