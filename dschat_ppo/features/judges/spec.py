"""`--judge SPEC`: what it says of a judge."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import parse_qsl

from dschat_ppo.config.ppo_flags import split_weight
from dschat_ppo.errors import UserError, printable_line

FLAG = "--judge"
EVALUATION_FLAG = "--eval_judge"
READABLE = ("final", "spoken", "thoughts", "episode")  # texts of a response
PAIRS = "pairs"  # `compare`: with others of the group
REFERENCE = "reference"  # `compare`: with the right answer
TEXT = "text"  # `reads`: the judge writes
LABELS = "labels"  # `reads`: the probabilities of its labels
_PLACES = ("A", "B")  # the verdicts on a pair
_DEFAULTS = {
    "labels": "no,yes",
    "template": "",
    "answer": "final",
    "rubric": "",
    "compare": "",
    "rivals": "",
    "reads": LABELS,
    "max_tokens": "512",
    "temperature": "0",
    "model": "",
}
_RANGE = re.compile(r"(\d{1,3})\.\.(\d{1,3})")


@dataclass(frozen=True)
class JudgeSpec:
    """One `--judge`: a model with its weight, route and settings."""

    model: str  # folder, hub name or address
    weight: float
    sources: tuple[str, ...]  # data sources whose rows it scores; (): all
    labels: tuple[str, ...]  # its verdicts, worst to best
    template: str  # a built-in or a file; "": that for rows with or without a right answer
    answer: str  # the text of a response that it reads, of `READABLE`
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
    """Read `[SOURCE=]NAME[?key=value&key=value][:weight]`, percent-decoded as the settings of
    reward functions. `UserError` names the `flag` and what is wrong."""
    as_given = printable_line(f"{flag} {text}")
    sources, unrouted = _route_of_judge(text, as_given)
    model, mark, query = unrouted.partition("?")
    if mark:
        query, weight = split_weight(query)
    else:
        model, weight = split_weight(model)
    if not math.isfinite(weight):
        raise UserError(f"{as_given}: the weight must be finite, got {weight}")
    if not model:
        raise UserError(
            f"{as_given}: expected the folder or hub name of a language model, or an address"
        )
    settings = _parsed_settings(query, as_given)
    is_address = model.startswith(("http://", "https://"))
    if is_address:
        _check_address(model, as_given)
    elif settings["model"]:
        raise UserError(f"{as_given}: model is for a judge at an address; omit it")
    _check_reading(settings, as_given)
    if settings["answer"] not in READABLE:
        raise UserError(
            f"{as_given}: answer={settings['answer']}: expected one of {', '.join(READABLE)}"
        )
    labels = _labels_of(settings["labels"], as_given)
    if settings["compare"]:
        _check_comparison(settings, query, as_given)
        labels = _PLACES
    elif settings["rivals"]:
        raise UserError(f"{as_given}: rivals is for compare={PAIRS}; omit it")
    if is_address and settings["reads"] == LABELS:
        _check_first_tokens(labels, as_given)
    return JudgeSpec(
        model=model,
        weight=weight,
        sources=sources,
        labels=labels,
        template=settings["template"],
        answer=settings["answer"],
        rubric=settings["rubric"],
        compare=settings["compare"],
        rivals=int(settings["rivals"] or 0),
        reads=settings["reads"],
        max_tokens=int(settings["max_tokens"]),
        temperature=float(settings["temperature"]),
        served_model=settings["model"],
        flag=flag,
    )


def _check_comparison(settings: dict[str, str], query: str, as_given: str) -> None:
    """Refuse settings that do not fit `compare`."""
    compare = settings["compare"]
    rivals = settings["rivals"]
    if compare not in (PAIRS, REFERENCE):
        raise UserError(f"{as_given}: compare={compare}: expected {PAIRS} or {REFERENCE}")
    if settings["rubric"]:
        raise UserError(f"{as_given}: rubric and compare={compare} exclude each other; omit one")
    if "labels" in dict(parse_qsl(query)):
        raise UserError(f"{as_given}: the verdicts of compare={compare} are A and B; omit labels")
    if rivals and compare != PAIRS:
        raise UserError(f"{as_given}: rivals is for compare={PAIRS}; omit it")
    if rivals and (not rivals.isdecimal() or int(rivals) < 1):
        raise UserError(f"{as_given}: rivals={rivals}: expected a number from 1")


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


def _route_of_judge(text: str, as_given: str) -> tuple[tuple[str, ...], str]:
    """`"math,gsm8k=judge"` -> (("math", "gsm8k"), "judge"); the name of a folder that contains `=`
    is no route."""
    head = text.partition("?")[0]
    names, mark, _ = head.partition("=")
    if not mark or os.path.isdir(split_weight(head)[0]):
        return (), text
    sources = tuple(dict.fromkeys(name.strip() for name in names.split(",")))
    if not all(sources):
        raise UserError(
            f"{as_given}: expected a data source before '=', or several separated by commas"
        )
    return sources, text[len(names) + 1 :]


def _parsed_settings(query: str, as_given: str) -> dict[str, str]:
    """The settings after the `?`, with defaults for those that are not given."""
    pairs = parse_qsl(query.replace("+", "%2B"), keep_blank_values=True)
    settings = dict(pairs)
    if len(settings) < len(pairs):
        raise UserError(f"{as_given}: a setting is given twice")
    for name, value in settings.items():
        if name not in _DEFAULTS:
            raise UserError(
                f"{as_given}: there is no setting '{name}'; there are: {', '.join(_DEFAULTS)}"
            )
        if not value:
            raise UserError(f"{as_given}: the setting '{name}' is empty")
    return _DEFAULTS | settings


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


def _check_address(address: str, as_given: str) -> None:
    """Refuse an address that is none, or holds a key."""
    if not address.endswith("/v1"):
        raise UserError(
            f"{as_given}: end the address with /v1 (what follows the last colon is read as a"
            " weight)"
        )
    if "@" in address:
        raise UserError(
            f"{FLAG}: put the key of the address into the variable DSCHAT_PPO_JUDGE_KEY, not into"
            " the address"
        )


def _check_reading(settings: dict[str, str], as_given: str) -> None:
    """Refuse wrong values of `reads` and of the settings of a text."""
    if settings["reads"] not in (LABELS, TEXT):
        raise UserError(f"{as_given}: reads={settings['reads']}: expected {LABELS} or {TEXT}")
    for name in ("max_tokens", "temperature"):
        if settings["reads"] == LABELS and settings[name] != _DEFAULTS[name]:
            raise UserError(f"{as_given}: {name} is for reads={TEXT}; omit it")
    most = settings["max_tokens"]
    if not most.isdecimal() or int(most) < 1:
        raise UserError(f"{as_given}: max_tokens={most}: expected a number from 1")
    temperature = math.nan
    with suppress(ValueError):
        temperature = float(settings["temperature"])
    if not 0 <= temperature < math.inf:
        raise UserError(
            f"{as_given}: temperature={settings['temperature']}: expected a number from 0"
        )


def _check_first_tokens(labels: Sequence[str], as_given: str) -> None:
    """Refuse labels that the first token of a verdict may not tell apart."""
    for label in labels:
        for longer in labels:
            if longer == label or not longer.startswith(label):
                continue
            raise UserError(
                f"{as_given}: label '{label}' begins '{longer}', which one token cannot tell apart;"
                f" use other labels, such as 1..9, or reads={TEXT}"
            )
