"""Python functions as reward sources: how they are named, checked and called."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from dschat_ppo.common import dist
from dschat_ppo.common.extras import require_extra
from dschat_ppo.common.logging import print_line
from dschat_ppo.config.source_text import parse_source_text
from dschat_ppo.data.examples import TRUTH
from dschat_ppo.errors import HIDDEN, UserError, in_one_line
from dschat_ppo.rewards.call_forms import (
    ResponseToScore,
    Returned,
    Signature,
    call_arguments,
    missing_columns,
)
from dschat_ppo.rewards.reward_source import CallCounts, RewardRequest, is_routed_to
from dschat_ppo.rewards.worker_pool import CallError, WorkerPool
from dschat_ppo.types import Rollout, last_contexts

FLAG = "--reward_function"
_IN_RULES = (
    "exact_match",
    "numeric_match",
    "boxed_math",
    "format_match",
    "length",
    "length_penalty",
    "json_valid",
)
RULES = dict.fromkeys(_IN_RULES, "dschat_ppo.rewards.rules") | {
    "code_tests": "dschat_ppo.rewards.sandbox"
}
# rules that read the last message without thoughts; the others read all that the model wrote
READ_FINAL = {"exact_match", "numeric_match", "boxed_math", "code_tests", "json_valid"}
MODULES = {"boxed_math": "math_verify"}  # rule -> module of an extra that it imports
MOST_WARNINGS = 3


@dataclass(frozen=True)
class FunctionSpec:
    """One `--reward_function`: a file `*.py` or a dotted module, the function's name in it, its
    weight and settings. `flag` is the flag that named it. With `sources`, the function scores only
    rows of these data sources."""

    path: str
    name: str
    weight: float = 1.0
    settings: tuple[tuple[str, str], ...] = ()
    flag: str = FLAG
    sources: tuple[str, ...] = ()

    def __str__(self) -> str:
        route = ""
        if self.sources:
            route = ",".join(self.sources) + "="
        function = self.rule or f"{self.path}:{self.name}"
        return f"{self.flag} {route}{function}"

    @property
    def rule(self) -> str | None:
        """The name of the shipped rule that this is, or None."""
        if RULES.get(self.name) == self.path:
            return self.name
        return None


def parse_function(spec: str, flag: str = FLAG) -> FunctionSpec:
    """Read `path.py:name`, `module.path:name` or `rule`, each with optional `?key=value&key=value`,
    percent-decoded (`+` stays a plus), and `:weight`; `source=` or `source,source=` in front
    routes: only rows of these data sources are scored. A `:` before a number at the end of a
    setting must be `%3A`. Messages name `flag`."""
    as_given = f"{flag} {spec}"
    text = parse_source_text(spec, as_given, _is_file)
    path, name = _path_and_name(text.name, as_given)
    function_spec = FunctionSpec(path, name, text.weight, text.settings, flag, text.sources)
    if function_spec.rule in MODULES:
        require_extra(MODULES[function_spec.rule], as_given)
    for key, value in text.settings:
        if value == HIDDEN:
            raise UserError(
                f"{as_given}: *** stands for credentials, which are not saved: give the flag with"
                " them"
            )
        if (function_spec.rule, key) == ("format_match", "pattern"):
            try:
                re.compile(value)
            except re.error as problem:
                raise UserError(
                    f"{as_given}: invalid setting {key}: {in_one_line(problem)}"
                ) from None
    return function_spec


def _path_and_name(function: str, as_given: str) -> tuple[str, str]:
    """`path.py:name`, `module.path:name` or `rule` -> path or module, and name."""
    path, colon, name = function.partition(":")
    if not colon and function in RULES:
        path = RULES[function]
        name = function
    elif not colon and not function.endswith(".py"):
        raise UserError(
            f"{as_given}: there is no rule '{function}', but: {', '.join(RULES)}; name your own"
            " function as path.py:name or module.path:name"
        )
    if not path or not name.isidentifier():
        raise UserError(
            f"{as_given}: expected path.py:name, module.path:name or a rule, and an optional"
            " :weight"
        )
    if path.endswith(".py"):
        if not os.path.isfile(path):  # `Path.is_file` raises for a name that is too long
            raise UserError(f"{as_given}: there is no file {path}")
    elif not all(package.isidentifier() for package in path.split(".")):
        raise UserError(f"{as_given}: '{path}' is neither a file that ends in .py nor a module")
    return path, name


def _is_file(head: str) -> bool:
    """Whether the text before the settings names a Python file that is there."""
    return os.path.isfile(head.partition(".py:")[0] + ".py")


def _remedy(cause: str) -> str:
    """What to use in place of a function that imports a trainer for its rules of mathematics, as
    OpenRLHF's math_reward_func.py does; "" for other causes."""
    missing = re.search(r"No module named '(openrlhf|verl)\b", cause)
    if missing is None:
        return ""
    return (
        f"; {missing[1]} is not installed, but its rules of mathematics are here: {FLAG} boxed_math"
        f" grades the last \\boxed{{}} of a response, {FLAG} numeric_match its last number"
        " (docs/rewards.md)"
    )


