"""The forms in which people write reward functions: which one a function has, what it is called
with, and what it may return: a score, None, or a dict with `score` and other numbers; for a batch,
a list of these, or OpenRLHF's dict of lists. Worker processes import this module, so it imports no
large library.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, NamedTuple, SupportsFloat

from dschat_ppo.data.examples import ADDED, MESSAGES

LOGGERS = ("log_extra", "log_metric")  # callables that TRL passes; the worker provides them
NO_NUMBER = "returned a value that is not a number"
LARGEST = (2 - 2**-23) * 2.0**127  # of fp32
_LONGEST_NAME = 64


@dataclass(frozen=True)
class ResponseText:
    """One response, as the texts that a reward may read."""

    spoken: str  # all that the model wrote, its thoughts too; its turns are joined by line breaks
    final: str  # its last message without thoughts and calls; "" if that ends inside a thought
    thoughts: str
    episode: str  # everything, with observations
    turns: list[dict[str, Any]]  # the parts, as in samples
    messages: list[dict[str, Any]] | None = None  # of an episode

    @classmethod
    def of(cls, text: str, final: str | None = None, thoughts: str = "") -> ResponseText:
        """A response of one turn; without `final` it has no thoughts."""
        if final is None:
            final = text
        return cls(text, final, thoughts, text, [{"role": "model", "text": text}])


@dataclass(frozen=True)
class MadeByWorker:
    """A large value, which the worker makes: what a function returns."""

    module: str
    function: str
    arguments: tuple[str, ...]

    def make(self) -> Any:
        """Call the function."""
        return getattr(import_module(self.module), self.function)(*self.arguments)


def with_made(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call, with what the worker makes of values, and of those in lists. Equal
    ones are made once."""
    results: dict[MadeByWorker, Any] = {}

    def of(value: Any) -> Any:
        if not isinstance(value, MadeByWorker):
            return value
        if value not in results:
            results[value] = value.make()
        return results[value]

    values = dict[str, Any]()
    for name, value in arguments.items():
        values[name] = of(value)
        if type(value) is list:
            values[name] = list(map(of, value))
    return values


GROUP_ARGUMENTS = ("groups", "num_generations")  # mark a group function, in each batch form
TEXTS = ("final", "spoken", "thoughts", "episode")  # values of the setting `text`
_READABLE = (*TEXTS, "turns")  # arguments of these names, if no column has the name


@dataclass(frozen=True)
class ResponseToScore:
    """One response to score; `row`: columns of its data row; `token_ids`: to its end, if the
    function takes them."""

    prompt: str
    response: str  # the text that the function reads
    row: dict[str, Any]
    texts: ResponseText
    is_text: bool = False  # the function asked for a text, in place of messages
    group: int = 0  # equal for the responses to one prompt of the request
    token_ids: list[int] = field(default_factory=list)
    # of features, by the names of arguments, in place of columns; only functions that name them
    # get them
    further: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class CallForm:
    """How functions of one form are called."""

    description: str
    per_row: bool  # gets single values and returns one score, rather than lists and a list
    marks: tuple[str, ...]  # parameter names that only functions of this form have
    # argument -> its value for a response; they take precedence over columns
    texts: dict[str, Callable[[ResponseToScore], Any]]
    # argument -> the column that it is, if it is named otherwise
    columns: dict[str, str] = field(default_factory=dict)
    of_call: tuple[str, ...] = ()  # arguments with one value for a call
    # what `**kwargs` does not receive, besides what data preparation adds to rows
    hidden: tuple[str, ...] = ()
    only_needed: bool = False  # columns reach only parameters without a default, and no `**kwargs`


PROMPT = attrgetter("prompt")
RESPONSE = attrgetter("response")
TOKEN_IDS = attrgetter("token_ids")


def _prompt_messages(response: ResponseToScore) -> Any:
    """The prompt's messages in chat data, or else its text."""
    if response.row.get(MESSAGES) is None:
        return response.prompt
    return response.row[MESSAGES]


