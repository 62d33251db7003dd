"""Python functions as sources of reward: how they are named, checked and called."""

from __future__ import annotations

import importlib.util
import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl

import torch
from torch import Tensor

from dschat_ppo.common import dist
from dschat_ppo.common.logging import say
from dschat_ppo.errors import UserError, in_one_line
from dschat_ppo.rewards.reward_source import Calls, RewardRequest
from dschat_ppo.rewards.worker_pool import CallError, Signature, Target, WorkerPool
from dschat_ppo.types import Rollout

FLAG = "--reward_function"
_RULES, _SANDBOX = "dschat_ppo.rewards.rules", "dschat_ppo.rewards.sandbox"
RULES = {
    "exact_match": _RULES, "numeric_match": _RULES, "boxed_math": _RULES, "format_match": _RULES, "length": _RULES,
    "length_penalty": _RULES, "json_valid": _RULES, "code_tests": _SANDBOX,
}  # fmt: skip
EXTRAS = {"boxed_math": ("math_verify", "math")}  # rule -> what it imports, the extra of this package that brings it
SETTING_CHECKS: dict[tuple[str, str], Callable[[str], Any]] = {("format_match", "pattern"): re.compile}
MOST_WARNINGS = 3
LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class FunctionSpec:
    """One `--reward_function`: a file `*.py` or a dotted module, the function's name there, its weight and settings.

    `flag` is the one that named it.
    """

    path: str
    name: str
    weight: float = 1.0
    settings: tuple[tuple[str, str], ...] = ()
    flag: str = FLAG

    def __str__(self) -> str:
        return f"{self.flag} {self.rule or f'{self.path}:{self.name}'}"

    @property
    def target(self) -> Target:
        """What a worker is told to load."""
        return Target(self.path, self.name, self.settings)

    @property
    def rule(self) -> str | None:
        """The name of the shipped rule that this is, or None."""
        return self.name if RULES.get(self.name) == self.path else None


def parse_function(spec: str, flag: str = FLAG) -> FunctionSpec:
    """Read `path.py:name`, `module.path:name` or `rule`, each with `?key=value&key=value` and `:weight` if wanted.

    Settings are percent-decoded (`+` stays as it is); a `:` before a number at the end of a setting must be `%3A`.
    Messages name `flag`.

    Raises:
        UserError: another form, no such rule or file, a weight that is not finite, a rule whose extra is not installed.
    """
    head, mark, tail = spec.partition("?")
    last, weight = _split_weight(tail if mark else head)
    given = f"{flag} {spec}"
    place, settings = (head, _settings(last, given)) if mark else (last, ())
    if not math.isfinite(weight):
        raise UserError(f"{given}: the weight must be finite, got {weight}")
    parts = place.split(":")
    if len(parts) == 1 and place in RULES:
        return _checked(FunctionSpec(RULES[place], place, weight, settings, flag), given)
    if len(parts) == 1:
        raise UserError(
            f"{given}: there is no rule '{place}' ({', '.join(RULES)}); a function of your own is given as "
            "path.py:name or module.path:name"
        )
    if len(parts) != 2 or not all(parts) or not parts[1].isidentifier():
        raise UserError(f"{given}: expected path.py:name, module.path:name or a rule, and :weight if wanted")
    return _checked(FunctionSpec(parts[0], parts[1], weight, settings, flag), given)


def _split_weight(text: str) -> tuple[str, float]:
    """`"name:0.5"` -> ("name", 0.5); without a number at its end the weight is 1."""
    before, colon, number = text.rpartition(":")
    try:
        return (before, float(number)) if colon else (text, 1.0)
    except ValueError:
        return text, 1.0


def _settings(text: str, given: str) -> tuple[tuple[str, str], ...]:
    try:
        pairs = parse_qsl(text.replace("+", "%2B"), keep_blank_values=True, strict_parsing=True)
    except ValueError:
        raise UserError(f"{given}: settings after '?' are key=value, divided by '&'") from None
    if len({key for key, _ in pairs}) < len(pairs):
        raise UserError(f"{given}: a setting is given twice")
    return tuple(pairs)


def _checked(found: FunctionSpec, given: str) -> FunctionSpec:
    if found.path.endswith(".py"):
        if not os.path.isfile(found.path):  # of a name that is too long `Path` raises
            raise UserError(f"{given}: there is no file {found.path}")
    elif not all(part.isidentifier() for part in found.path.split(".")):
        raise UserError(f"{given}: '{found.path}' is neither a file that ends in .py nor a module")
    if found.rule in EXTRAS:
        module, extra = EXTRAS[found.rule]
        if importlib.util.find_spec(module) is None:
            raise UserError(f"{given}: needs {module}; install it with: pip install 'dschat_ppo[{extra}]'")
    for key, value in found.settings:
        try:
            SETTING_CHECKS.get((found.rule or "", key), str)(value)
        except (ValueError, re.error) as problem:
            raise UserError(f"{given}: setting {key} cannot be used: {in_one_line(problem)}") from None
    return found


