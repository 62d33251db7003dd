"""What a run reads that its flags only name, so that a resumed run can tell whether it is still the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from datasets import Dataset

from dschat_ppo.common.atomic_files import checksum
from dschat_ppo.data.fingerprint import fingerprint
from dschat_ppo.models.model_files import model_fingerprint

EVAL_ROWS, TEXT_BLOCKS = "evaluation rows (SHA-256)", "blocks of plain text (SHA-256)"
SHOWN = 16  # hex digits, enough to tell contents apart that changed by themselves


@dataclass(frozen=True)
class RunInputs:
    """What a run reads.

    `train`: token rows of training. The others by the name that a diff gives them, None where there is nothing:
    `rows`, further token rows; `models`, (flag, local folder) each; `files`, (flag, path) each.
    """

    train: Dataset
    rows: dict[str, Dataset | None] = field(default_factory=dict)
    models: Sequence[tuple[str, str | None]] = ()
    files: Sequence[tuple[str, str | None]] = ()


def input_fingerprints(inputs: RunInputs) -> dict[str, str]:
    """Name -> beginning of a SHA-256 for everything but the training rows, which a manifest holds by themselves.

    Rows of evaluation are among them though nothing is trained on them: the best model is the best by their score.

    Raises:
        OSError: a file cannot be read.
    """
    found = {name: fingerprint(rows) for name, rows in inputs.rows.items() if rows is not None}
    found |= {f"contents of {flag}": model_fingerprint(folder) for flag, folder in inputs.models if folder is not None}
    found |= {f"contents of {flag}": checksum(Path(path)) for flag, path in inputs.files if path is not None}
    return {name: digest[:SHOWN] for name, digest in found.items()}
