"""Raw rows of one data set to token rows: read by the form, encoded, fitted to the length limit.
`prepare.py` does it for a whole data set, lazy rows for a batch at a time."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from datasets import Features, List, Value
from transformers import PreTrainedTokenizerBase

from dschat_ppo.common.stop_requests import raise_if_stop_requested
from dschat_ppo.config.data_flags import StepData
from dschat_ppo.data.content_marks import without_base64
from dschat_ppo.data.encode import EncodedExample, encode_example
from dschat_ppo.data.examples import (
    ADDED,
    MESSAGES,
    TOOLS,
    TRUTH,
    VARIABLES,
    Example,
)
from dschat_ppo.data.fitting import Fitted, fit
from dschat_ppo.data.forms import Form
from dschat_ppo.data.rendered import check_variables
from dschat_ppo.data.shards import Raw
from dschat_ppo.data.uses import further_uses
from dschat_ppo.errors import UserError

DOING = "prepared the data"
# share of the rows of a data set that --bad_rows drops
MOST_BAD = {"few": 0.01, "skip": 1.0, "error": 0.0}
_QUOTED = 200  # characters of a bad row in its message
_IDS = List(Value("int32"))


NOTES = {  # further columns, for `prepare`
    "row_index": Value("int64"),  # of the raw row
    "fitted": Value("int8"),  # see `Fitted`
    "tokens": Value("int32"),  # of prompt and longest answer before the length limit
    "problem": Value("string"),  # of an UNUSABLE row
    "remark": Value("string"),  # lines on a row that can be used
}


def features_of(step: StepData) -> Features:
    """Columns of the token rows of a step; `digest` is a hash of the others."""
    columns: dict[str, Any] = {
        "prompt_ids": _IDS,
        "answers": List(_IDS),
        "margin": Value("float32"),
    }
    if step.use == "sft":
        columns["prompt_spans"] = List(_IDS)
    if step.use in ("preference", "unpaired"):
        columns["untrained_spans"] = List(List(_IDS))
    if step.use == "unpaired":
        columns["label"] = Value("float32")
    if step.use in further_uses():
        columns |= further_uses()[step.use].columns
    if step.content is not None:
        columns |= step.content.columns
    if step.use == "prompt":
        columns["row"] = Value("string")
        columns |= {column.name: _IDS for column in step.prompt_columns}
    return Features(columns | {"digest": Value("int64")})


@dataclass(frozen=True)
class TokeniseSettings:
    """How the rows of one data set become token rows."""

    form: Form
    source: str  # name of the data set, `data_source` of rows that have none
    # that all its rows have; those that the file does not give them are None
    columns: Sequence[str]
    tokenizer: PreTrainedTokenizerBase
    step: StepData

    def identity(self) -> list[object]:
        """Everything besides rows and tokenizer that token rows depend on."""
        step = self.step
        # what a data set is, and how its rows are shared out, is in the rows and their numbers
        without_effect = {
            "data_path",
            "data_split",
            "data_output_path",
            "preprocessing_num_workers",
            "bad_rows",
        }
        flags = sorted(
            (name, value) for name, value in vars(step.flags).items() if name not in without_effect
        )
        identity = [
            self.form.identity,
            self.form.rendering,
            step.use,
            step.limit,
            step.all_turns,
            self.source,
            flags,
        ]
        if step.use_settings is not None:
            identity.append(step.use_settings)
        if step.use == "prompt":
            columns = [[column.name, column.identity] for column in step.prompt_columns]
            identity += [columns, step.keeps_answers]
        if step.tools:
            identity.append(list(step.tools))
        if step.content is not None:
            identity.append(step.content.identity)
        return identity


def refuse_bad(name: str, bad: int, rows: int, policy: str, first: Sequence[str]) -> None:
    """`UserError` if `--bad_rows` does not accept so many bad rows of a data set; if all are bad,
    no value does."""
    all_bad = 0 < rows == bad
    if bad <= MOST_BAD[policy] * rows and not all_bad:
        return
    way = ""
    if policy != "skip" and not all_bad:
        way = "; --bad_rows skip leaves such rows out"
    raise UserError(
        f"{name}: {bad} of {rows} rows cannot be used{way}. The first: {' | '.join(first)}"
    )


def tokenise_batch(
    raw_rows: Sequence[Raw], origins: Sequence[str], settings: TokeniseSettings
) -> list[dict[str, Any]]:
    """Token rows of some raw rows of one data set, in their order.

    Args:
        raw_rows: The raw rows.
        origins: "FILE, row N" of each.
        settings: How the data set is tokenised.

    Returns:
        Rows with the columns of `features_of` and `NOTES`; `row_index` counts `raw_rows`. A raw row
        gives none, one or several. A bad one gives a single row without tokens, which is UNUSABLE:
        its `problem` names the row and quotes it. Rows that the limit drops are included as
        DROPPED.

    Raises:
        UserError: A row is over the limit, and `--truncation error` refuses it.
    """
    batch_rows = list[dict[str, Any]]()
    for row_index, (raw, origin) in enumerate(zip(raw_rows, origins, strict=True)):
        raise_if_stop_requested(DOING)  # tokenising a data set may take hours
        for token_row in _token_rows(raw, origin, settings):
            batch_rows.append({"row_index": row_index, **token_row})
    return batch_rows


def _token_rows(raw: Raw, origin: str, settings: TokeniseSettings) -> list[dict[str, Any]]:
    """The token rows of one raw row, as `tokenise_batch` says."""
    if isinstance(raw, str):
        return [_unusable(f"{origin} {raw}")]
    step = settings.step
    row = dict.fromkeys(settings.columns) | raw
    token_rows = list[dict[str, Any]]()
    suffix = ""
    problem = ""
    try:
        form_row = row
        items = list[Any]()
        if step.content is not None:
            form_row, items = step.content.taken_out(row)
        for example in settings.form.read(form_row, step.form_use):
            suffix = example.suffix
            token_rows += _rows_of_example(row, example, settings, items)
    except UserError as error:  # a ranked list with a bad answer gives no pair at all
        problem = f"{origin}{suffix}: {error}; the row: {_quoted_row(row)}"
    is_too_long = any(token_row["fitted"] == Fitted.DROPPED for token_row in token_rows)
    if is_too_long and step.flags.truncation == "error":
        raise UserError(
            f"{origin}: longer than the limit of {step.limit} tokens (--truncation error);"
            f" the row: {_quoted_row(row)}; --truncation left cuts such rows, drop leaves"
            " them out"
        )
    if problem:
        return [_unusable(problem)]
    return token_rows


def _unusable(problem: str) -> dict[str, Any]:
    """What stands in place of the token rows of a bad raw row."""
    return {
        "problem": problem,
        "prompt_ids": [],
        "answers": [],
        "tokens": 0,
        "fitted": int(Fitted.UNUSABLE),
    }


def _quoted_row(row: dict[str, Any]) -> str:
    """The first characters of a row in a message."""
    text = without_base64(json.dumps(row, default=str, ensure_ascii=False))
    if len(text) <= _QUOTED:
        return text
    return f"{text[:_QUOTED]}..."


def rows_for_form(rows: Sequence[dict[str, Any]], step: StepData) -> list[dict[str, Any]]:
    """Rows as their form sees them: with marks in place of further content. Bad rows are left out,
    unless all are."""
    form_rows = list[dict[str, Any]]()
    problem: UserError | None = None
    for row in rows:
        try:
            form_rows.append(step.content.taken_out(row)[0])
        except UserError as error:
            problem = problem or error
    if problem is not None and not form_rows:
        raise UserError(f"none of the first {len(rows)} rows can be used; the first: {problem}")
    return form_rows


def _rows_of_example(
    row: dict[str, Any], example: Example, settings: TokeniseSettings, items: list[Any]
) -> list[dict[str, Any]]:
    """The token rows of one example of the raw row `row`: one, or the blocks of a long plain text.
    `items` are its further content. `tokens` of a row counts them before the limit cut it; of a
    block, its own. `UserError` for an empty prompt or answer, and for what the use does not find in
    it."""
    step = settings.step
    tokenizer = settings.tokenizer
    further_use = further_uses().get(step.use)
    if further_use is not None:
        example = further_use.to_encode(example, step.use_settings)
    if step.tools:
        example = _with_tools(example, step.tools)
    if example.variables:
        check_variables(tokenizer, example)
    if step.content is not None:
        example, items = step.content.placed(example, items)
    ids = encode_example(tokenizer, example, step.all_turns)
    if step.content is not None:
        ids = step.content.expanded(ids, items)
    _require_tokens(ids, example)
    row_answers = list[list[int]]()
    if step.use == "prompt":  # its answers are not part of the prompt that the limit is for
        row_answers = ids.answers
        ids = replace(ids, answers=[])

    token_rows = list[dict[str, Any]]()
    for fitted, outcome in fit(ids, example, tokenizer, step.limit, step.flags.truncation):
        columns = _columns_of_use(row, example, settings, ids, fitted)
        if further_use is not None and not any(columns.values()):
            outcome = Fitted.DROPPED  # the limit leaves nothing of what the use reads
        measured = fitted if outcome == Fitted.BLOCKS else ids
        longest = max((len(answer) for answer in measured.answers), default=0)
        besides_tokens = [str(value) for value in (example.margin, *_hashed(columns), *row_answers)]
        if step.content is not None:
            besides_tokens += step.content.hashed(items)
            columns |= step.content.values(fitted, items)
        token_rows.append(
            {
                "problem": None,
                "prompt_ids": fitted.prompt,
                "answers": row_answers or fitted.answers,
                "margin": example.margin,
                "fitted": int(outcome),
                "remark": "\n".join(ids.remarks) or None,
                "tokens": len(measured.prompt) + longest,
                **columns,
                "digest": _hash(fitted, *besides_tokens),
            }
        )
    return token_rows


def _require_tokens(ids: EncodedExample, example: Example) -> None:
    """Refuse an example whose prompt or answer has no token."""
    if any(len(answer) <= 1 for answer in ids.answers):
        raise UserError("the answer is empty: it has only the final token")
    if not ids.prompt and example.prompt != "":
        raise UserError("the prompt is empty")


def _hashed(columns: dict[str, Any]) -> list[Any]:
    """The columns of a use that the digest of a row covers: without spans that are empty, so that
    most pairs have the digest of earlier versions."""
    return [value for name, value in columns.items() if name != "untrained_spans" or any(value)]


def _with_tools(example: Example, tools: Sequence[dict[str, Any]]) -> Example:
    """The example with further tools."""
    if isinstance(example.prompt, str):
        raise UserError(
            "the chat template describes tools to the model, so the prompt must be chat messages"
        )
    return replace(example, tools=[*(example.tools or ()), *tools])


def _columns_of_use(
    row: dict[str, Any],
    example: Example,
    settings: TokeniseSettings,
    ids: EncodedExample,
    fitted: EncodedExample,
) -> dict[str, Any]:
    """The columns that a token row has for one use alone, see `features_of`. `ids` is the encoded
    example, and `fitted` what the limit leaves of it."""
    step = settings.step
    if step.use == "sft":
        return {"prompt_spans": [list(span) for span in fitted.prompt_spans]}
    untrained = [list(map(list, spans)) for spans in fitted.untrained_spans]
    if step.use == "preference":
        return {"untrained_spans": untrained}
    if step.use == "unpaired":
        return {"untrained_spans": untrained, "label": example.labels[0]}
    if step.use in further_uses():
        values = further_uses()[step.use].values
        return values(settings.tokenizer, example, ids, fitted, step.use_settings)
    columns = dict[str, Any]()
    if step.use == "prompt":
        columns["row"] = row_text(row, example, settings)
        for column in step.prompt_columns:
            columns[column.name] = column.ids_of(row, example, settings)
    return columns


def row_text(row: dict[str, Any], example: Example, settings: TokeniseSettings) -> str:
    """The columns of a row as JSON for reward functions, and on a second line what they do not hold
    themselves: `data_source`, `answer` and `ground_truth` and `TRUTH` if the row has a correct
    answer, which the flags may name, `MESSAGES`, `TOOLS` and `VARIABLES` of a chat."""
    flags = settings.step.flags
    is_named = flags.answer_column is not None or flags.answer_pattern is not None
    added = dict[str, Any]()
    if row.get("data_source") is None:
        added["data_source"] = settings.source
    if example.truth is not None:
        names = [name for name in ("answer", "ground_truth") if is_named or row.get(name) is None]
        added |= dict.fromkeys([*names, TRUTH], example.truth)
    if not isinstance(example.prompt, str):
        added[MESSAGES] = example.prompt
    if example.tools is not None:
        added[TOOLS] = example.tools
    if example.variables is not None:
        added[VARIABLES] = example.variables
    of_file = {name: value for name, value in row.items() if name not in ADDED}
    first_line = json.dumps(of_file, default=str)
    if not added:
        return first_line
    comma = "," if row else ""
    # both lines together are one object
    return f"{first_line[:-1]}{comma}\n{json.dumps(added, default=str)[1:]}"


def row_of_file(text: str) -> dict[str, Any]:
    """The columns of a row in its `row_text`, without what the second line adds."""
    first_line, line_end, _ = text.partition("\n")
    if line_end:
        first_line = first_line.removesuffix(",") + "}"
    columns: dict[str, Any] = json.loads(first_line)
    return columns


def _hash(ids: EncodedExample, *content: str) -> int:
    """64 bits of the ids and of further content."""
    id_lists = [ids.prompt, *ids.answers]
    lengths = [len(id_list) for id_list in id_lists]
    ids_as_bytes = b"".join(array("i", integers).tobytes() for integers in [lengths, *id_lists])
    texts_as_bytes = [text.encode("utf-8", "surrogatepass") for text in content]
    hashed = hashlib.blake2b(b"\0".join([ids_as_bytes, *texts_as_bytes]), digest_size=8)
    return int.from_bytes(hashed.digest(), "little", signed=True)
