"""What a message advises where no form reads the columns of a data set, or not for a step. Column
flags alone are no advice beside a verdict: they would train half of the pairs upside down.
`readings.py` tries the flags on the rows before a message names them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, permutations
from typing import Any, NamedTuple

from dschat_ppo.config.data_flags import Use
from dschat_ppo.data.cells import LABELS
from dschat_ppo.data.examples import Row, json_value
from dschat_ppo.data.form_kinds import SETS
from dschat_ppo.data.judged_readers import TEXTS
from dschat_ppo.data.messages import (
    looks_like_messages,
)
from dschat_ppo.data.uses import further_uses
from dschat_ppo.data.verdicts import (
    CLEAR_VERDICTS,
    NUMBERS,
    OWN_FUNCTION,
    SIDES,
    may_be_verdicts,
    number_in,
    say_which,
    tells_of_a_side,
)

_NAME_THEM = (
    "name them with --prompt_column, --response_column, --chosen_column, --rejected_column,"
    " --messages_column, --label_column"
)
FOR_STEP_3 = (
    "rows of prompts alone are for step 3 (--response_column names the column of a response if"
    " there is one)"
)
_NO_ANSWERS = ("model", "winner", "winner_model")  # stems of names that stand for no answers
# Words of the names of two columns of which the first holds the better answers
_BETTER_AND_WORSE = (
    ("chosen", "rejected"),
    ("better", "worse"),
    ("good", "bad"),
    ("best", "worst"),
    ("positive", "negative"),
    ("pos", "neg"),
    ("preferred", "dispreferred"),
    ("preferred", "non_preferred"),
    ("preferred", "rejected"),
    ("accepted", "rejected"),
    ("winning", "losing"),
    ("winner", "loser"),
    ("win", "lose"),
)
_ANSWER_WORDS = re.compile(
    r"response|answer|output|completion|generation|summary|reply|text|option|candidate|caption"
    r"|conversation|translation"
)
_MOST_SCORES = 3  # pairs of columns with scores that a message names
_PAIR = "prompt chosen rejected"  # columns that are no sign of one data set


class Choice(NamedTuple):
    """Flags that read the rows rightly if a condition holds, of which only their owner knows."""

    condition: str  # half of a sentence
    flags: dict[str, str]


@dataclass(frozen=True)
class Advice:
    """Ways out. `sets`: the data sets of DeepSpeed-Chat that have these columns; `spaced_sets`:
    those of ordinary pairs that put a space before an answer."""

    sets: tuple[str, ...] = ()
    spaced_sets: tuple[str, ...] = ()
    pairs: tuple[Choice, ...] = ()  # two answers, and which one is better
    verdict: str = ""  # the column that seems to say it
    labels: tuple[Choice, ...] = ()  # the label of single answers
    singles: tuple[Choice, ...] = ()  # a prompt and its answer
    # of a use that a feature adds, of which the name of a column tells
    further_way: str = ""

    def choices_for(self, use: Use | None) -> tuple[Choice, ...]:
        """Flags for a use (None: for any), unless a data set of DeepSpeed-Chat says more."""
        if self._sets_for(use):
            return ()
        if use == "unpaired":
            return self.labels + self.pairs
        if use in ("preference", None):
            return self.pairs
        return ()

    def for_use(self, use: Use) -> str:
        """What makes rows that serve a use, where no flags have been tried that do."""
        if use in further_uses():
            return further_uses()[use].way
        known = self._sets_for(use)
        if known:
            return as_known_set(known)
        if use == "unpaired" and not self.pairs:
            return (
                "--label_column names a column that says whether an answer is good (true or false,"
                " 1 or 0, good or bad); a function that makes rows with such a label (--data_format"
                " FILE.py:FUNCTION) can read others"
            )
        return self._by_names

    def _sets_for(self, use: Use | None) -> tuple[str, ...]:
        """The data sets of DeepSpeed-Chat that serve a use."""
        if use in ("preference", "unpaired"):
            return tuple(name for name in self.sets if SETS[name].rejected is not None)
        return self.sets

    @property
    def all_choices(self) -> tuple[Choice, ...]:
        """Flags for columns that no form has."""
        if self.sets:
            return ()
        return self.pairs + self.labels + self.singles

    @property
    def columns_of_answers(self) -> set[str]:
        """The columns that hold two answers."""
        columns = set[str]()
        for choice in self.pairs:
            for flag in ("chosen_column", "rejected_column"):
                columns.add(choice.flags[flag].split(".")[0])
        return columns

    @property
    def for_any(self) -> str:
        """For columns that no form has."""
        if self.sets:
            return as_known_set(self.sets)
        return self.further_way or self._by_names

    @property
    def _by_names(self) -> str:
        """The flags that name columns, where the columns themselves say too little."""
        if self.pairs:
            return f"{OWN_FUNCTION} can read them"
        if self.verdict:
            return (
                f"if '{self.verdict}' says which of two answers is better, name them with"
                f" --chosen_column and --rejected_column, and --better_column {self.verdict}"
            )
        return _NAME_THEM


def choices_in_words(choices: Sequence[Choice]) -> str:
    """The choices in a message."""
    return "; ".join(f"{choice.condition}: {named_flags(choice.flags)}" for choice in choices)


def named_flags(flags: dict[str, Any]) -> str:
    """Flags as a command line has them."""
    words = list[str]()
    for name, value in flags.items():
        words.append(f"--{name}")
        if isinstance(value, list):
            words += value
        else:
            words.append(str(value))
    return " ".join(words)


def as_known_set(sets: tuple[str, ...]) -> str:
    """The flag that reads rows as one of these data sets."""
    return f"--data_format {' or '.join(sets)} reads them as DeepSpeed-Chat reads that data set"


def advice_for(columns: list[str], rows: list[Row]) -> Advice:
    """What these columns and first rows may be."""
    known = [name for name, one in SETS.items() if set(one.columns.split()) <= set(columns)]
    sets = tuple(name for name in known if SETS[name].columns != _PAIR)
    labels = {str(row.get("label")).strip().lower() for row in rows}
    if labels <= set(LABELS):  # and no answers
        sets = tuple(name for name in sets if SETS[name].columns != "prompt label")
    spaced: tuple[str, ...] = ()
    if all(isinstance(row.get(column), str) for row in rows for column in _PAIR.split()):
        spaced = tuple(name for name in known if SETS[name].chosen == " {chosen}")
    pairs, verdict = _of_pairs(columns, rows)
    return Advice(
        sets,
        spaced,
        pairs,
        verdict,
        labels=_of_labels(columns, rows),
        singles=_of_singles(columns, rows),
        further_way=next((use.way for use in further_uses().values() if use.column in columns), ""),
    )


def _of_pairs(columns: list[str], rows: list[Row]) -> tuple[tuple[Choice, ...], str]:
    """(the flags for two answers and a verdict, or for a list of answers; the column that seems to
    be the verdict, or "")."""
    named = _named_better_and_worse(columns, rows)
    answers = named or _two_answers(columns, rows) or _two_of_list(columns, rows)
    verdicts = [",".join(pair) for pair in NUMBERS if set(pair) <= set(columns)]
    for column in columns:
        values = [row[column] for row in rows if row.get(column) is not None]
        if column in (answers or ()):
            continue
        if answers is not None and (
            say_which(values, answers) or tells_of_a_side(column, values, answers)
        ):
            verdicts.append(column)
        elif column in CLEAR_VERDICTS or (answers is not None and named is None):
            if may_be_verdicts(column, values):
                verdicts.append(column)
    verdict = next(iter(verdicts), "")
    if answers is None:
        return (), verdict
    first, second = answers
    flags = {"chosen_column": first, "rejected_column": second}
    choices = [
        Choice(f"if '{each}' says which answer is better", {**flags, "better_column": each})
        for each in verdicts
    ]
    if not choices and named is None:
        for score_columns in islice(_numbers_of_answers(columns, rows, answers), _MOST_SCORES):
            condition = (
                f"if the larger of {' and '.join(map(repr, score_columns))} is the better answer's"
            )
            choices.append(Choice(condition, {**flags, "better_column": ",".join(score_columns)}))
        for column in _with_signs(columns, rows):
            signed = {**flags, "better_column": column}
            turned = {**signed, "chosen_column": second, "rejected_column": first}
            choices.append(Choice(f"if '{column}' is below 0 where '{first}' is better", signed))
            choices.append(Choice(f"if '{column}' is above 0 where '{first}' is better", turned))
    if not choices:
        choices.append(Choice(f"if '{first}' is always the better answer", flags))
    return tuple(choices), verdict


def _numbers_of_answers(
    columns: list[str], rows: list[Row], answers: tuple[str, str]
) -> Iterator[tuple[str, str]]:
    """Pairs of columns with a number for each of two answers, whose names end as those of the
    answers: `helpfulness_A` and `helpfulness_B`."""
    for first_end, second_end in SIDES:
        if not (answers[0].endswith(first_end) and answers[1].endswith(second_end)):
            continue
        for first in columns:
            pair = (first, first.removesuffix(first_end) + second_end)
            values = [row.get(column) for row in rows for column in pair]
            if pair[0] != pair[1] and pair[1] in columns and None not in map(number_in, values):
                yield pair
        return


def _with_signs(columns: list[str], rows: list[Row]) -> Iterator[str]:
    """The columns that may say by how much one of two answers is better: their names tell of a
    difference, or they have numbers below and above 0."""
    for column in columns:
        values = [row[column] for row in rows if row.get(column) is not None]
        leads = [lead for lead in map(number_in, values) if lead is not None]
        if not leads or len(leads) < len(values):
            continue
        is_named = re.search(
            r"(^|_)(margin|diff|difference|gap|delta|strength|lead)s?($|_)", column
        )
        if is_named or min(leads) < 0 < max(leads):
            yield column


def _named_better_and_worse(columns: list[str], rows: list[Row]) -> tuple[str, str] | None:
    """Two columns whose names say that one has the better answers: `good_answer`, `bad_answer`."""
    for better, worse in _BETTER_AND_WORSE:
        for first, second in permutations(columns, 2):
            is_word = re.search(rf"(^|_){better}(_|$)", first.lower())
            is_other = first.lower().replace(better, worse, 1) == second.lower()
            is_form = first == "chosen"  # which needs no flags
            if is_word and is_other and not is_form and _hold_answers(rows, first, second):
                return first, second
    return None


def _two_answers(columns: list[str], rows: list[Row]) -> tuple[str, str] | None:
    """Two columns of texts or messages whose names differ in their ends: `a` and `b`, or if names
    tell of answers any letter, number or word."""
    for first, second in permutations(columns, 2):
        for first_end, second_end in SIDES:
            stem = first.removesuffix(first_end)
            has_ends = first == stem + first_end and second == stem + second_end
            if has_ends and stem not in _NO_ANSWERS and _hold_answers(rows, first, second):
                return first, second
    stems = dict[str, list[str]]()
    for column in columns:
        stem, _, end = column.rpartition("_")
        if end and _ANSWER_WORDS.search(stem.lower()) and _hold_answers(rows, column, column):
            stems.setdefault(stem, []).append(column)
    for of_stem in stems.values():
        if len(of_stem) == 2:
            return of_stem[0], of_stem[1]
    return None


def _hold_answers(rows: list[Row], first: str, second: str) -> bool:
    """Whether two columns hold texts or lists in all rows."""
    values = [row.get(column) for row in rows for column in (first, second)]
    return bool(values) and all(isinstance(value, str | list) for value in values)


def _two_of_list(columns: list[str], rows: list[Row]) -> tuple[str, str] | None:
    """The first answer of a list of texts, or of objects with a text, and the second one, or all
    others if most lists have more. Messages of a conversation are no answers."""
    of_further_uses = {use.column for use in further_uses().values()}
    for column in columns:
        lists = [json_value(row.get(column)) for row in rows]
        is_list = all(isinstance(one, list) for one in lists)
        if column in of_further_uses or not is_list or any(map(looks_like_messages, lists)):
            continue
        entries = [entry for one in lists for entry in one]
        if entries and all(isinstance(entry, str) for entry in entries):
            lengths = [len(one) for one in lists]
            usual = max(lengths, key=lengths.count)
            if usual > 1:
                return f"{column}.0", f"{column}.1" if usual == 2 else f"{column}.1:"
        for key in TEXTS:
            if entries and all(isinstance(entry, dict) and key in entry for entry in entries):
                return f"{column}.0.{key}", f"{column}.1.{key}"
    return None


def _of_singles(columns: list[str], rows: list[Row]) -> tuple[Choice, ...]:
    """The flags for a prompt and its answer, if two columns alone hold texts of several words."""
    texts = list[str]()
    for column in columns:
        values = [str(row.get(column) or "").strip() for row in rows]
        is_text = any(isinstance(row.get(column), str) for row in rows)
        if is_text and 2 * sum(" " in value for value in values) >= len(values):
            texts.append(column)
    if len(texts) != 2:
        return ()
    prompt, answer = texts
    flags = {"prompt_column": prompt, "response_column": answer}
    return (Choice(f"if '{answer}' is the answer to '{prompt}'", flags),)


def _of_labels(columns: list[str], rows: list[Row]) -> tuple[Choice, ...]:
    """The flag for the columns whose values may say whether an answer is good."""
    return tuple(
        Choice(f"if '{column}' says whether an answer is good", {"label_column": column})
        for column in _with_labels(columns, rows)
    )


def _with_labels(columns: list[str], rows: list[Row]) -> Iterator[str]:
    for column in columns:
        values = {str(row.get(column)).strip().lower() for row in rows} - {"none"}
        if values and values <= set(LABELS):
            yield column
