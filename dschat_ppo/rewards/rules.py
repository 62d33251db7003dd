"""The shipped rules: plain functions that score one row, in the form that users write theirs in.

`response` is the answer's text; other arguments are columns of the data row or settings (`rule?key=value`). A row
without the column that a rule needs raises, which costs the row the default score. Standard library only: workers start
fast.
"""

from __future__ import annotations

import json
import logging
import re
from decimal import Decimal
from typing import Any, NoReturn

_NUMBER = re.compile(
    r"""(?: (?<![\w)])-\$? | (?<![\w)])\$- | (?<!\w)\$ | (?<![\w.]) )  # a minus is a sign if nothing is before it
        (?: \d{1,3}(?:,\d{3})+(?!\d) | \d+ | (?=\.\d) )
        (?: \.\d+ )?
        (?: [eE][+-]?\d{1,3}(?!\w) )?""",
    re.VERBOSE,
)
_AFTER_HASHES = re.compile(rf"\#{{4}} [\s*]* ({_NUMBER.pattern})", re.VERBOSE)
_FENCE = re.compile(r"```(?:json)?[ \t]*\n(.*?)\n?[ \t]*```", re.DOTALL)


def exact_match(response: str, answer: Any, ignore_case: bool = False) -> bool:
    """1 if the response is the `answer` column (one of them if it is a list), blanks at both ends aside."""
    given = response.strip()
    accepted = [str(item).strip() for item in (answer if isinstance(answer, list) else [_needed(answer)])]
    if ignore_case:
        return given.casefold() in [item.casefold() for item in accepted]
    return given in accepted


def numeric_match(response: str, answer: Any) -> bool:
    """1 if response and `answer` column give the same number, as decimals: `$1,234.50.` is `1234.5`."""
    gold = final_number(str(_needed(answer)))
    if gold is None:
        raise ValueError(f"the column 'answer' holds no number: {str(answer)[:80]!r}")
    return final_number(response) == gold


def final_number(text: str) -> Decimal | None:
    """The number that follows the last `####` that has one (the form of GSM8K, Cobbe et al. 2021), else `last_number`.

    What stands between may be blanks and asterisks alone: `#### Step 1` is a heading.
    """
    stated = _AFTER_HASHES.findall(text.replace("\N{MINUS SIGN}", "-"))
    return last_number(stated[-1] if stated else text)


def last_number(text: str) -> Decimal | None:
    """The last number of a text: sign, `$`, thousands in groups of three, decimals and an exponent are understood."""
    found = _NUMBER.findall(text.replace("\N{MINUS SIGN}", "-"))
    return Decimal(re.sub(r"[$,]", "", found[-1])) if found else None


def boxed_math(response: str, answer: Any) -> bool:
    r"""1 if the last `\boxed{...}` of the response is mathematically the `answer` column, by `math_verify`.

    The column may be bare or boxed itself. A response without a closed box scores 0.
    """
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of each call without a time limit of its own
    gold = str(_needed(answer))
    boxed = last_boxed(gold)
    found = last_boxed(response)
    if found is None:
        return False
    # no time limits of its own: they are alarms, and every call has one already
    sides = [parse(rf"\boxed{{{side}}}", parsing_timeout=None) for side in (gold if boxed is None else boxed, found)]
    if not sides[0]:
        raise ValueError(f"the column 'answer' holds nothing that math_verify reads: {gold[:80]!r}")
    return bool(verify(*sides, timeout_seconds=None))


def last_boxed(text: str) -> str | None:
    r"""What the last `\boxed{...}` holds, braces balanced; None without one that is closed."""
    start = text.rfind(r"\boxed{")
    depth, begin = 0, start + len(r"\boxed{")
    for place in range(begin - 1, len(text) if start >= 0 else 0):
        if text[place - 1] != "\\":
            depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[begin:place]
    return None


def format_match(response: str, pattern: Any = None) -> bool:
    """1 if the whole response, blanks at both ends aside, has the form of `pattern`, a regular expression.

    It is a setting or a column; `.` matches line ends too.
    """
    if pattern is None:
        raise ValueError("needs a column or a setting 'pattern'")
    return re.fullmatch(str(pattern), response.strip(), re.DOTALL) is not None


def length(response: str, unit: str = "characters") -> float:
    """The response's length in `characters` or `words`. With a negative weight long answers cost."""
    if unit not in ("characters", "words"):
        raise ValueError(f"unit must be characters or words, not '{unit}'")
    return float(len(response) if unit == "characters" else len(response.split()))


def length_penalty(response: str, most: int = 2000, buffer: int = 500, unit: str = "characters") -> float:
    """0 up to `most - buffer`, from there falling linearly to -1 at `most`, and -1 beyond (DAPO, eq. 13)."""
    if not 0 < buffer <= most:
        raise ValueError(f"buffer must be above 0 and at most {most}, got {buffer}")
    return -min(1.0, max(0.0, (length(response, unit) - (most - buffer)) / buffer))


def json_valid(response: str) -> bool:
    """1 if the response, or the one ```json fence that it consists of, is JSON (NaN and Infinity are not)."""
    text = response.strip()
    fenced = _FENCE.fullmatch(text)
    try:
        json.loads(fenced.group(1) if fenced else text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _needed(answer: Any) -> Any:
    if answer is None:
        raise ValueError("the row has no column 'answer'")
    return answer
