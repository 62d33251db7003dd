"""The identity of a run: its flags, its derived batch sizes, and fingerprints of the data, models and files it reads. A
run resumes only from a checkpoint of the same identity; `config_diff.py` decides which differences are allowed."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow
import pyarrow.compute
from datasets import Dataset

from dschat_ppo.checkpoint.config_diff import CONTENTS
from dschat_ppo.common import dist
from dschat_ppo.common.atomic_files import checksum
from dschat_ppo.common.heartbeat import heartbeat
from dschat_ppo.config.cli import flatten
from dschat_ppo.config.steps import StepConfig
from dschat_ppo.data.streaming import StreamedRows
from dschat_ppo.errors import UserError

EVAL_ROWS, TEXT_BLOCKS = "evaluation rows (SHA-256)", "blocks of plain text (SHA-256)"
MANY_ROWS, DIGEST = 50_000, "digest"
_SHORT = 16  # hex digits, enough to detect an accidental change

SAMPLES, SAMPLE_BYTES = 64, 2**16  # read of each large file of weights
_WEIGHTS = ("*.safetensors", "*.bin")
_READ_WHOLE = (
    "config.json", "adapter_config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json", "vocab*",
    "merges.txt", "*.model", "*.jinja",
)  # fmt: skip


@dataclass(frozen=True)
class RunIdentity:
    """What a run computes: flags, derived batch sizes and `input_fingerprints` in `config`, the rows' one in `data`."""

    kind: Literal["sft", "reward", "ppo"]
    config: dict[str, Any]
    data: str


@dataclass(frozen=True)
class RunInputs:
    """What a run reads. The keys and flags name an input in a diff; None: the run has no such input. `rows`: name ->
    further token rows. `models` and `files`: (flag, local folder or path) of each."""

    train: Dataset | StreamedRows
    rows: dict[str, Dataset | None] = field(default_factory=dict)
    models: Sequence[tuple[str, str | None]] = ()
    files: Sequence[tuple[str, str | None]] = ()


def identify_run(
    kind: Literal["sft", "reward", "ppo"], config: StepConfig, inputs: RunInputs, derived: Mapping[str, int]
) -> RunIdentity:
    """The identity of a run. `derived`: derived batch sizes, see `config_diff.PRODUCTS`. Only rank 0, and the first
    rank of each machine, reads the inputs: other ranks have no fingerprints."""
    settings = flatten(config) | dict(derived)
    if not (dist.is_main() or (dist.machines() > 1 and dist.local_rank() == 0)):
        return RunIdentity(kind, settings, "")
    return RunIdentity(kind, settings | input_fingerprints(inputs), rows_fingerprint(inputs.train))


def require_same_on_machines(identity: RunIdentity, versions: Mapping[str, str]) -> None:
    """Require the same flags, data, models and packages on every machine. Collective; nothing on one machine."""
    if dist.machines() == 1:
        return
    settings = {name: str(value) for name, value in identity.config.items() if name != "local_rank"}
    mine = {**settings, "training rows": identity.data[:_SHORT], **{f"version of {n}": v for n, v in versions.items()}}
    found = dist.gather_objects((os.uname().nodename, mine) if dist.local_rank() == 0 else None)
    (first, expected), *others = [machine for machine in found if machine is not None]
    for host, settings in others:
        differing = [name for name in {**expected, **settings} if expected.get(name) != settings.get(name)]
        if differing:
            name = differing[0]
            raise UserError(
                f"machines {first} and {host} differ in {', '.join(differing)} ({expected.get(name)} and "
                f"{settings.get(name)}): start the same command on all machines, with the same files and packages"
            )


def input_fingerprints(inputs: RunInputs) -> dict[str, str]:
    """Name -> first hex digits of the SHA-256 of each input, except the training rows. Evaluation rows are included
    although no step trains on them: they decide which model is the best."""
    found = {name: rows_fingerprint(rows) for name, rows in inputs.rows.items() if rows is not None}
    found |= {contents_of(flag): model_fingerprint(folder) for flag, folder in inputs.models if folder is not None}
    found |= {contents_of(flag): checksum(Path(path)) for flag, path in inputs.files if path is not None}
    return {name: digest[:_SHORT] for name, digest in found.items()}


def contents_of(flag: str) -> str:
    """Name of the fingerprint of the model or file that `flag` names."""
    return f"{CONTENTS}{flag}"


def is_fingerprinted_model(config: Mapping[str, Any], flag: str, folder: str) -> bool:
    """Whether `folder` holds the model that `flag` named in a saved run; True if the run recorded no fingerprint."""
    saved = config.get(contents_of(flag))
    return saved is None or saved == model_fingerprint(folder)[:_SHORT]


def rows_fingerprint(rows: Dataset | StreamedRows) -> str:
    """SHA-256 of the content of all rows in order, as 64 hex digits, independent of how they are stored.

    Of streamed rows it covers the names and sizes of their files, with their first and last bytes, or the revision on
    the hub.

    From `MANY_ROWS` on it covers the column `digest`, if there is one, in which `data.prepare` stores a hash of each
    row: reading a million shuffled rows takes minutes.
    """
    if isinstance(rows, StreamedRows):
        return rows.fingerprint
    digest = hashlib.sha256()
    if len(rows) >= MANY_ROWS and DIGEST in rows.column_names:
        digests = np.concatenate([chunk.to_numpy() for chunk in rows.data.column(DIGEST).chunks])
        if rows._indices is not None:
            digests = digests[rows._indices.column(0).to_numpy()]
        digest.update(digests.astype("<i8").tobytes())
        heartbeat()
        return digest.hexdigest()
    columns = [name for name in rows.column_names if name not in (DIGEST, "source", "prompt_spans")]
    for part in rows.select_columns(columns).with_format("arrow").iter(batch_size=4096):
        if "row" in columns:  # its second line holds what is not a column of the data row
            texts = pyarrow.compute.replace_substring_regex(part.column("row"), r",?\n.*", "}")
            part = part.set_column(columns.index("row"), part.schema.field("row"), texts)
        table = part.replace_schema_metadata(None).combine_chunks()
        stream = pyarrow.BufferOutputStream()
        with pyarrow.ipc.new_stream(stream, table.schema) as writer:
            writer.write_table(table)
        digest.update(stream.getvalue())
        heartbeat()  # only rank 0 does this, for any number of rows
    return digest.hexdigest()


def model_fingerprint(folder: str | Path) -> str:
    """SHA-256 of a model folder, as 64 hex digits: of its configuration and tokenizer, and of samples of its weights.

    For each file of weights it covers the name, the size and `SAMPLES` blocks of `SAMPLE_BYTES`, spread evenly from the
    first byte to the last. Training changes nearly every weight, so any block detects another model. A change of a few
    weights in a large file may lie between two blocks.
    """
    digest = hashlib.sha256()
    for patterns in (_READ_WHOLE, _WEIGHTS):
        for path in sorted({path for pattern in patterns for path in Path(folder).glob(pattern) if path.is_file()}):
            size = path.stat().st_size
            digest.update(f"{path.name}\0{size}\0".encode())
            if patterns is _READ_WHOLE or size <= SAMPLES * SAMPLE_BYTES:
                digest.update(path.read_bytes())
                heartbeat()
                continue
            with path.open("rb", buffering=0) as file:
                for number in range(SAMPLES):
                    file.seek(number * (size - SAMPLE_BYTES) // (SAMPLES - 1))
                    digest.update(file.read(SAMPLE_BYTES))
                    heartbeat()
    return digest.hexdigest()
