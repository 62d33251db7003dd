"""The files of the record: one for each recorded PPO step, `OUTPUT/record/step_*.safetensors`.

A file holds tensors without padding: numbers of tokens lie end to end, row after row, with the
lengths of the rows beside them. Texts of tokens are bytes in the same way. What is not a tensor is
JSON in the file's header. Nothing is unpickled when a file is opened.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from dschat_ppo.errors import UserError

FOLDER = "record"
FORM = 1  # version of the files
Numbers = NDArray[Any]

# columns of (n tokens) of the rows, in the order of `Experience`
TOKEN_COLUMNS = (
    "response_ids",
    "chosen",
    "contexts",
    "loss_mask",
    "rollout_logprobs",
    "old_logprobs",
    "entropies",
    "ref_logprobs",
    "kl",
    "values",
    "rewards",
    "advantages",
    "returns",
    "loss_weights",
    "selected",
)
# one number for each row; `source_scores` has one for each reward source
ROW_COLUMNS = (
    "row_indices",
    "groups",
    "scores",
    "penalised_scores",
    "baselines",
    "source_scores",
    "finish_reason",
    "has_score",
)


@dataclass(frozen=True)
class GroupScores:
    """The responses to one prompt that a PPO step has, those too that are not recorded.

    Attributes:
        scores: with penalties, after scaling and clipping.
        reward_sums: sums of the token rewards: the scores, less the KL penalties.
    """

    scores: list[float]
    reward_sums: list[float]


@dataclass(frozen=True)
class RecordedRow:
    """One response.

    Attributes:
        index: of the row in its PPO step.
        prompt: the text of each prompt token.
        pieces: the text of each of the n tokens after the prompt.
        tokens: name -> n numbers, of `TOKEN_COLUMNS`; a column that the run did not need is absent.
        updates: for each update of the actor that was applied, name -> n numbers, of
            `TOKENS_OF_ACTOR` and `TOKENS_OF_CRITIC`.
        of_row: name -> number of the row, of `ROW_COLUMNS`.
        group: the scores of the responses to its prompt; None where it has no score.
    """

    index: int
    prompt: list[str]
    pieces: list[str]
    tokens: dict[str, Numbers]
    updates: list[dict[str, Numbers]]
    of_row: dict[str, Any]
    group: GroupScores | None


@dataclass(frozen=True)
class RecordedStep:
    """A recorded PPO step.

    Attributes:
        step: its number.
        rows: the recorded responses.
        row_count: responses of the PPO step.
        samples: indices of the responses in `samples.jsonl`, in its order.
        flags: flag -> value, of the algorithm.
        sources: names of the reward sources.
        constants: `kl_coef`; `score_divisor` of a running scale, or None; `source_weights`;
            `aggregation` of the losses of tokens; `updates`, for each its denominators and
            the entropy coefficient; `whitening`, the tokens, mean and deviation of the advantages
            before they were whitened, or None.
    """

    step: int
    rows: list[RecordedRow]
    row_count: int
    samples: list[int]
    flags: dict[str, Any]
    sources: list[str]
    constants: dict[str, Any]

    @property
    def is_whole(self) -> bool:
        """Whether all responses of the PPO step are recorded."""
        return len(self.rows) == self.row_count


def file_name(step: int) -> str:
    """The name of the file of a PPO step."""
    return f"step_{step:06d}.safetensors"


def recorded_steps(run: Path) -> dict[int, Path]:
    """PPO step -> its file, of the records of a run in ascending order."""
    files = {}
    for path in sorted((run / FOLDER).glob("step_*.safetensors")):
        match = re.fullmatch(r"step_(\d+)", path.stem)
        if match:
            files[int(match[1])] = path
    return files


def read_step(path: Path) -> RecordedStep:
    """Read the file of a PPO step. `UserError` for a file that is damaged or of a later version."""
    try:
        with safe_open(path, framework="numpy") as file:
            header = json.loads((file.metadata() or {})["record"])
            if header["form"] > FORM:
                raise UserError(
                    f"{path}: is of a later version of this project; read it with that version"
                )
            names = list(file.keys())
            tensors = {name: file.get_tensor(name) for name in names}
        return _step_of(header, tensors)
    except UserError:
        raise
    except (SafetensorError, OSError, LookupError, ValueError, TypeError) as problem:
        raise UserError(f"{path}: is damaged, or no record of a PPO step") from problem


def _step_of(header: dict[str, Any], tensors: dict[str, Numbers]) -> RecordedStep:
    """The recorded step of a file's header and tensors."""
    lengths = tensors["response_lengths"].tolist()
    by_row: dict[str, list[Numbers]] = {}
    for name in tensors:
        if name.startswith("tokens."):
            by_row[name] = _split(tensors[name], lengths)
    pieces = _split_texts(tensors, "response_pieces", lengths)
    prompts = _split_texts(tensors, "prompt_pieces", tensors["prompt_lengths"].tolist())
    groups = {}
    for name, group in header["groups"].items():
        groups[int(name)] = GroupScores(**group)
    rows = []
    for position in range(len(lengths)):
        of_row = {}
        for name in ROW_COLUMNS:
            if f"rows.{name}" in tensors:
                of_row[name] = tensors[f"rows.{name}"][position].tolist()
        updates = []
        for update in range(len(header["constants"]["updates"])):
            updates.append(_columns_of(by_row, f"tokens.update_{update}.", position))
        rows.append(
            RecordedRow(
                index=of_row["row_indices"],
                prompt=prompts[position],
                pieces=pieces[position],
                tokens={
                    name: column
                    for name, column in _columns_of(by_row, "tokens.", position).items()
                    if name in TOKEN_COLUMNS
                },
                updates=updates,
                of_row=of_row,
                group=groups.get(of_row["groups"]),
            )
        )
    return RecordedStep(
        step=header["step"],
        rows=rows,
        row_count=header["row_count"],
        samples=header["samples"],
        flags=header["flags"],
        sources=header["sources"],
        constants=header["constants"],
    )


def _columns_of(by_row: dict[str, list[Numbers]], prefix: str, row: int) -> dict[str, Numbers]:
    """The columns of a row whose names have a prefix, without it."""
    columns = {}
    for name, rows in by_row.items():
        if name.startswith(prefix):
            columns[name.removeprefix(prefix)] = rows[row]
    return columns


def encoded_texts(name: str, rows: Sequence[Sequence[str]]) -> dict[str, Numbers]:
    """The texts of all rows as two tensors: their bytes, and the number of bytes of each text."""
    encoded = []
    for texts in rows:
        encoded += [text.encode(errors="replace") for text in texts]
    return {
        name: np.frombuffer(b"".join(encoded), dtype=np.uint8).copy(),
        f"{name}_bytes": np.array([len(text) for text in encoded], dtype=np.int64),
    }


def _split_texts(tensors: dict[str, Numbers], name: str, lengths: Sequence[int]) -> list[list[str]]:
    """The inverse of `encoded_texts`, for rows of these numbers of texts."""
    content = tensors[name].tobytes()
    texts = []
    start = 0
    for count in tensors[f"{name}_bytes"].tolist():
        texts.append(content[start : start + count].decode())
        start += count
    rows = []
    first = 0
    for length in lengths:
        rows.append(texts[first : first + length])
        first += length
    return rows


def _split(numbers: Numbers, lengths: Sequence[int]) -> list[Numbers]:
    """Numbers that lie end to end, by row."""
    if len(numbers) != sum(lengths):
        raise ValueError("rows of other lengths")
    return np.split(numbers, np.cumsum(lengths)[:-1])
