"""The arguments of a call of a reward function, from responses, tokens and data columns."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from dschat_ppo.data.examples import ADDED, MESSAGES
from dschat_ppo.rewards.call_forms import CALL_FORMS, LOGGERS, CallForm
from dschat_ppo.rewards.reward_source import RewardRequest
from dschat_ppo.types import Rollout

# Columns that `**kwargs` does not receive: this package's own, and those that TRL leaves out.
_HIDDEN = {"trl": {*ADDED, "prompt", "completion", "completion_ids", "completions_ids"}}
# Argument of verl -> column. Where a row has no `extra_info`, verl passes an empty dict.
_VERL = {"data_source": "data_source", "ground_truth": "ground_truth", "extra_info": "extra_info"}
# What Python says when a function reads a text as a list of messages.
_READS_MESSAGES = re.compile(r"string indices must be|'str' object has no attribute|values to unpack")
_COLUMN_OF = _VERL | {f"{name}s": column for name, column in _VERL.items()} | {"labels": "ground_truth"}


@dataclass(frozen=True)
class Signature:
    """How to call the function; see `call_forms.describe`."""

    form: str
    takes: frozenset[str]
    needs: frozenset[str]
    any: bool
    settings: dict[str, Any]

    @property
    def call(self) -> CallForm:
        """The form of the function."""
        return CALL_FORMS[self.form]

    @property
    def per_row(self) -> bool:
        """Whether the function gets single values, not lists."""
        return self.call.per_row

    @property
    def takes_token_ids(self) -> bool:
        """Whether the function receives the token ids of the responses."""
        return self.form == "trl" and (self.any or bool(self.takes & {"completion_ids", "completions_ids"}))


def token_ids_of(rollout: Rollout) -> list[list[int]]:
    """The ids of each response, up to and including the token that ended it."""
    return [ids[mask].tolist() for ids, mask in zip(rollout.response_ids, rollout.response_mask, strict=True)]


def arguments_of(
    signature: Signature, request: RewardRequest, rows: Sequence[int], token_ids: list[list[int]] | None = None
) -> dict[str, Any]:
    """Keyword arguments of a call for some `rows`: lists for a batch function, single values for a per-row function.

    Settings take precedence over texts, and texts over columns. A column that a row lacks is None for that row; an
    argument without a default and without a column is None. A `**` argument receives all columns; in verl's form none.
    `token_ids` are those of all B responses, if the signature takes them.
    """
    hidden = _HIDDEN.get(signature.form, set(ADDED))
    if signature.form.startswith("verl"):
        columns = [name for name in _columns(request) if name in signature.needs]
    else:
        columns = [n for n in _columns(request) if n in signature.takes or (signature.any and n not in hidden)]
    values: dict[str, list[Any]] = {name: [request.rows[row].get(name) for row in rows] for name in columns}
    texts = _texts(signature, request, rows, token_ids)
    values |= {name: value for name, value in texts.items() if signature.any or name in signature.takes}
    state = {"trainer_state": SimpleNamespace(global_step=request.step)}
    whole = state if signature.form == "trl" and (signature.any or "trainer_state" in signature.takes) else {}
    lacking = signature.needs - set(values) - set(whole)
    values |= {name: [None] * len(rows) for name in lacking - (set(LOGGERS) if signature.form == "trl" else set())}
    single = {name: value[0] for name, value in values.items()} if signature.per_row else values
    return {**single, **whole, **signature.settings}


def _columns(request: RewardRequest) -> dict[str, None]:
    """All columns, in order of appearance."""
    return {name: None for row in request.rows for name in row}


def _texts(
    signature: Signature, request: RewardRequest, rows: Sequence[int], token_ids: list[list[int]] | None
) -> dict[str, list[Any]]:
    """The arguments of the function's form, one value for each row."""
    prompts, responses = [request.prompts[row] for row in rows], [request.responses[row] for row in rows]
    data = [request.rows[row] for row in rows]
    if signature.form == "trl":
        chats = [row.get(MESSAGES) for row in data]
        replies = [text if chat is None else [{"role": "assistant", "content": text}]
                   for chat, text in zip(chats, responses, strict=True)]  # fmt: skip
        texts: dict[str, list[Any]] = {
            "prompts": [text if chat is None else chat for chat, text in zip(chats, prompts, strict=True)],
            "completions": replies,
        }
        if token_ids is not None:
            texts["completion_ids"] = [token_ids[row] for row in rows]
            if "completions_ids" in signature.takes:  # the name in some versions of TRL's documentation
                texts["completions_ids"] = texts["completion_ids"]
        return texts
    if signature.form.startswith("verl"):
        solution = "solution_str" if signature.per_row else "solution_strs"
        values = {name: [row.get(_COLUMN_OF[name]) for row in data] for name in signature.call.arguments
                  if name != solution}  # fmt: skip
        info = "extra_info" if signature.per_row else "extra_infos"
        return values | {solution: responses, info: [value or {} for value in values[info]]}
    if signature.form == "openrlhf":
        queries = [prompt + response for prompt, response in zip(prompts, responses, strict=True)]
        labels = [row.get(_COLUMN_OF["labels"]) for row in data]
        return {"queries": queries, "prompts": prompts, "labels": labels}
    return dict(zip(signature.call.arguments, (prompts, responses), strict=True))


def hint_of_text(signature: Signature, row: dict[str, Any], cause: str) -> str:
    """A hint for a function in TRL's form that fails with `cause` because it expects messages, not texts; else ""."""
    if signature.form != "trl" or MESSAGES in row or not _READS_MESSAGES.search(cause):
        return ""
    return " (prompts are text, so completions are text; --apply_chat_template True passes messages)"


def missing_columns(signature: Signature, request: RewardRequest) -> set[str]:
    """Columns for arguments without a default that no row has, and that are neither texts nor settings."""
    optional = {"extra_info", "extra_infos"}
    own = {name for name in signature.call.arguments if name not in _COLUMN_OF or name in optional}
    renamed = _COLUMN_OF if signature.form in ("verl_batch", "openrlhf") else {}
    return {renamed.get(name, name) for name in signature.needs - own - set(signature.settings)} - set(
        _columns(request)
    )
