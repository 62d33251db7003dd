"""Raw rows of one data set to token rows: read by the form, encoded, fitted to the length limit.
`prepare.py` does it for a whole data set, a stream for a batch at a time."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

from datasets import Features, List, Value
from transformers import PreTrainedTokenizerBase

from dschat_ppo.common.stop_requests import raise_if_stop_requested
from dschat_ppo.config.data_flags import StepData
from dschat_ppo.data.encode import EncodedExample, encode_example, joined_steps, labelled_ends
from dschat_ppo.data.examples import (
    ADDED,
    MESSAGES,
    TOOLS,
    TRUTH,
    VARIABLES,
    Example,
    has_value,
    text_at,
)
from dschat_ppo.data.forms import Form
from dschat_ppo.data.parts import Raw
from dschat_ppo.data.rendered import check_variables
from dschat_ppo.data.templates import added_tokens
from dschat_ppo.errors import UserError

DOING = "prepared the data"
# share of the rows of a data set that --bad_rows drops
MOST_BAD = {"few": 0.01, "skip": 1.0, "error": 0.0}
_SHOWN = 200  # characters of a bad row in its message
_IDS = List(Value("int32"))


class Fitted(IntEnum):
    """What the length limit did to a row; stored in one byte per row."""

    KEPT_WHOLE = 0
    PROMPT_CUT = 1
    ANSWER_CUT = 2
    DROPPED = 3
    UNUSABLE = 4  # a bad row, which has no tokens
    BLOCKS = 5  # of a plain text over the limit

    @property
    def words(self) -> str:
        """For the log."""
        return self.name.lower().replace("_", " ")


NOTES = {  # further columns, for `prepare`
    "number": Value("int64"),  # of the raw row
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
    if step.use == "unpaired":
        columns["label"] = Value("float32")
    if step.use == "steps":
        columns |= {"step_ends": _IDS, "step_labels": List(Value("float32"))}
    if step.use == "prompt":
        columns["row"] = Value("string")
        columns |= {"teacher_prompt_ids": _IDS} if step.teacher_column else {}
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
        elsewhere = {
            "data_path",
            "data_split",
            "data_output_path",
            "preprocessing_num_workers",
            "streaming",
            "streaming_rows",
            "bad_rows",
        }
        chosen = sorted(
            (name, value) for name, value in vars(step.flags).items() if name not in elsewhere
        )
        how = [
            self.form.identity,
            self.form.rendering,
            step.use,
            step.limit,
            step.all_turns,
            self.source,
            chosen,
        ]
        how += [step.step_separator] if step.use == "steps" else []
        how += [step.teacher_column, step.keeps_answers] if step.use == "prompt" else []
        if step.tools:
            return [*how, list(step.tools)]
        return how


def refuse_bad(name: str, bad: int, rows: int, policy: str, first: Sequence[str]) -> None:
    """`UserError` if `--bad_rows` does not accept so many bad rows of a data set; if all are bad,
    no value does."""
    if bad > MOST_BAD[policy] * rows or 0 < rows == bad:
        if policy == "skip" or bad == rows:
            way = ""
        else:
            way = "; --bad_rows skip leaves such rows out"
        raise UserError(
            f"{name}: {bad} of {rows} rows cannot be used{way}. The first: {' | '.join(first)}"
        )


def tokenise_batch(
    raw_rows: Sequence[Raw], origins: Sequence[str], settings: TokeniseSettings
) -> list[dict[str, Any]]:
    """Token rows of some raw rows of one data set, in their order, with the columns of
    `features_of` and `NOTES`; `origins` is "FILE, row N" of each, and `number` counts the raw rows
    given here. A raw row gives none, one or several. A bad one gives a single row without tokens,
    which is UNUSABLE: its `problem` names the row and quotes it. Rows that the limit drops are
    included as DROPPED."""
    made: list[dict[str, Any]] = []
    step = settings.step
    no_values = dict.fromkeys(settings.columns)
    for number, (raw, origin) in enumerate(zip(raw_rows, origins, strict=True)):
        raise_if_stop_requested(DOING)  # tokenising a data set may take hours
        found = list[dict[str, Any]]()
        suffix = ""
        problem = ""
        if isinstance(raw, str):
            problem = f"{origin} {raw}"
        else:
            row = no_values | raw
            try:
                for example in settings.form.read(row, "sft" if step.keeps_answers else step.use):
                    suffix = example.suffix
                    found += _token_rows(row, example, settings)
            except UserError as error:  # a ranked list with a bad answer gives no pair at all
                problem = f"{origin}{suffix}: {error}; the row: {_shown(row)}"
            if step.flags.truncation == "error" and any(
                each["fitted"] == Fitted.DROPPED for each in found
            ):
                raise UserError(
                    f"{origin}: longer than the limit of {step.limit} tokens (--truncation error);"
                    f" the row: {_shown(row)}; --truncation left cuts such rows, drop leaves"
                    " them out"
                )
        if problem:
            found = [{"prompt_ids": [], "answers": [], "tokens": 0, "fitted": int(Fitted.UNUSABLE)}]
        made += [{"number": number, "problem": problem or None, **values} for values in found]
    return made


def _shown(row: dict[str, Any]) -> str:
    """The first characters of a row in a message."""
    text = json.dumps(row, default=str, ensure_ascii=False)
    if len(text) <= _SHOWN:
        return text
    return f"{text[:_SHOWN]}..."


def _token_rows(
    row: dict[str, Any], example: Example, settings: TokeniseSettings
) -> list[dict[str, Any]]:
    """The token rows of one example of the raw row `row`: one, or the blocks of a long plain text.
    `UserError` for an empty prompt or answer, and for steps that cannot be found."""
    step = settings.step
    use = settings.step.use
    if use == "steps":
        example = joined_steps(example, step.step_separator)
    if step.tools:
        if isinstance(example.prompt, str):
            raise UserError(
                "the chat template describes tools to the model, so the prompt must be chat"
                " messages"
            )
        example = replace(example, tools=[*(example.tools or ()), *step.tools])
    check_variables(settings.tokenizer, example)
    ids = encode_example(settings.tokenizer, example, step.all_turns)
    if any(len(answer) <= 1 for answer in ids.answers):
        raise UserError("the answer is empty: it has only the final token")
    if not ids.prompt and example.prompt != "":
        raise UserError("the prompt is empty")
    rows = []
    own = list[list[int]]()
    if use == "prompt":  # its answers are not part of the prompt that the limit is for
        ids, own = replace(ids, answers=[]), ids.answers
    for fitted, outcome in fit(ids, example, settings.tokenizer, step.limit, step.flags.truncation):
        more: dict[str, Any] = {}
        if use == "unpaired":
            more = {"label": example.labels[0]}
        elif use == "steps":
            ends = labelled_ends(
                settings.tokenizer, ids.answers[0], example.labels, step.step_separator
            )
            kept = [
                (end, label)
                for end, label in zip(*ends, strict=True)
                if end < len(fitted.answers[0])
            ]
            more = {
                "step_ends": [end for end, _ in kept],
                "step_labels": [label for _, label in kept],
            }
            outcome = outcome if kept else Fitted.DROPPED  # the limit leaves no labelled step
        elif use == "sft":
            more = {"prompt_spans": [list(span) for span in fitted.prompt_spans]}
        elif use == "prompt":
            more = {"row": row_text(row, example, settings)}
            if step.teacher_column:
                more["teacher_prompt_ids"] = teacher_prompt(row, example, settings)
        whole = fitted if outcome == Fitted.BLOCKS else ids
        content = map(str, [example.margin, *more.values(), *own])
        rows.append(
            {
                "prompt_ids": fitted.prompt,
                "answers": own or fitted.answers,
                "margin": example.margin,
                "fitted": int(outcome),
                "remark": "\n".join(ids.remarks) or None,
                "tokens": len(whole.prompt) + max(map(len, whole.answers), default=0),
                **more,
                "digest": _hash(fitted, *content),
            }
        )
    return rows


def teacher_prompt(row: dict[str, Any], example: Example, settings: TokeniseSettings) -> list[int]:
    """The ids of what a teacher reads: the prompt with `--teacher_prompt_column` in place of its
    text, or of that of its last message. `UserError` if that is longer than a prompt may be."""
    step = settings.step
    column = settings.step.teacher_column
    prompt = example.prompt
    assert column is not None
    if not has_value(row, column):
        raise UserError(f"has no value at '{column}' (--teacher_prompt_column)")
    text = text_at(row, column)
    if isinstance(prompt, str):
        seen = text
    else:
        seen = [*prompt[:-1], {**prompt[-1], "content": text}]
    ids = encode_example(settings.tokenizer, replace(example, prompt=seen, answers=[])).prompt
    if len(ids) > step.limit:
        raise UserError(
            f"--teacher_prompt_column {column}: the teacher would read {len(ids)} tokens, more than"
            f" --max_prompt_seq_len {step.limit}; raise it"
        )
    return ids


def fit(
    ids: EncodedExample,
    example: Example,
    tokenizer: PreTrainedTokenizerBase,
    limit: int,
    policy: str,
) -> list[tuple[EncodedExample, Fitted]]:
    """Rows of at most `limit` tokens in prompt and longest answer, and what `--truncation` did to
    them. A plain text over the limit is divided into blocks: the first token of each is the last
    one of the block before it, so each token is predicted once. Otherwise it is one row: the prompt
    is cut, but for its `fixed_ends` if the limit allows it. An eighth of the limit is for the
    prompt, and half of it where an answer alone is over the limit: answers that leave it less are
    cut at their end. Of `prompt_spans`, those stay of which no token was cut."""
    if example.prompt == "":
        text = [*ids.prompt, *ids.answers[0]]
        if len(text) > limit and policy not in ("drop", "error"):
            starts = range(0, len(text) - 1, limit - 1)
            blocks = [
                replace(ids, prompt=text[at : at + 1], answers=[text[at + 1 : at + limit]])
                for at in starts
            ]
            return [(block, Fitted.BLOCKS) for block in blocks]
        if not ids.prompt:  # nothing before its first token predicts it
            ids = replace(ids, prompt=text[:1], answers=[text[1:]])
    longest = max((len(answer) for answer in ids.answers), default=0)
    count = len(ids.prompt)
    if count + longest <= limit:
        return [(ids, Fitted.KEPT_WHOLE)]
    if policy in ("drop", "error"):
        return [(ids, Fitted.DROPPED)]
    kept = min(count, max(1, limit // (2 if longest > limit else 8), limit - longest))
    keep_start, keep_end = fixed_ends(
        tokenizer, ids.prompt, is_chat=not isinstance(example.prompt, str)
    )
    keep_end = min(keep_end, kept if policy == "left" else kept - 1)
    keep_start = min(keep_start, kept - max(1, keep_end))
    free = kept - keep_start - keep_end
    head = keep_start + {"left": 0, "right": free, "middle": max(0, kept // 2 - keep_start)}[policy]
    head = min(head, kept - keep_end)  # tokens kept before the cut
    tail = count - (kept - head)  # first token kept after it
    room = max(1, limit - kept)  # for answers
    spans = [
        (start, end) if end <= head else (start - tail + head, end - tail + head)
        for start, end in ids.prompt_spans
        if end <= head or start >= tail
    ]
    prompt = ids.prompt[:head] + ids.prompt[tail:]
    answers = [answer[:room] for answer in ids.answers]
    return [
        (
            EncodedExample(prompt, answers, spans),
            Fitted.ANSWER_CUT if longest > room else Fitted.PROMPT_CUT,
        )
    ]


def fixed_ends(
    tokenizer: PreTrainedTokenizerBase, prompt: list[int], is_chat: bool
) -> tuple[int, int]:
    """How many first and last tokens of a prompt a cut keeps: the first one if it is BOS. Of a chat
    prompt also the end of the template: the last special tokens, at most two tokens apart, as
    `<|im_end|>\\n<|im_start|>assistant\\n`."""
    start = int(bool(prompt) and prompt[0] == tokenizer.bos_token_id)
    if not is_chat:
        return start, 0
    end = len(prompt)
    special = added_tokens(tokenizer, len(tokenizer))
    for place in (place for place in reversed(range(len(prompt))) if prompt[place] in special):
        if place < end - 3 and end < len(prompt):
            break
        end = place
    return start, len(prompt) - end


def row_text(row: dict[str, Any], example: Example, settings: TokeniseSettings) -> str:
    """The columns of a row as JSON for reward functions, and on a second line what they do not hold
    themselves: `data_source`, `answer` and `ground_truth` and `TRUTH` if the row has a correct
    answer, which the flags may name, `MESSAGES`, `TOOLS` and `VARIABLES` of a chat."""
    added: dict[str, Any] = {}
    is_named = (
        settings.step.flags.answer_column is not None
        or settings.step.flags.answer_pattern is not None
    )
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
    first = json.dumps(
        {name: value for name, value in row.items() if name not in ADDED}, default=str
    )
    if not added:
        return first
    return f"{first[:-1]}{',' if row else ''}\n{json.dumps(added, default=str)[1:]}"


def _hash(ids: EncodedExample, *content: str) -> int:
    """64 bits of the ids and of further content."""
    lists = [ids.prompt, *ids.answers]
    numbers = b"".join(array("i", part).tobytes() for part in [list(map(len, lists)), *lists])
    texts = (text.encode("utf-8", "surrogatepass") for text in content)
    return int.from_bytes(
        hashlib.blake2b(b"\0".join([numbers, *texts]), digest_size=8).digest(),
        "little",
        signed=True,
    )
