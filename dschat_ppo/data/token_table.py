"""The token rows of one data set, made once per node in parallel, cached, and memory-mapped.

The rows are read in the order of the file: a step's permutation would make every read a random access. It is applied to
the token rows instead.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
from datasets import Dataset, Features

from dschat_ppo.config.data_flags import DataFlags
from dschat_ppo.data.cache import cached_dataset, token_key
from dschat_ppo.data.lengths import Fitted
from dschat_ppo.data.splits import ORIGIN, Origins
from dschat_ppo.data.tokenise import NOTES, TokeniseSettings, reading_of, token_features, tokenise_batch
from dschat_ppo.errors import UserError
from dschat_ppo.runtime.dataset_workers import data_workers, worker_count

_BATCH_ROWS = 512  # enough for the tokenizer's batches; rows of 10k tokens then take some 100 MB in a worker


@dataclass(frozen=True)
class TokenTable:
    """Token rows of one data set in the order of the file, and what `prepare` must know of each, (N,) arrays.

    Attributes:
        rows: the columns of `token_features`.
        number: int64, of the raw row; rising.
        fitted: int8, see `Fitted`.
        prompt_tokens: int32, before the length limit.
        answer_tokens: int32, of the longest answer before the length limit.
        key: int64, equal for duplicates.
    """

    rows: Dataset
    number: np.ndarray
    fitted: np.ndarray
    prompt_tokens: np.ndarray
    answer_tokens: np.ndarray
    key: np.ndarray
    problems: pyarrow.ChunkedArray

    def problem(self, index: int) -> str:
        """ "MESSAGE\\nREASON" of an unusable row."""
        return str(self.problems[index].as_py())

    def rows_of(self, numbers: np.ndarray) -> np.ndarray:
        """Indices of the token rows that these raw rows gave, in the order of `numbers`: (M,) int64."""
        counts = np.bincount(self.number, minlength=int(numbers.max(initial=-1)) + 1)  # a search would be slower
        first, count = (np.cumsum(counts) - counts)[numbers], counts[numbers]
        before = np.cumsum(count) - count  # token rows of the raw rows before
        return np.repeat(first - before, count) + np.arange(count.sum())


def tokenise_rows(
    raw: Dataset, numbers: np.ndarray, origins: Origins, settings: TokeniseSettings, flags: DataFlags
) -> TokenTable:
    """Tokenise the rows `numbers`, (M,) int64 in any order, of a data set, or take them from the cache. `flags` that
    say how rows are read identify the entry.

    Raises:
        UserError: a row is bad and `--bad_rows` is "error": the one of the lowest number; or no row serves this step.
        StopRequested: the run receives a stop request.
    """
    wanted = np.zeros(len(raw), dtype=bool)
    wanted[numbers] = True
    used = np.packbits(wanted).tobytes()
    key = token_key(raw, settings.tokenizer, hashlib.sha256(used).hexdigest(), *reading_of(settings, flags))
    features = Features({**token_features(settings.use), **NOTES})

    def make(folder: Path) -> Dataset:
        stops = folder / "stops"
        stops.mkdir()
        workers = worker_count(flags.preprocessing_num_workers, len(numbers))
        with data_workers(workers):
            rows = raw.map(
                _map_batch,
                batched=True,
                batch_size=_BATCH_ROWS,
                with_indices=True,
                fn_kwargs={
                    "wanted": wanted,
                    "origins": origins,
                    "settings": settings,
                    "skips": flags.bad_rows != "error",
                    "stops": stops,
                },
                remove_columns=raw.column_names,
                num_proc=workers if workers > 1 else None,
                new_fingerprint=key,
                cache_file_name=str(folder / "rows.arrow"),
                features=features,
            )
        if first := min(stops.iterdir(), default=None):
            raise UserError(first.read_text(encoding="utf-8"))
        if len(rows) == 0:
            is_bad = settings.form.name == "kto" and settings.use == "sft"
            why = "; all answers are labelled bad: --ignore_columns label trains them" if is_bad else ""
            raise UserError(
                f"{settings.source}: no row of this data set serves this step ({settings.form.description}){why}"
            )
        return rows

    rows = cached_dataset(flags.data_output_path, key, make)
    notes = {name: _numbers_in(rows, name) for name in NOTES if name != "problem"}
    return TokenTable(
        rows.select_columns(list(token_features(settings.use))), **notes, problems=rows.data.column("problem")
    )


def _map_batch(
    batch: dict[str, list[Any]],
    indices: list[int],
    wanted: np.ndarray,
    origins: Origins,
    settings: TokeniseSettings,
    skips: bool,
    stops: Path,
) -> pyarrow.Table:
    """Body of `Dataset.map`, in a worker. A problem that stops the run is a file in `stops` named by the row's number:
    workers leave out all batches after it, and the lowest one is the same for any number of workers."""
    schema = Features({**token_features(settings.use), **NOTES}).arrow_schema
    kept = [place for place, number in enumerate(indices) if wanted[number]]
    first = min((int(path.name) for path in stops.iterdir()), default=None)
    if not kept or (first is not None and first < indices[0]):
        return schema.empty_table()
    values = [batch[name] for name in batch]
    raw_rows = [{name: column[place] for name, column in zip(batch, values, strict=True)} for place in kept]
    names = [origins.describe(row.pop(ORIGIN)) for row in raw_rows]
    columns, bad = tokenise_batch(raw_rows, names, settings)
    stopping = next((problem for problem in bad if problem.is_too_long or not skips), None)
    if stopping is not None:
        path = stops / f"{indices[kept[stopping.index]]:015d}"
        path.write_text(stopping.stop_message, encoding="utf-8", errors="replace")
        return schema.empty_table()
    count = len(columns["index"])
    columns["number"] = [indices[kept[index]] for index in columns.pop("index")]
    columns["problem"] = [None] * count
    good = pyarrow.table([pyarrow.array(columns[name], schema.field(name).type) for name in schema.names], schema)
    if not bad:
        return good
    nothing: dict[str, Any] = {"prompt_ids": [], "answers": [], "prompt_spans": [], "row": "{}", "problem": None}
    nothing |= {"step_ends": [], "step_labels": []}
    rows = [
        {name: nothing.get(name, 0) for name in schema.names}
        | {"number": indices[kept[problem.index]], "fitted": int(Fitted.UNUSABLE)}
        | {"problem": f"{problem.message}\n{problem.reason}"}
        for problem in bad
    ]
    both = pyarrow.concat_tables([good, pyarrow.Table.from_pylist(rows, schema)])
    return both.take(np.argsort(both.column("number").to_numpy(), kind="stable"))


def _numbers_in(rows: Dataset, name: str) -> np.ndarray:
    """A column of numbers without a Python object for each row."""
    return np.concatenate([chunk.to_numpy() for chunk in rows.data.column(name).chunks])
