"""Rubrics: the criteria of a data row, each a question of its own."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from dschat_ppo.errors import UserError

_TEXTS = ("criterion", "description", "title")


@dataclass(frozen=True)
class Criterion:
    """A criterion of a rubric; a negative weight is that of a fault."""

    text: str
    weight: float = 1.0
    name: str = ""  # its mean is logged under the name; "": it is not


def criteria_of(value: Any, column: str) -> list[Criterion]:
    """The criteria in the value of a row's `column`: a list of texts, or of objects with
    `criterion` (or `description`, or `title`), `weight` and `name`; also as JSON text. A text that
    is no JSON list is one criterion. `UserError` names what is wrong."""
    entries = value
    if isinstance(value, str):
        entries = [value]
        with suppress(ValueError, RecursionError):
            parsed = json.loads(value)
            if isinstance(parsed, list):
                entries = parsed
    if not isinstance(entries, list) or not entries:
        raise UserError(f"'{column}' is no list of criteria")
    criteria = []
    for ordinal, entry in enumerate(entries, start=1):
        criteria.append(_criterion(entry, f"criterion {ordinal} of '{column}'"))
    if not any(criterion.weight > 0 for criterion in criteria):
        raise UserError(f"'{column}' has no criterion with a weight above 0")
    return criteria


def _criterion(entry: Any, where: str) -> Criterion:
    fields = entry
    if isinstance(entry, str):
        fields = {"criterion": entry}
    if not isinstance(fields, dict):
        raise UserError(f"{where} is neither a text nor an object with one")
    texts = [fields[key] for key in _TEXTS if fields.get(key)]
    if not texts or not isinstance(texts[0], str) or not texts[0].strip():
        raise UserError(f"{where} has no text")
    weight = fields.get("weight")
    if weight is None:
        weight = 1.0
    is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
    if not is_number or not math.isfinite(weight):
        raise UserError(f"{where} has the weight {weight!r}, which is not a finite number")
    return Criterion(texts[0], float(weight), str(fields.get("name") or ""))