class FunctionReward:
    """Scores rows with a function that runs in processes of its own; a bad call costs its row, never the run.

    Args:
        spec: the function.
        workers: processes.
        timeout: seconds for each call.
        default: score of a row that the function failed on.

    Raises:
        UserError: the function cannot be loaded, or does not take its settings.
    """

    def __init__(self, spec: FunctionSpec, workers: int, timeout: float, default: float):
        self.spec = spec
        self.default = default
        self.calls = Calls()  # since they were last taken
        self.missing: set[str] = set()  # arguments of which it was said that no row has them
        try:
            self.pool = WorkerPool(spec.target, workers, timeout)
        except CallError as problem:
            raise UserError(f"{spec}: cannot be used: {in_one_line(problem)}") from None

    @property
    def name(self) -> str:
        """The function's own."""
        return self.spec.name

    def __call__(self, request: RewardRequest, rollout: Rollout) -> Tensor:
        """(B,) fp32 on the CPU.

        A row gets the default when its call raises, takes too long, loses its process, or gives no finite fp32 number.
        A call for all rows that fails, or gives a list of another length, is made again row by row, all workers at
        work. With `n` workers that takes at most `(1 + ceil(B / n)) * timeout`, and as often the start of a worker
        (at most `pool.START_SECONDS`) if each call has to be killed.
        """
        self._say_what_is_missing(request)
        results = self._results(request)
        bad = {row: cause for row, cause in enumerate(results) if isinstance(cause, str)}
        self._count(len(request), list(bad.values()))
        for row, cause in list(bad.items())[:MOST_WARNINGS]:
            self._warn(f"row {row}: {cause}; its score is {self.default:g} (--reward_default)")
        if len(bad) > MOST_WARNINGS:
            self._warn(f"{len(bad) - MOST_WARNINGS} more of {len(request)} rows got {self.default:g}")
        return torch.tensor([self.default if isinstance(r, str) else r for r in results], dtype=torch.float32)

    def _results(self, request: RewardRequest) -> list[float | str]:
        """Each row's score, or why it has none."""
        rows = range(len(request))
        signature = self.pool.signature
        if not signature.per_row and len(request) > 1:
            (whole,) = self.pool.map([arguments_of(signature, request, rows)])
            if isinstance(whole, list) and len(whole) == len(request):
                return [_score(value) for value in whole]
            cause = f"returned {len(whole)} scores" if isinstance(whole, list) else str(whole)
            self._warn(f"a call for {len(request)} rows failed ({cause}); it is made again row by row")
        calls = [arguments_of(signature, request, [row]) for row in rows]
        return [_only_score(result) for result in self.pool.map(calls)]

    def _count(self, rows: int, causes: Sequence[str]) -> None:
        cause = self.calls.cause
        if causes and cause is None:
            lacking = f" (no row has a column {_either(self.missing)})" if self.missing else ""
            cause = causes[0] + lacking
        self.calls = Calls(self.calls.rows + rows, self.calls.failed + len(causes), cause)

    def _say_what_is_missing(self, request: RewardRequest) -> None:
        """Once: most often it is a misspelt column."""
        new = missing_columns(self.pool.signature, request) - self.missing if len(request) else set()
        self.missing |= new
        if new:
            self._warn(f"no row has a column {_either(new)}: its argument is None")

    def _warn(self, text: str) -> None:
        say(f"warning: rank {dist.rank()}: reward function {self.name}: {text}")

    def take_counts(self) -> Calls:
        """What became of this rank's rows since the last time that this was asked."""
        calls, self.calls = self.calls, Calls()
        return calls

    def close(self) -> None:
        """End the processes."""
        self.pool.close()


def arguments_of(signature: Signature, request: RewardRequest, rows: Sequence[int]) -> dict[str, Any]:
    """Keyword arguments of a call for some rows: lists for a function of batches, single values for one of rows.

    Settings go before texts and columns; a column that a row lacks is None there, and so is an argument without a
    default that no row has.
    """
    columns = {name: None for row in request.rows for name in row}  # in order of appearance
    values: dict[str, list[Any]] = {name: [request.rows[row].get(name) for row in rows] for name in columns}
    texts = _texts(signature)
    values |= {texts[0]: [request.prompts[r] for r in rows], texts[1]: [request.responses[r] for r in rows]}
    values = {name: value for name, value in values.items() if signature.any or name in signature.takes}
    values |= {name: [None] * len(rows) for name in signature.needs - set(values)}
    given: dict[str, Any] = {name: value[0] for name, value in values.items()} if signature.per_row else dict(values)
    return given | signature.settings


def missing_columns(signature: Signature, request: RewardRequest) -> set[str]:
    """Arguments without a default that neither a text, nor a column of any row, nor a setting gives."""
    columns = {name for row in request.rows for name in row}
    return set(signature.needs) - columns - set(_texts(signature)) - set(signature.settings)


def _either(columns: set[str]) -> str:
    return " or ".join(map(repr, sorted(columns)))


def _texts(signature: Signature) -> tuple[str, str]:
    """Under which names the function gets prompts and responses."""
    return ("prompt", "response") if signature.per_row else ("prompts", "responses")


def _only_score(result: list[float | None] | CallError) -> float | str:
    if isinstance(result, CallError):
        return str(result)
    return _score(result[0]) if len(result) == 1 else f"returned {len(result)} scores for one row"


def _score(value: float | None) -> float | str:
    if value is None:
        return "returned what is no number"
    if not abs(value) <= LARGEST:
        return f"returned {value}, which is no finite fp32 number"
    return value


def function_files(flag: str, functions: Sequence[str]) -> list[tuple[str, str | None]]:
    """(flag with the path, path) of each reward function that is given by a file.

    Raises:
        UserError: see `parse_function`.
    """
    paths = [parse_function(text).path for text in functions]
    return [(f"{flag} {path}", path) for path in paths if path.endswith(".py")]
