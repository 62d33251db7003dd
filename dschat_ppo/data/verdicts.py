"""Which of two answers is better, as data sets say it: the names of such columns, and what their
values mean.

A verdict is a word (`model_a`, `tie`), a place or a signed strength; or each answer has a number,
and the larger one is better. What numbers mean is decided once for a data set, from its first rows:
1 is the first answer, the second one, or a slight lead of the second one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, Literal

from dschat_ppo.data.examples import Row, field_at, number_of
from dschat_ppo.errors import UserError

# What the values of a verdict are: words; the numbers at the ends of the names of two columns;
# places; strengths, of which those below 0 are for the first answer; true and false, or 1 and 0
Scale = Literal[
    "words",
    "ends",
    "place from 0",
    "place from 1",
    "strength",
    "true for the first",
    "true for the second",
]
Answers = tuple[str, str]  # the columns of the two answers

MEANINGS: dict[Scale, str] = {  # for the log
    "ends": "the number of the better answer's column",
    "place from 0": "the place of the better answer (0: the first)",
    "place from 1": "the place of the better answer (1: the first)",
    "strength": "a strength (below 0: the first answer is better)",
    "true for the first": "whether the first answer is better",
    "true for the second": "whether the second answer is better",
}
_STEMS = ("response", "answer", "output", "completion", "conversation", "generation", "summary")
SIDES = (("_0", "_1"), ("_a", "_b"), ("_A", "_B"), ("_1", "_2"), ("1", "2"))
# Columns of two answers
TWO_ANSWERS = [(stem + first, stem + second) for stem in _STEMS for first, second in SIDES]
FIRST = " ".join(first for first, _ in TWO_ANSWERS)
SECOND = " ".join(second for _, second in TWO_ANSWERS)
_STRENGTHS = ("preference_strength", "overall_preference")  # 1 is for the second
# Columns that say nothing else beside two answers
CLEAR_VERDICTS = tuple(
    "better_response_id better_answer_id better preferred preference winner preference_strength"
    " overall_preference better_response better_answer better_id better_index preferred_response"
    " preferred_answer preferred_id preferred_index preferred_model human_preference winner_model"
    " winning_model verdict judgment judgement vote".split()
)
# Pairs of numbers: the first one is for the first answer, if the verdict is clear
_TWO_NUMBERS: dict[tuple[int, int], Scale] = {
    (0, 1): "place from 0",
    (1, 2): "place from 1",
    (-1, 1): "strength",
}
# Of which 1 may be the first or the second answer
_UNCLEAR_VERDICTS = ("choice", "chosen", "label", "labels")
VERDICTS = " ".join((*CLEAR_VERDICTS, *_UNCLEAR_VERDICTS))
# A number for each answer, as 1 for the winner
NUMBERS = [
    ("winner_model_a", "winner_model_b"),
    ("winner_a", "winner_b"),
    *((stem + first, stem + second) for stem in ("score", "rating") for first, second in SIDES),
]
# Columns that turn pairs around, so that they are not left out without a word
TURNING = {*CLEAR_VERDICTS, "winner_model_a", "winner_model_b", "winner_a", "winner_b"}
FIRST_NUMBERS = " ".join(first for first, _ in NUMBERS)
SECOND_NUMBERS = " ".join(second for _, second in NUMBERS)
_TIES = ("neither", "none", "equal", "same", "draw", "all")  # besides tie (bothbad), both_good, ...
_NOUN = "^(the )?(model|response|answer|assistant|output|completion|option|choice)[ _-]?"
_TRUTHS = dict.fromkeys(("true", "yes", "1", "1.0"), True) | dict.fromkeys(
    ("false", "no", "0", "0.0"), False
)
# Words of a name that says which answer is better: `is_first_better`, `a_wins`, `prefers_b`
_OF_A_WIN = {
    *("better", "best", "preferred", "prefer", "prefers", "preferable", "chosen", "wins", "win"),
    *("won", "winner", "beats", "over"),
}
_OF_A_LOSS = {"worse", "worst", "rejected", "dispreferred", "loses", "lost", "loser"}
_FILLING = {"is", "was", "the", "one"}
VERDICT_ROLES = ("better", "first_number", "second_number")
OWN_FUNCTION = (
    "a function that makes rows with chosen and rejected (--data_format FILE.py:FUNCTION)"
)


class UnclearVerdictError(UserError):
    """A verdict that can be read in two ways. `readings`: for each a condition, and the columns of
    the first and of the second answer and of the verdict as flags then name them."""

    def __init__(self, what: str, readings: Sequence[tuple[str, tuple[str, str, str]]]):
        super().__init__(what)
        self.readings = tuple(readings)


def ends_of(answers: Answers) -> list[str]:
    """What distinguishes the columns of two answers: `a` and `b` of `response_a` and `response_b`,
    `1` and `2` of `response1` and `response2`, `0` and `1` of `output.0.text` and `output.1.text`.
    """
    first, second = [re.split(r"[_.-]|(?<=[a-z])(?=\d)", column.lower()) for column in answers]
    if len(first) != len(second):
        return [column.lower() for column in answers]
    unequal = [pair for pair in zip(first, second, strict=True) if pair[0] != pair[1]]
    return ["_".join(words).rstrip(":") for words in zip(*unequal, strict=True)]


def number_in(value: Any) -> float | None:
    """The number that a value is or, in CSV files, is written as; None of all others."""
    if isinstance(value, bool):
        return None
    try:
        as_float = float(value)
    except (TypeError, ValueError):
        return None
    if not math.isfinite(as_float):
        return None
    return as_float


def _numbers_at_ends(answers: Answers) -> list[float]:
    """The numbers at which the names of both answers end, or none."""
    ends = ends_of(answers)
    if ends and all(map(str.isdecimal, ends)):
        return [float(end) for end in ends]
    return []


def side_named(column: str, answers: Answers) -> int:
    """1 if the name of a column says that the first answer is better, as `is_first_better` and
    `a_wins`, -1 if it says so of the second one, 0 if it says neither."""
    if any(column in pair for pair in NUMBERS):  # whose other column tells of ties
        return 0
    words = re.sub(r"([a-z])([A-Z])", r"\1_\2", column).lower()
    words = re.split(r"_than_|(?<=_over)_|(?<=_beats)_", words)[0]  # and not the other answer
    said = re.split(r"[\W_]+", words)
    # beside answers named chosen and rejected, these words tell of an answer, not of a win
    judging = (_OF_A_WIN | _OF_A_LOSS) - set(ends_of(answers))
    if judging.isdisjoint(said):
        return 0
    side = [word for word in said if word not in judging | _FILLING]
    lead = _lead_by_word("_".join(side), answers, {}) or 0
    if not (judging & _OF_A_LOSS).isdisjoint(said):
        return -lead
    return lead


def scale_of(values: Sequence[Any], column: str, answers: Answers, is_named: bool) -> Scale:
    """What the values in the column of the verdict mean, by its name, its first values and the
    names of the two answers' columns. `is_named`: a flag names the column, so that of two things
    that it may mean it is the first. `UserError` if it cannot be told."""
    if column in _STRENGTHS:
        return "strength"
    words = {str(value).strip().lower() for value in values if value is not None}
    words = {word for word in words if not _is_tie(word)}
    numeric_verdicts = {verdict for verdict in map(number_in, values) if verdict is not None}
    if words and words <= set(_TRUTHS):
        side = side_named(column, answers)
        if side:
            return "true for the first" if side > 0 else "true for the second"
        if not numeric_verdicts and is_named:
            return "true for the first"
        if not numeric_verdicts:
            raise _unclear(column, answers, "true and false", "true", "false")
    if not numeric_verdicts:
        return "words"
    ends = _numbers_at_ends(answers)
    if numeric_verdicts <= set(ends):
        return "ends"
    has_strengths = not numeric_verdicts <= {-1, 0, 1} or "prefer" in column
    if min(numeric_verdicts) < 0 and has_strengths:
        return "strength"
    first, second = answers
    quoted = ", ".join(f"{verdict:g}" for verdict in sorted(numeric_verdicts)[:5])
    is_clear = is_named or not (ends or column in _UNCLEAR_VERDICTS)
    for (low, high), scale in _TWO_NUMBERS.items():
        if not numeric_verdicts <= {low, high}:
            continue
        if is_clear:
            return scale
        raise _unclear(column, answers, quoted, str(low), str(high))
    raise UserError(
        f"'{column}' holds {quoted}, which do not say whether '{first}' or '{second}' is better;"
        " expected a name, a place (0 and 1, or 1 and 2) or a strength (below 0 the first is"
        f" better, above 0 the second); {OWN_FUNCTION} can read it"
    )


def _unclear(
    column: str, answers: Answers, shown: str, of_first: str, of_second: str
) -> UnclearVerdictError:
    """The error of a verdict of two values, of which either may be for the first answer: `of_first`
    is for the answer that flags then name first."""
    first, second = answers
    readings = [
        (f"if {of_first} is for '{first}'", (first, second, column)),
        (f"if {of_second} is for '{first}'", (second, first, column)),
    ]
    return UnclearVerdictError(
        f"'{column}' holds {shown} beside the answers '{first}' and '{second}'", readings
    )


def lead_of_first(value: Any, column: str, scale: Scale, answers: Answers, row: Row) -> int:
    """1 if a verdict says that the first answer is better, -1 if the second one is, 0 for a tie.
    `UserError` if it says none of these."""
    strength_or_place = number_in(value)
    lead: int | None
    word = str(value).strip().lower()
    if value is None:
        lead = None
    elif scale in ("true for the first", "true for the second") and word in _TRUTHS:
        lead = 1 if _TRUTHS[word] == (scale == "true for the first") else -1
    elif strength_or_place is None:
        lead = _lead_by_word(word.strip("[]"), answers, row)
    elif scale == "strength":
        lead = (strength_or_place < 0) - (strength_or_place > 0)
    else:
        known = {"place from 0": [0.0, 1.0], "place from 1": [1.0, 2.0]}
        places = known.get(scale) or _numbers_at_ends(answers)
        lead = dict(zip(places, (1, -1), strict=False)).get(strength_or_place)
    if lead is None:
        quoted = "null"
        if value is not None:
            quoted = repr(word)
        expected = "0 or 1 (the place)"
        if scale == "place from 1":
            expected = "1 or 2 (the place)"
        elif scale in ("true for the first", "true for the second"):
            expected = f"true or false ({MEANINGS[scale]})"
        raise UserError(
            f"'{column}' is {quoted}; expected {expected}, '{answers[0]}' or"
            f" '{answers[1]}', or tie; {OWN_FUNCTION} can read others"
        )
    return lead


def _is_tie(word: str) -> bool:
    return word.startswith(("tie", "both")) or word in _TIES


def _lead_by_word(word: str, answers: Answers, row: Row) -> int | None:
    """As `lead_of_first` for a word: the name of an answer's column or model, or its end."""
    if _is_tie(word):
        return 0
    ends = ends_of(answers)
    models = [str(row.get(f"model_{end}")).lower() for end in ends]
    is_model = [word == model for model in models]
    if is_model[0] != is_model[1]:
        return 1 if is_model[0] else -1
    names = [[column.lower(), end] for column, end in zip(answers, ends, strict=True)]
    for first, second in (names, (["a", "1st", "first", "left"], ["b", "2nd", "second", "right"])):
        bare = re.sub(_NOUN, "", word)
        if {word, bare} & set(first):
            return 1
        if {word, bare} & set(second):
            return -1
    return None