class FunctionReward:
    """Scores responses with a function that runs in `workers` processes. A failed call costs the
    score of a response, never the run. `timeout`: seconds for each call."""

    scores_elsewhere = True
    kind = "the function"

    def __init__(self, spec: FunctionSpec, workers: int, timeout: float):
        self.spec = spec
        self.counts = CallCounts()
        self.failed = torch.zeros(0, dtype=torch.bool)  # (B,) of the last call
        # name -> (B,) fp64 of the last call; NaN where it returned none
        self.numbers: dict[str, Tensor] = {}
        # arguments without a column, for which a warning was printed
        self.missing: set[str] = set()
        try:
            settings = json.dumps(dict(spec.settings))
            self.pool = WorkerPool((spec.path, spec.name, settings), workers, timeout)
        except CallError as problem:
            cause = in_one_line(problem)
            raise UserError(f"{spec}: cannot be used: {cause}{_remedy(cause)}") from None
        self.signature = Signature(**self.pool.ready)
        # the text of a response that the function reads
        self.text = "spoken"
        if self.signature.text is not None:
            self.text = self.signature.text
        elif spec.rule in READ_FINAL:
            self.text = "final"

    @property
    def name(self) -> str:
        """The name of the function."""
        return self.spec.name

    def __call__(self, request: RewardRequest, rollout: Rollout) -> Tensor:
        """(B,) fp32 on the CPU; NaN where the function returned None, its route names other data
        sources, or it `failed`: its call raised, timed out, crashed its process, or returned no
        finite fp32 number. A failed call for the whole batch is repeated row by row, or group by
        group if the function knows its groups: at most `(1 + ceil(B / workers)) * timeout`, plus
        one start of a worker for each call that has to be killed."""
        rows = [
            index for index, row in enumerate(request.rows) if is_routed_to(self.spec.sources, row)
        ]
        if self.signature.takes_token_ids:
            rollout = last_contexts(rollout)
        responses = [self._response(request, rollout, index) for index in rows]
        columns = list(dict.fromkeys(name for response in responses for name in response.row))
        further = [name for response in responses for name in response.further]
        self._warn_of_missing(responses, [*columns, *further])
        results = self._results(responses, columns, request.step)
        scores = torch.full((len(request),), math.nan)
        self.failed = torch.zeros(len(request), dtype=torch.bool)
        self.numbers = {}
        causes: dict[int, str] = {}  # row -> why it has no score
        for row, result in zip(rows, results, strict=True):
            if isinstance(result.score, str):
                causes[row] = result.score
                self.failed[row] = True
            elif result.score is not None:
                scores[row] = result.score
            for name, metric in result.numbers.items():
                column = self.numbers.setdefault(
                    name, torch.full((len(request),), math.nan, dtype=torch.float64)
                )
                column[row] = metric
        for row, cause in list(causes.items())[:MOST_WARNINGS]:
            self._warn(f"row {row}: {cause} (what it costs: --reward_default)")
        if len(causes) > MOST_WARNINGS:
            self._warn(f"{len(causes) - MOST_WARNINGS} more of {len(rows)} rows failed")
        first = next(iter(causes.values()), None)
        if first is not None and self.missing:
            first += f" (no row has a column {_either(self.missing)})"
        self.counts = self.counts.plus(
            sum(result.score is not None for result in results), len(causes), first
        )
        return scores

    def _response(
        self, request: RewardRequest, rollout: Rollout, row_index: int
    ) -> ResponseToScore:
        row = request.rows[row_index]
        ids = list[int]()
        # other functions see the columns as they are
        if self.spec.rule is not None and TRUTH in row:
            row = row | {"answer": row[TRUTH]}
        if self.signature.takes_token_ids:
            ids = rollout.response_ids[row_index][rollout.real_mask[row_index]].tolist()
        texts = request.texts[row_index]
        further: Mapping[str, Any] = {}
        if request.arguments:
            further = request.arguments[row_index]
        return ResponseToScore(
            prompt=request.prompts[row_index],
            response=getattr(texts, self.text),
            row=row,
            texts=texts,
            is_text=self.signature.text is not None,
            group=request.groups[row_index],
            token_ids=ids,
            further=further,
        )

    def _warn_of_missing(self, responses: list[ResponseToScore], columns: list[str]) -> None:
        """Warn once of each argument without a column: most often a misspelt column."""
        if not responses:
            return
        new = missing_columns(self.signature, columns) - self.missing
        self.missing |= new
        if not new:
            return
        remedy = ""
        for name, alias in (("ground_truth", "answer"), ("answer", "ground_truth")):
            if name in new and any(response.row.get(alias) is not None for response in responses):
                remedy = f"; --answer_column {alias} passes the column '{alias}' under both names"
        self._warn(f"no row has a column {_either(new)}: its argument is None{remedy}")

    def _results(
        self, responses: list[ResponseToScore], columns: list[str], step: int
    ) -> list[Returned]:
        """The result for each response: of one call for all, or else of one call for each, or for
        each group if the function knows its groups."""
        unit = "row"
        units = [[response] for response in responses]
        if self.signature.knows_groups:
            unit = "group"
            units = [list(group) for _, group in groupby(responses, key=attrgetter("group"))]
        if not self.signature.call.per_row and len(responses) > 1:
            [reply] = self.pool.map([call_arguments(self.signature, responses, columns, step)])
            if not isinstance(reply, CallError) and len(reply) == len(responses):
                return [Returned(*row) for row in reply]
            if isinstance(reply, CallError):
                cause = str(reply)
            else:
                cause = f"returned {len(reply)} scores"
            self._warn(
                f"a call for {len(responses)} rows failed ({cause}); it is repeated {unit} by"
                f" {unit}"
            )
        calls = [call_arguments(self.signature, rows, columns, step) for rows in units]
        results = []
        for rows, reply in zip(units, self.pool.map(calls), strict=True):
            if isinstance(reply, CallError):
                results += [Returned(str(reply), {})] * len(rows)
            elif len(reply) != len(rows):
                cause = f"returned {len(reply)} scores for one {unit}"
                results += [Returned(cause, {})] * len(rows)
            else:
                results += [Returned(*row) for row in reply]
        return results

    def _warn(self, text: str) -> None:
        print_line(f"warning: rank {dist.rank()}: reward function {self.name}: {text}")

    def close(self) -> None:
        """End the worker processes."""
        self.pool.close()


def _either(columns: set[str]) -> str:
    return " or ".join(map(repr, sorted(columns)))


def function_files(flag: str, functions: Sequence[str]) -> list[tuple[str, str | None]]:
    """(flag with the path, path) of each reward function in a file."""
    paths = [parse_function(text).path for text in functions]
    return [(f"{flag} {path}", path) for path in paths if path.endswith(".py")]
