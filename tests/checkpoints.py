"""Small checkpoints for the tests: real files and a real manifest, no models."""

from pathlib import Path
from typing import Any

from dschat_ppo.checkpoint.manifest import Manifest, describe_file

CONTENT = {"rank_0.pt": b"of rank 0", "rank_1.pt": b"of rank 1, longer", "actor/weights.pt": b"\x00" * 4096}


def manifest_of(folder: Path, **changes: Any) -> Manifest:
    """The manifest of the files that are in `folder`."""
    files = {str(p.relative_to(folder)): describe_file(p) for p in sorted(folder.rglob("*")) if p.is_file()}
    values = {
        "kind": "ppo",
        "step": 12,
        "update": 3,
        "world_size": 2,
        "config": {"learning_rate": 1e-5, "data_path": ["a b", "c"], "dropout": None},
        "versions": {"dschat_ppo": "0.1.0", "torch": "2.13.0"},
        "data": "0f" * 16,
        "files": files,
        "best": False,
        "metrics_offset": 1234,
        "saved_at": "2026-11-21T08:00:00+00:00",
    }
    return Manifest(**{**values, **changes})


def fill(folder: Path, **changes: Any) -> Path:
    """Write a checkpoint's files and manifest into an empty folder."""
    for name, content in CONTENT.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    manifest_of(folder, **changes).write(folder)
    return folder