class Completion(list[dict[str, Any]]):
    """The messages of a completion, as TRL gives them. What reads text, as functions of ms-swift
    do, would find no text in a list: it raises instead."""

    def __contains__(self, item: object) -> bool:
        self._refuse(item)
        return super().__contains__(item)

    def __eq__(self, other: object) -> bool:
        self._refuse(other)
        return super().__eq__(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = None

    def _refuse(self, text: object) -> None:
        if isinstance(text, str):
            raise TypeError(
                "a completion of chat data is a list of messages here, as in TRL, and is compared"
                " with a text: read completion[-1]['content'], or let completions be text, as in"
                " ms-swift, with the setting ?text=spoken"
            )


def _completion(response: ResponseToScore) -> Any:
    """The response's messages in chat data, or else its text."""
    if response.is_text or response.row.get(MESSAGES) is None:
        return response.response
    if response.texts.messages is not None:
        return Completion(response.texts.messages)
    return Completion([{"role": "assistant", "content": response.response}])


def _extra_info(response: ResponseToScore) -> Any:
    return response.row.get("extra_info") or {}


CALL_FORMS = {
    "responses": CallForm(
        "called once per batch", False, ("responses",), {"prompts": PROMPT, "responses": RESPONSE}
    ),
    "response": CallForm(
        "called once per response", True, ("response",), {"prompt": PROMPT, "response": RESPONSE}
    ),
    "trl": CallForm(
        "called once per batch, as TRL's GRPOTrainer does",
        False,
        ("completions", "completion_ids", "completions_ids", "trainer_state", *LOGGERS),
        {
            "prompts": _prompt_messages,
            "completions": _completion,
            "completion_ids": TOKEN_IDS,
            # the name in some versions of TRL's documentation
            "completions_ids": TOKEN_IDS,
        },
        of_call=("trainer_state", *LOGGERS),
        hidden=("prompt", "completion", "completions_ids"),
    ),
    "verl": CallForm(
        "called once per response, as verl does",
        True,
        ("solution_str",),
        {"solution_str": RESPONSE, "extra_info": _extra_info},
        {"data_source": "data_source", "ground_truth": "ground_truth"},
        only_needed=True,
    ),
    "verl_batch": CallForm(
        "called once per batch, as verl's batch reward manager does",
        False,
        ("solution_strs",),
        {"solution_strs": RESPONSE, "extra_infos": _extra_info},
        {"data_sources": "data_source", "ground_truths": "ground_truth"},
        only_needed=True,
    ),
    "openrlhf": CallForm(
        "called once per batch, as OpenRLHF's remote reward function",
        False,
        ("queries",),
        {"queries": lambda response: response.prompt + response.response, "prompts": PROMPT},
        {"labels": "ground_truth"},
    ),
}
_NO_SETTINGS = {*CALL_FORMS["responses"].texts, *CALL_FORMS["response"].texts}


@dataclass(frozen=True)
class Signature:
    """How to call a function."""

    form: str  # key of `CALL_FORMS`
    takes: Sequence[str]  # names of its arguments
    needs: Sequence[str]  # those without a default
    any: bool  # it has a `**` argument
    settings: dict[str, Any]  # converted to the types of the defaults that they replace
    text: str | None = None  # the setting `text`: which one of `TEXTS` the function reads

    @property
    def call(self) -> CallForm:
        """The form of the function."""
        return CALL_FORMS[self.form]

    def wants(self, name: str) -> bool:
        """Whether the function receives what has this name, if there is such a thing."""
        return name in self.takes or (self.any and name not in (*ADDED, *self.call.hidden))

    @property
    def knows_groups(self) -> bool:
        """Whether a call must hold whole groups."""
        return any(name in self.takes for name in GROUP_ARGUMENTS)

    @property
    def takes_token_ids(self) -> bool:
        """Whether the function receives the token ids of the responses."""
        return any(self.wants(name) for name, text in self.call.texts.items() if text is TOKEN_IDS)


def call_form_of(names: Iterable[str]) -> str:
    """The form of a function with these parameters; "responses" if no name marks another;
    `TypeError` if several do. A function with `response` and `responses` is called per batch."""
    names = set(names)
    marks = dict[str, str]()  # form -> the first of its marks that the function has
    for form, call_form in CALL_FORMS.items():
        marks_of_form = [mark for mark in call_form.marks if mark in names]
        if marks_of_form:
            marks[form] = marks_of_form[0]
    if set(marks) == {"responses", "response"}:
        return "responses"
    if len(marks) > 1:
        first, second, *_ = marks.values()
        raise TypeError(
            f"its arguments '{first}' and '{second}' belong to different forms of reward functions "
            f"({' or '.join(CALL_FORMS[form].description for form in marks)}); omit one of them"
        )
    return next(iter(marks), "responses")


def signature_of(function: Callable[..., Any], settings: dict[str, str]) -> Signature:
    """How to call a function; `TypeError` or `ValueError` if it cannot be called so, or a setting
    does not fit."""
    parameters = inspect.signature(function).parameters
    for name, parameter in parameters.items():
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL):
            raise TypeError(
                f"its argument {name} is positional only, but the function is called by keywords"
            )
    defaults = {
        name: parameter.default
        for name, parameter in parameters.items()
        if parameter.kind != parameter.VAR_KEYWORD
    }
    form = call_form_of(defaults)
    takes_any = len(defaults) < len(parameters)
    call_form = CALL_FORMS[form]
    group_arguments = [name for name in GROUP_ARGUMENTS if name in defaults]
    if call_form.per_row and group_arguments:
        [mark] = call_form.marks
        raise TypeError(
            f"its argument '{group_arguments[0]}' is for functions that compare the responses to a"
            f" prompt, but with '{mark}' it gets one response at a time: take the list '{mark}s' in"
            " its place, or rename the argument"
        )
    text = None
    if "text" in settings and "text" not in defaults:
        text = settings["text"]
        settings = {name: value for name, value in settings.items() if name != "text"}
        if text not in TEXTS:
            raise ValueError(f"its setting text must be one of {', '.join(TEXTS)}, not '{text}'")
    filled = {*_NO_SETTINGS, *call_form.texts, *call_form.columns, *call_form.of_call}
    filled |= set(group_arguments)
    for name in settings:
        if name in filled or (name not in defaults and not takes_any):
            raise TypeError(f"it has no setting '{name}'; its arguments are {', '.join(defaults)}")
    needs = [name for name, default in defaults.items() if default is inspect.Parameter.empty]
    converted = {
        name: _converted(name, text, defaults.get(name)) for name, text in settings.items()
    }
    return Signature(form, list(defaults), needs, takes_any, converted, text)


