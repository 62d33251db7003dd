"""`--judge SPEC`: what it says of a judge."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import permutations

from dschat_ppo.config.ppo_flags import split_weight
from dschat_ppo.config.source_text import SourceText, parse_source_text
from dschat_ppo.errors import UserError, printable_line
from dschat_ppo.rewards.call_forms import TEXTS

FLAG = "--judge"
EVALUATION_FLAG = "--eval_judge"
PAIRS = "pairs"  # `compare`: with others of the group
REFERENCE = "reference"  # `compare`: with the right answer
TEXT = "text"  # `reads`: the judge writes
LABELS = "labels"  # `reads`: the probabilities of its labels
_VERDICTS_OF_PAIR = ("A", "B")
_DEFAULTS = {
    "labels": "no,yes",
    "template": "",
    "answer": "final",
    "rubric": "",
    "compare": "",
    "rivals": "0",
    "reads": LABELS,
    "max_tokens": "512",
    "temperature": "0",
    "model": "",
}
_VALUES = {"answer": TEXTS, "reads": (LABELS, TEXT), "compare": ("", PAIRS, REFERENCE)}
_RANGE = re.compile(r"(\d{1,3})\.\.(\d{1,3})")


@dataclass(frozen=True)
class JudgeSpec:
    """One `--judge`: a model with its weight, route and settings."""

    model: str  # folder, hub name or address
    weight: float
    sources: tuple[str, ...]  # data sources whose rows it scores; (): all
    labels: tuple[str, ...]  # its verdicts, worst to best
    template: str  # a built-in or a file; "": that for rows with or without a right answer
    answer: str  # the text of a response that it reads, of `TEXTS`
    rubric: str = ""  # column of criteria; "": one question
    compare: str = ""  # `PAIRS` or `REFERENCE`; "": each response alone
    rivals: int = 0  # of a response, with `PAIRS`; 0: all others of its group
    reads: str = LABELS  # or `TEXT`
    max_tokens: int = 512  # of a text
    temperature: float = 0.0  # of a text
    served_model: str = ""  # at an address: which one; "": the only one
    flag: str = FLAG  # that named it

    def __str__(self) -> str:
        route = ""
        if self.sources:
            route = ",".join(self.sources) + "="
        return printable_line(f"{self.flag} {route}{self.model}")

    @property
    def is_address(self) -> bool:
        """Whether the judge is at an address, and not a model of the run."""
        return self.model.startswith(("http://", "https://"))

    @property
    def values(self) -> list[float]:
        """The score of each label, evenly from 0 to 1."""
        return [index / (len(self.labels) - 1) for index in range(len(self.labels))]


def parse_judge(text: str, flag: str = FLAG) -> JudgeSpec:
    """Read `[SOURCE=]NAME[?key=value&key=value][:weight]`. `UserError` names the `flag` and what is
    wrong."""
    as_given = printable_line(f"{flag} {text}")
    source = parse_source_text(text, as_given, _is_model)
    settings = _known_settings(dict(source.settings), as_given)
    spec = JudgeSpec(
        model=source.name,
        weight=source.weight,
        sources=source.sources,
        labels=_labels_of(settings["labels"], as_given),
        template=settings["template"],
        answer=settings["answer"],
        rubric=settings["rubric"],
        compare=settings["compare"],
        rivals=int(settings["rivals"]),
        reads=settings["reads"],
        max_tokens=int(settings["max_tokens"]),
        temperature=float(settings["temperature"]),
        served_model=settings["model"],
        flag=flag,
    )
    _check_judge_model(spec, as_given)
    _check_settings_fit(spec, source, as_given)
    if spec.compare:
        spec = replace(spec, labels=_VERDICTS_OF_PAIR)
    if spec.is_address and spec.reads == LABELS:
        _check_first_tokens(spec.labels, as_given)
    return spec


def parse_judges(texts: Sequence[str]) -> list[JudgeSpec]:
    """The judges of `--judge`."""
    return [parse_judge(text) for text in texts]


def parse_evaluation_judges(texts: Sequence[str]) -> list[JudgeSpec]:
    """The judges of `--eval_judge`, which read all held-out prompts."""
    specs = [parse_judge(text, EVALUATION_FLAG) for text in texts]
    for spec, text in zip(specs, texts, strict=True):
        if spec.sources:
            raise UserError(f"{EVALUATION_FLAG} {text}: it judges all prompts; omit the route")
    return specs


def _is_model(head: str) -> bool:
    """Whether the text before the settings is an address, or a folder that is there."""
    return head.startswith(("http://", "https://")) or os.path.isdir(split_weight(head)[0])


def _known_settings(given: dict[str, str], as_given: str) -> dict[str, str]:
    """The settings, with defaults for those that are not given. Each value is possible by
    itself."""
    for name, value in given.items():
        if name not in _DEFAULTS:
            raise UserError(
                f"{as_given}: there is no setting '{name}'; there are: {', '.join(_DEFAULTS)}"
            )
        if not value:
            raise UserError(f"{as_given}: the setting '{name}' is empty")
        if name in _VALUES and value not in _VALUES[name]:
            expected = ", ".join(filter(None, _VALUES[name]))
            raise UserError(f"{as_given}: {name}={value}: expected one of {expected}")
        is_count = value.isdecimal() and int(value) >= 1
        if name in ("rivals", "max_tokens") and not is_count:
            raise UserError(f"{as_given}: {name}={value}: expected a number from 1")
    settings = _DEFAULTS | given
    temperature = math.nan
    with suppress(ValueError):
        temperature = float(settings["temperature"])
    if not 0 <= temperature < math.inf:
        raise UserError(
            f"{as_given}: temperature={settings['temperature']}: expected a number from 0"
        )
    return settings


def _labels_of(text: str, as_given: str) -> tuple[str, ...]:
    """`"bad,good"` or `"1..10"` -> the labels."""
    labels = [label.strip() for label in text.split(",")]
    span = _RANGE.fullmatch(text.strip())
    if span is not None:
        labels = [str(label) for label in range(int(span[1]), int(span[2]) + 1)]
    if len(labels) < 2:
        raise UserError(
            f"{as_given}: labels={text}: expected two labels or more, worst to best, such as"
            " no,yes or 1..10"
        )
    if not all(labels):
        raise UserError(f"{as_given}: labels={text}: a label is empty")
    for label in labels:
        if labels.count(label) > 1:
            raise UserError(f"{as_given}: labels={text}: the label '{label}' is given twice")
    return tuple(labels)


def _check_judge_model(spec: JudgeSpec, as_given: str) -> None:
    """Refuse a missing name, and an address that is none or holds a key."""
    if not spec.model:
        raise UserError(
            f"{as_given}: expected the folder or hub name of a language model, or an address"
        )
    if spec.is_address and not spec.model.endswith("/v1"):
        raise UserError(
            f"{as_given}: end the address with /v1 (what follows the last colon is read as a"
            " weight)"
        )
    if spec.is_address and "@" in spec.model:
        raise UserError(
            f"{spec.flag}: put the key of the address into the variable DSCHAT_PPO_JUDGE_KEY, not"
            " into the address"
        )


def _check_settings_fit(spec: JudgeSpec, source: SourceText, as_given: str) -> None:
    """Refuse settings without effect, or that exclude each other."""
    given = dict(source.settings)
    if spec.compare and spec.rubric:
        raise UserError(
            f"{as_given}: rubric and compare={spec.compare} exclude each other; omit one"
        )
    if spec.compare and "labels" in given:
        raise UserError(
            f"{as_given}: the verdicts of compare={spec.compare} are A and B; omit labels"
        )
    for name, is_used, purpose in (
        ("model", spec.is_address, "a judge at an address"),
        ("rivals", spec.compare == PAIRS, f"compare={PAIRS}"),
        ("max_tokens", spec.reads == TEXT, f"reads={TEXT}"),
        ("temperature", spec.reads == TEXT, f"reads={TEXT}"),
    ):
        if name in given and not is_used:
            raise UserError(f"{as_given}: {name} is for {purpose}; omit it")


def _check_first_tokens(labels: Sequence[str], as_given: str) -> None:
    """Refuse labels that the first token of a verdict does not tell apart: one begins another, or
    both begin with the same word."""
    way_out = f"which one token cannot tell apart; use labels=1..9 or reads={TEXT}"
    for label, other in permutations(labels, 2):
        if other.startswith(label):
            raise UserError(f"{as_given}: label '{label}' begins '{other}', {way_out}")
        if label.split()[0] == other.split()[0]:
            raise UserError(
                f"{as_given}: labels '{label}' and '{other}' begin with the same word, {way_out}"
            )
