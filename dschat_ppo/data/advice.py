"""What a message advises where no form reads the columns of a data set, or not for a step. Column
flags alone are no advice beside a verdict: they would train half of the pairs upside down."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from dschat_ppo.config.data_flags import Use
from dschat_ppo.data.cells import LABELS
from dschat_ppo.data.examples import Row, json_value, looks_like_messages
from dschat_ppo.data.form_kinds import SETS
from dschat_ppo.data.judged_readers import TEXTS
from dschat_ppo.data.verdicts import CLEAR_VERDICTS, NUMBERS, SIDES, may_be_verdicts

NAME_THEM = (
    "name them with --prompt_column, --response_column, --chosen_column, --rejected_column,"
    " --messages_column, --label_column"
)
_OF_STEPS = (
    "name them with --prompt_column, --response_column (a list of steps) and --label_column (a list"
    " of labels, or the number of the first wrong step)"
)
_NO_ANSWERS = ("model", "winner", "winner_model")  # stems of names that stand for no answers
_PROMPTS = {"prompt", "question", "query", "context", "instruction", "input"}


_PAIR = "prompt chosen rejected"  # columns that are no sign of one data set


@dataclass(frozen=True)
class Advice:
    """Ways out, each a half of a sentence or "". `sets`: the data sets of DeepSpeed-Chat that have
    these columns; `spaced_sets`: those of ordinary pairs that put a space before an answer."""

    sets: tuple[str, ...] = ()
    spaced_sets: tuple[str, ...] = ()
    pairs: str = ""  # two answers, and which one is better
    labels: str = ""  # the label of single answers
    has_steps: bool = False

    def for_use(self, use: Use) -> str:
        """What makes rows that serve a use."""
        if use == "steps":
            return _OF_STEPS
        known = self.sets
        if use in ("preference", "unpaired"):
            known = tuple(name for name in self.sets if SETS[name].rejected is not None)
        if known:
            return as_known_set(known)
        if use == "unpaired" and self.labels:
            return self.labels
        if use in ("preference", "unpaired") and self.pairs:
            return self.pairs
        return NAME_THEM

    @property
    def for_any(self) -> str:
        """For columns that no form has."""
        if self.sets:
            return as_known_set(self.sets)
        if self.has_steps:
            return _OF_STEPS
        return self.pairs or NAME_THEM


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
    return Advice(
        sets,
        spaced,
        pairs=_of_pairs(columns, rows),
        labels=_of_labels(columns, rows),
        has_steps="steps" in columns,
    )


def _of_pairs(columns: list[str], rows: list[Row]) -> str:
    """The flags for two answers and a verdict, or for a list of answers."""
    answers = _two_answers(columns, rows) or _two_of_list(columns, rows)
    verdicts = []
    for column in columns:
        values = [row[column] for row in rows if row.get(column) is not None]
        is_known = answers is not None or column in CLEAR_VERDICTS
        if is_known and column not in (answers or ()) and may_be_verdicts(column, values):
            verdicts.append(column)
    of_numbers = [",".join(pair) for pair in NUMBERS if set(pair) <= set(columns)]
    verdict = next(iter(of_numbers or verdicts), None)
    first, second = answers or ("FIRST", "SECOND")
    has_prompt = bool(_PROMPTS & set(columns)) or any(
        looks_like_messages(row.get(first)) for row in rows
    )
    prompt = "" if has_prompt else "--prompt_column PROMPT "
    flags = f"{prompt}--chosen_column {first} --rejected_column {second}"
    if verdict is not None:
        return f"if '{verdict}' says which answer is better: {flags} --better_column {verdict}"
    if answers is None:
        return ""
    return (
        f"if '{first}' is always the better answer: {flags}; if a column says which one is better:"
        " these flags and --better_column COLUMN"
    )


def _two_answers(columns: list[str], rows: list[Row]) -> tuple[str, str] | None:
    """Two columns of texts or messages whose names differ in their ends."""
    for first, second in product(columns, columns):
        for first_end, second_end in SIDES:
            stem = first.removesuffix(first_end)
            has_ends = first == stem + first_end and second == stem + second_end
            is_pair = has_ends and stem not in _NO_ANSWERS
            values = [row.get(column) for row in rows for column in (first, second)]
            if is_pair and all(isinstance(value, str | list) for value in values):
                return first, second
    return None


def _two_of_list(columns: list[str], rows: list[Row]) -> tuple[str, str] | None:
    """The first answer of a list of texts, or of objects with a text, and the second one, or all
    others if most lists have more."""
    for column in columns:
        lists = [json_value(row.get(column)) for row in rows]
        if column == "steps" or not all(isinstance(one, list) for one in lists):
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


def _of_labels(columns: list[str], rows: list[Row]) -> str:
    """The flag for a column whose values may say whether an answer is good."""
    for column in columns:
        values = {str(row.get(column)).strip().lower() for row in rows} - {"none"}
        if values and values <= set(LABELS):
            return (
                f"if '{column}' says whether an answer is good, --label_column {column} (any column"
                " of true and false, good and bad, ...)"
            )
    return ""
