"""The forms in which people write reward functions: which one a function has, and what it is called with.

Worker processes import it, so it imports no large library.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from dschat_ppo.data.examples import ADDED, MESSAGES

LOGGERS = ("log_extra", "log_metric")  # callables that TRL passes; the worker provides them


@dataclass(frozen=True)
class Answer:
    """One response to score. `row`: the columns of its data row. `token_ids`: of the response, up to and including the
    token that ended it; empty unless the function takes them."""

    prompt: str
    response: str
    row: dict[str, Any]
    token_ids: list[int] = field(default_factory=list)

    @property
    def messages(self) -> Any:
        """The prompt as TRL passes it: the messages of a chat, otherwise the text."""
        return self.prompt if self.row.get(MESSAGES) is None else self.row[MESSAGES]

    @property
    def reply(self) -> Any:
        """The response as TRL passes it: a message in a chat, otherwise the text."""
        is_text = self.row.get(MESSAGES) is None
        return self.response if is_text else [{"role": "assistant", "content": self.response}]

    @property
    def extra_info(self) -> Any:
        """As verl passes it: where a row has none, an empty dict."""
        return self.row.get("extra_info") or {}

    @property
    def query(self) -> str:
        """As OpenRLHF passes it."""
        return self.prompt + self.response


@dataclass(frozen=True)
class CallForm:
    """How functions of one form are called.

    Attributes:
        per_row: whether the function gets single values and returns one score, rather than lists and a list.
        marks: parameter names that only functions of this form have.
        texts: argument -> attribute of `Answer`. They take precedence over columns.
        columns: argument -> the column that it is, where this form calls it differently.
        of_call: arguments with one value for a call.
        hidden: what `**kwargs` does not receive, besides what data preparation adds to rows.
        only_needed: whether columns reach only parameters without a default, and no `**kwargs`.
    """

    description: str
    per_row: bool
    marks: tuple[str, ...]
    texts: dict[str, str]
    columns: dict[str, str] = field(default_factory=dict)
    of_call: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()
    only_needed: bool = False


CALL_FORMS = {
    "responses": CallForm(
        "called once per batch", False, ("responses",), {"prompts": "prompt", "responses": "response"}
    ),
    "response": CallForm(
        "called once per response", True, ("response",), {"prompt": "prompt", "response": "response"}
    ),
    "trl": CallForm(
        "called once per batch, as TRL's GRPOTrainer does", False,
        ("completions", "completion_ids", "completions_ids", "trainer_state", *LOGGERS),
        {"prompts": "messages", "completions": "reply", "completion_ids": "token_ids",
         "completions_ids": "token_ids"},  # the name in some versions of TRL's documentation
        of_call=("trainer_state", *LOGGERS), hidden=("prompt", "completion", "completions_ids"),
    ),
    "verl": CallForm(
        "called once per response, as verl does", True, ("solution_str",),
        {"solution_str": "response", "extra_info": "extra_info"},
        {"data_source": "data_source", "ground_truth": "ground_truth"}, only_needed=True,
    ),
    "verl_batch": CallForm(
        "called once per batch, as verl's batch reward manager does", False, ("solution_strs",),
        {"solution_strs": "response", "extra_infos": "extra_info"},
        {"data_sources": "data_source", "ground_truths": "ground_truth"}, only_needed=True,
    ),
    "openrlhf": CallForm(
        "called once per batch, as OpenRLHF's remote reward function", False, ("queries",),
        {"queries": "query", "prompts": "prompt"}, {"labels": "ground_truth"},
    ),
}  # fmt: skip
_NO_SETTINGS = {*CALL_FORMS["responses"].texts, *CALL_FORMS["response"].texts}


@dataclass(frozen=True)
class Signature:
    """How to call a function. `form`: key of `CALL_FORMS`; `takes`: names of its arguments; `needs`: those without a
    default; `any`: it has a `**` argument; `settings`: converted to the types of the defaults that they replace."""

    form: str
    takes: Sequence[str]
    needs: Sequence[str]
    any: bool
    settings: dict[str, Any]

    @property
    def call(self) -> CallForm:
        """The form of the function."""
        return CALL_FORMS[self.form]

    def wants(self, name: str) -> bool:
        """Whether the function receives what has this name, if there is such a thing."""
        return name in self.takes or (self.any and name not in (*ADDED, *self.call.hidden))

    @property
    def takes_token_ids(self) -> bool:
        """Whether the function receives the token ids of the responses."""
        return any(self.wants(name) for name, attribute in self.call.texts.items() if attribute == "token_ids")


def form_of(names: Iterable[str]) -> str:
    """The form of a function with these parameters; "responses" if no name marks another; `TypeError` if several do. A
    function with `response` and `responses` is called per batch."""
    names = set(names)
    found = {form: marks for form, call in CALL_FORMS.items() if (marks := [n for n in call.marks if n in names])}
    if set(found) == {"responses", "response"}:
        return "responses"
    if len(found) > 1:
        (one, *_), (other, *_) = list(found.values())[:2]
        raise TypeError(
            f"its arguments '{one}' and '{other}' belong to different forms of reward functions "
            f"({' or '.join(CALL_FORMS[form].description for form in found)}); omit one of them"
        )
    return next(iter(found), "responses")


def describe(function: Callable[..., Any], settings: dict[str, str]) -> Signature:
    """How to call a function; `TypeError` or `ValueError` if it cannot be called so, or a setting does not fit."""
    parameters = inspect.signature(function).parameters
    for name, parameter in parameters.items():
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL):
            raise TypeError(f"its argument {name} is positional only, but the function is called by keywords")
    defaults = {name: each.default for name, each in parameters.items() if each.kind != each.VAR_KEYWORD}
    form, takes_any = form_of(defaults), len(defaults) < len(parameters)
    call = CALL_FORMS[form]
    given = {*_NO_SETTINGS, *call.texts, *call.columns, *call.of_call}
    for name in settings:
        if name in given or (name not in defaults and not takes_any):
            raise TypeError(f"it has no setting '{name}'; its arguments are {', '.join(defaults)}")
    needs = [name for name, default in defaults.items() if default is inspect.Parameter.empty]
    converted = {name: _converted(name, text, defaults.get(name)) for name, text in settings.items()}
    return Signature(form, list(defaults), needs, takes_any, converted)


def _converted(name: str, text: str, default: Any) -> Any:
    """The text of a setting, converted to the type of the default that it replaces."""
    if isinstance(default, bool):
        if text.lower() not in ("true", "false"):
            raise ValueError(f"its setting {name} must be true or false, not '{text}'")
        return text.lower() == "true"
    if isinstance(default, int | float):
        try:
            return type(default)(text)
        except ValueError:
            raise ValueError(f"its setting {name} must be a number ({type(default).__name__}), not '{text}'") from None
    return text


def arguments_of(signature: Signature, answers: Sequence[Answer], columns: Iterable[str], step: int) -> dict[str, Any]:
    """Keyword arguments of a call for some answers: lists for a batch function, single values for a per-row function.

    Settings take precedence over texts, and texts over columns. A column that a row lacks is None for that row; an
    argument without a default and without a column is None. `columns`: of all answers that the function scores.
    """
    form, count = signature.call, len(answers)
    wanted = [name for name in columns if (name in signature.needs if form.only_needed else signature.wants(name))]
    values = {name: [answer.row.get(name) for answer in answers] for name in wanted}
    for name, column in form.columns.items():
        if signature.wants(name):
            values[name] = [answer.row.get(column) for answer in answers]
    for name, attribute in form.texts.items():
        if signature.wants(name):
            values[name] = [getattr(answer, attribute) for answer in answers]
    values |= {name: [None] * count for name in signature.needs if name not in values and name not in form.of_call}
    arguments: dict[str, Any] = {name: value[0] for name, value in values.items()} if form.per_row else dict(values)
    if "trainer_state" in form.of_call and signature.wants("trainer_state"):
        arguments["trainer_state"] = SimpleNamespace(global_step=step)
    return arguments | signature.settings


def missing_columns(signature: Signature, columns: Iterable[str]) -> set[str]:
    """Columns for arguments without a default that no row has, and that are neither texts nor settings."""
    form = signature.call
    given = {*form.texts, *form.of_call, *signature.settings}
    return {form.columns.get(name, name) for name in signature.needs if name not in given} - set(columns)