def lead_by_numbers(row: Row, columns: tuple[str, str]) -> int:
    """As `lead_of_first` where two columns have a number for each answer, such as 1 for the
    winner."""
    scores = list[float]()
    for column in columns:
        value = field_at(row, column)
        score = {"true": 1, "false": 0}.get(str(value).strip().lower(), value)
        scores.append(number_of(score, f"'{column}'"))
    return (scores[0] > scores[1]) - (scores[0] < scores[1])


def say_which(values: Sequence[Any], answers: Answers) -> bool:
    """Whether all values are words that say which of two answers is better, or that none is."""
    words = [value.strip().lower() for value in values if isinstance(value, str)]
    leads = [_lead_by_word(word, answers, {}) for word in words]
    return len(words) == len(values) and None not in leads and bool({1, -1} & set(leads))


def tells_of_a_side(column: str, values: Sequence[Any], answers: Answers) -> bool:
    """Whether a column says that one of two answers is better, by its name and by true or false."""
    words = {str(value).strip().lower() for value in values}
    is_truth = bool(words) and all(word in _TRUTHS or _is_tie(word) for word in words)
    return is_truth and side_named(column, answers) != 0


def lead_by_names(column: str, value: Any, answers: Answers) -> int | None:
    """As `lead_of_first` where a value is the name of an answer's column (`winner: "chosen"`), the
    number at its end (`choice: 1` beside `answer_1`), or true or false in a
    column whose name tells of an answer (`is_chosen_better`); None of others."""
    word = str(value).strip().lower()
    names = [answer.lower() for answer in answers]
    if word in names:
        return 1 if word == names[0] else -1
    ends = _numbers_at_ends(answers)
    if column in _UNCLEAR_VERDICTS and ends and number_in(value) in ends:
        return 1 if number_in(value) == ends[0] else -1
    side = side_named(column, answers)
    if side and word in _TRUTHS:
        return side if _TRUTHS[word] else -side
    if _is_tie(word) and (side or column in CLEAR_VERDICTS):
        return 0
    return None


def may_be_verdicts(column: str, values: Sequence[Any]) -> bool:
    """Whether a column is named like a verdict and holds numbers, words or booleans."""
    is_named = re.search(
        "prefer|better|best|winner|winning|verdict|judg|choice|chosen|label|vote",
        column,
    )
    short = [
        isinstance(value, bool)
        or number_in(value) is not None
        or (isinstance(value, str) and len(value) <= 40)
        for value in values
    ]
    return is_named is not None and bool(short) and all(short)
