"""The forms in which people write reward functions, told apart by the names of their parameters. Needs only the
standard library, because worker processes import it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

LOGGERS = ("log_extra", "log_metric")  # callables that TRL passes; the worker provides them


@dataclass(frozen=True)
class CallForm:
    """How functions of one form are called. `marks` are parameter names that only functions of this form have;
    `arguments` is what the function receives besides columns and settings. If `per_row`, it gets single values and
    returns one score, otherwise lists and a list."""

    marks: frozenset[str]
    arguments: tuple[str, ...]
    per_row: bool
    description: str


_TRL = ("completions", "completion_ids", "completions_ids", "trainer_state", *LOGGERS)
CALL_FORMS = {
    "responses": CallForm(frozenset({"responses"}), ("prompts", "responses"), False, "called once per batch"),
    "response": CallForm(frozenset({"response"}), ("prompt", "response"), True, "called once per response"),
    "trl": CallForm(
        frozenset(_TRL), ("prompts", *_TRL), False, "called once per batch, as TRL's GRPOTrainer does"
    ),
    "verl": CallForm(
        frozenset({"solution_str"}), ("data_source", "solution_str", "ground_truth", "extra_info"), True,
        "called once per response, as verl does",
    ),
    "verl_batch": CallForm(
        frozenset({"solution_strs"}), ("data_sources", "solution_strs", "ground_truths", "extra_infos"), False,
        "called once per batch, as verl's batch reward manager does",
    ),
    "openrlhf": CallForm(
        frozenset({"queries"}), ("queries", "prompts", "labels"), False,
        "called once per batch, as OpenRLHF's remote reward function",
    ),
}  # fmt: skip
_TEXTS = {*CALL_FORMS["responses"].arguments, *CALL_FORMS["response"].arguments}


def form_of(names: list[str]) -> str:
    """The form of a function with these parameters; "responses" if no name marks another; `TypeError` if several do. A
    function with `response` and `responses` is called per batch."""
    found = {form: [name for name in names if name in known.marks] for form, known in CALL_FORMS.items()}
    found = {form: marks for form, marks in found.items() if marks}
    if set(found) == {"responses", "response"}:
        return "responses"
    if len(found) > 1:
        (one, *_), (other, *_) = list(found.values())[:2]
        raise TypeError(
            f"its arguments '{one}' and '{other}' belong to different forms of reward functions "
            f"({' or '.join(CALL_FORMS[form].description for form in found)}); omit one of them"
        )
    return next(iter(found), "responses")


def describe(function: Callable[..., Any], settings: dict[str, str]) -> dict[str, Any]:
    """How to call a function; `TypeError` or `ValueError` if it cannot be called so, or a setting does not fit.

    `form`: key of `CALL_FORMS`; `takes`: names of its arguments; `needs`: those without a default; `any`: it has a `**`
    argument; `settings`: converted to the types of the defaults that they replace.
    """
    parameters = inspect.signature(function).parameters
    kinds = {name: parameter.kind for name, parameter in parameters.items()}
    by_position = [n for n, kind in kinds.items() if kind in (kind.POSITIONAL_ONLY, kind.VAR_POSITIONAL)]
    if by_position:
        raise TypeError(f"its argument {by_position[0]} is positional only, but the function is called by keywords")
    names = [name for name, kind in kinds.items() if kind != kind.VAR_KEYWORD]
    takes_any = len(names) < len(kinds)
    form = form_of(names)
    for name in settings:
        if name in _TEXTS | set(CALL_FORMS[form].arguments) or (name not in names and not takes_any):
            raise TypeError(f"it has no setting '{name}'; its arguments are {', '.join(names)}")
    return {
        "form": form,
        "takes": names,
        "needs": [name for name in names if parameters[name].default is inspect.Parameter.empty],
        "any": takes_any,
        "settings": {
            n: _converted(n, text, parameters[n].default if n in names else None) for n, text in settings.items()
        },
    }


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