def _converted(name: str, text: str, default: Any) -> Any:
    """A setting as a value of the type of the default that it replaces."""
    if isinstance(default, bool):
        if text.lower() not in ("true", "false"):
            raise ValueError(f"its setting {name} must be true or false, not '{text}'")
        return text.lower() == "true"
    if isinstance(default, int | float):
        try:
            return type(default)(text)
        except ValueError:
            raise ValueError(
                f"its setting {name} must be a number ({type(default).__name__}), not '{text}'"
            ) from None
    return text


def call_arguments(
    signature: Signature, responses: Sequence[ResponseToScore], columns: Iterable[str], step: int
) -> dict[str, Any]:
    """Keyword arguments of a call for some responses: lists for a batch function, single values for
    a per-row function. Settings precede texts and groups, and these columns. What a row, or an
    argument without a default, lacks is None. `columns`: of all responses that the function scores.
    """
    form = signature.call
    sources = dict[str, str]()  # argument -> column
    for name in columns:
        is_passed = signature.wants(name)
        if form.only_needed:
            is_passed = name in signature.needs
        if is_passed:
            sources[name] = name
    for name, column in form.columns.items():
        if signature.wants(name):
            sources[name] = column
    values = dict[str, list[Any]]()  # argument -> its value for each response
    for name, column in sources.items():
        values[name] = [response.row.get(column) for response in responses]
    for name, text in form.texts.items():
        if signature.wants(name):
            values[name] = [text(response) for response in responses]
    values |= _further_arguments(signature, responses)
    for name in _READABLE:
        if name in signature.takes and name not in values:
            values[name] = [getattr(response.texts, name) for response in responses]
    for name in signature.needs:
        if name not in values and name not in form.of_call:
            values[name] = [None] * len(responses)
    arguments: dict[str, Any] = dict(values)
    if form.per_row:
        arguments = {name: value[0] for name, value in values.items()}
    if "trainer_state" in form.of_call and signature.wants("trainer_state"):
        arguments["trainer_state"] = SimpleNamespace(global_step=step)
    return arguments | _group_arguments(signature, responses) | signature.settings


def _further_arguments(
    signature: Signature, responses: Sequence[ResponseToScore]
) -> dict[str, list[Any]]:
    """The arguments of features that the function names."""
    values = dict[str, list[Any]]()
    for name in signature.takes:
        has_any = any(name in response.further for response in responses)
        if has_any and name not in signature.call.texts:
            values[name] = [response.further.get(name) for response in responses]
    return values


