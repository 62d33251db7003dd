"""The shipped rules: functions that score one response, written as users write theirs.

`response` is the text to score; other arguments are columns of the data row or settings
(`rule?key=value`). A rule raises if the row lacks a column that it needs; the response then gets
the default score. The module imports only the standard library, so that workers start fast.
"""

from __future__ import annotations

import json
import logging
import re
from decimal import Decimal
from typing import Any, NoReturn

_NUMBER = re.compile(
    r"""(?: (?<![\w)])-\$? | (?<![\w)])\$- | (?<!\w)\$ | (?<![\w.]) )
        # a minus after a word or `)` is no sign
        (?: \d{1,3}(?:,\d{3})+(?!\d) | \d+ | (?=\.\d) )
        (?: \.\d+ )?
        (?: [eE][+-]?\d{1,3}(?!\w) )?""",
    re.VERBOSE,
)
_AFTER_HASHES = re.compile(rf"\#{{4}} [\s*]* ({_NUMBER.pattern})", re.VERBOSE)
_FENCE = re.compile(r"```(?:json)?[ \t]*\n(.*?)\n?[ \t]*```", re.DOTALL)


def exact_match(response: str, answer: Any, ignore_case: bool = False) -> bool:
    """1 if the response equals the `answer` column (or an item of it, if it is a list), without
    outer whitespace."""
    answers = answer
    if not isinstance(answer, list):
        answers = [_needed(answer)]
    accepted = [str(text).strip() for text in answers]
    text = response.strip()
    if ignore_case:
        return text.casefold() in [accepted_text.casefold() for accepted_text in accepted]
    return text in accepted


def numeric_match(response: str, answer: Any) -> bool:
    """1 if response and `answer` column hold the same decimal number: `$1,234.50.` equals
    `1234.5`."""
    gold = final_number(str(_needed(answer)))
    if gold is None:
        raise ValueError(f"the column 'answer' holds no number: {str(answer)[:80]!r}")
    return final_number(response) == gold


def final_number(text: str) -> Decimal | None:
    """The number after the last `####` that has one (the format of GSM8K, Cobbe et al. 2021), else
    `last_number`. Only whitespace and asterisks may come between: `#### Step 1` is a heading."""
    stated = _AFTER_HASHES.findall(text.replace("\N{MINUS SIGN}", "-"))
    if stated:
        return last_number(stated[-1])
    return last_number(text)


def last_number(text: str) -> Decimal | None:
    """The last number of a text, with optional sign, `$`, commas between thousands, decimals and
    exponent; None if none."""
    numerals = _NUMBER.findall(text.replace("\N{MINUS SIGN}", "-"))
    if not numerals:
        return None
    return Decimal(re.sub(r"[$,]", "", numerals[-1]))


def boxed_math(response: str, answer: Any) -> bool:
    r"""1 if the last `\boxed{...}` of the response is mathematically equal to the `answer` column,
    by `math_verify`.

    The column may be boxed or not. A response without a closed box scores 0.
    """
    from math_verify import parse, verify

    # it warns about calls without its timeout
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    gold = str(_needed(answer))
    gold_boxed = last_boxed(gold)
    if gold_boxed is None:
        gold_boxed = gold
    boxed = last_boxed(response)
    if boxed is None:
        return False
    # without the timeouts of math_verify, which use SIGALRM: every call has a time limit already
    parsed_gold = parse(rf"\boxed{{{gold_boxed}}}", parsing_timeout=None)
    parsed = parse(rf"\boxed{{{boxed}}}", parsing_timeout=None)
    if not parsed_gold:
        raise ValueError(
            f"the column 'answer' holds nothing that math_verify can parse: {gold[:80]!r}"
        )
    return bool(verify(parsed_gold, parsed, timeout_seconds=None))


def last_boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{...}`, with balanced braces; None if there is no closed
    box."""
    start = text.rfind(r"\boxed{")
    if start < 0:
        return None
    begin = start + len(r"\boxed{")
    depth = 0  # of open braces
    for offset in range(begin - 1, len(text)):
        if text[offset - 1] != "\\":
            depth += {"{": 1, "}": -1}.get(text[offset], 0)
        if depth == 0:
            return text[begin:offset]
    return None


def format_match(response: str, pattern: Any = None) -> bool:
    """1 if the whole stripped response matches the setting or column `pattern`; `.` matches line
    breaks."""
    if pattern is None:
        raise ValueError("needs a column or a setting 'pattern'")
    return re.fullmatch(str(pattern), response.strip(), re.DOTALL) is not None


def length(response: str, unit: str = "characters") -> float:
    """The response's length in `characters` or `words`. Use a negative weight to penalise long
    responses."""
    if unit not in ("characters", "words"):
        raise ValueError(f"unit must be characters or words, not '{unit}'")
    if unit == "words":
        return float(len(response.split()))
    return float(len(response))


def length_penalty(
    response: str, most: int = 2000, buffer: int = 500, unit: str = "characters"
) -> float:
    """0 up to length `most - buffer`, then linear down to -1 at `most`, and -1 beyond (DAPO, eq.
    13)."""
    if not 0 < buffer <= most:
        raise ValueError(f"buffer must be above 0 and at most {most}, got {buffer}")
    return -min(1.0, max(0.0, (length(response, unit) - (most - buffer)) / buffer))


def json_valid(response: str) -> bool:
    """1 if the response, or the single ```json fence that it consists of, is JSON (without NaN and
    Infinity)."""
    text = response.strip()
    fenced = _FENCE.fullmatch(text)
    if fenced is not None:
        text = fenced.group(1)
    try:
        json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _needed(answer: Any) -> Any:
    if answer is None:
        raise ValueError("the row has no column 'answer'")
    return answer