def _group_arguments(
    signature: Signature, responses: Sequence[ResponseToScore]
) -> dict[str, list[int] | int]:
    """Those of `GROUP_ARGUMENTS` that the function takes."""
    groups = [response.group for response in responses]
    values: dict[str, list[int] | int] = {
        "groups": groups,
        "num_generations": len(groups) // len(set(groups)),
    }
    return {name: value for name, value in values.items() if name in signature.takes}


def missing_columns(signature: Signature, columns: Iterable[str]) -> set[str]:
    """Columns for arguments without a default that no row has, and that are neither texts nor
    settings."""
    form = signature.call
    filled = {*form.texts, *form.of_call, *GROUP_ARGUMENTS, *_READABLE, *signature.settings}
    needed = {form.columns.get(name, name) for name in signature.needs if name not in filled}
    return needed - set(columns)


class Returned(NamedTuple):
    """The result for one response. `score` is a finite number, None if the function leaves the
    response to other sources, or the reason why there is none. `numbers`: other finite numbers to
    log, by name."""

    score: float | str | None
    numbers: dict[str, float]


def returned_rows(
    result: Any, per_row: bool, logged: dict[str, Any] | None = None
) -> list[Returned]:
    """What a function returned and (TRL) `logged`, for each response; `TypeError` for another
    form."""
    if per_row:
        return [_returned(result)]
    if logged:
        result = {"rewards": list(result), "extra_logs": logged}
    if isinstance(result, dict) and "rewards" in result:
        result = _rows_of_openrlhf(result)
    if isinstance(result, str | bytes | dict) or not isinstance(result, Iterable):
        keys = ""
        if isinstance(result, dict):
            keys = f", nor a dict with 'rewards' (its keys: {list(result)[:8]})"
        raise TypeError(f"returned {type(result).__name__}, not a list of numbers{keys}")
    return [_returned(value) for value in result]


def _rows_of_openrlhf(result: dict[str, Any]) -> list[dict[str, Any]]:
    """`{"rewards": (B,), "scores": (B,), "extra_logs": {name: (B,) or number}}` as a dict for each
    row."""
    columns: dict[str, Any] = {**(result.get("extra_logs") or {})}
    if "scores" in result:
        columns["scores"] = result["scores"]
    columns["score"] = result["rewards"]
    has_rows = {
        name: isinstance(column, list | tuple) or getattr(column, "ndim", 0) > 0
        for name, column in columns.items()
    }  # False: one number for the whole batch
    if not has_rows["score"]:
        raise TypeError("returned 'rewards' that is not a list of numbers")
    count = len(columns["score"])
    rows: list[dict[str, Any]] = [{} for _ in range(count)]
    for name, column in columns.items():
        values = [column] * count
        if has_rows[name]:
            values = list(column)
        if len(values) == count:
            for row, value in zip(rows, values, strict=True):
                row[name] = value
    return rows


def _returned(value: Any) -> Returned:
    """What a function returned for one response."""
    if not isinstance(value, dict):
        value = {"score": value}
    if "score" not in value:
        keys = ", ".join(map(clean_name, list(value)[:8])) or "none"
        return Returned(f"returned a dict without 'score' (its keys: {keys})", {})
    metrics = dict[str, float]()
    for key, entry in value.items():
        if key == "score":
            continue
        name = clean_name(key)
        metrics.pop(name, None)  # of several keys with one name, the last one counts
        metric = _as_float(entry)
        if metric is not None and abs(metric) <= LARGEST:
            metrics[name] = metric
    if value["score"] is None:
        return Returned(None, metrics)
    score = _as_float(value["score"])
    if score is None:
        return Returned(NO_NUMBER, metrics)
    if not abs(score) <= LARGEST:
        return Returned(f"returned {score}, which is not a finite fp32 number", metrics)
    return Returned(score, metrics)


def _as_float(value: Any) -> float | None:
    """A number or bool of Python, NumPy or PyTorch; None for anything else."""
    if not isinstance(value, SupportsFloat):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None


def clean_name(key: Any) -> str:
    """A key of the user as a part of a metric's name: ASCII letters, digits, `_`, `.`, `-` and
    `@`."""
    return re.sub(r"[^A-Za-z0-9_.@-]", "_", str(key)[:_LONGEST_NAME]) or "_"
