"""Small checkpoints for the tests: real files and a real manifest, no models."""

from pathlib import Path
from typing import Any

from dschat_ppo.checkpoint.identity import RunIdentity
from dschat_ppo.checkpoint.store import CheckpointFolder, Manifest, checkpoint_name, describe_file
from dschat_ppo.config.cli import parse
from dschat_ppo.config.step_config import flatten

CONTENT = {
    "rank_0.pt": b"of rank 0",
    "rank_1.pt": b"of rank 1, longer",
    "actor/weights.pt": b"\x00" * 4096,
}


def manifest_of(folder: Path, **changes: Any) -> Manifest:
    """The manifest of the files that are in `folder`."""
    files = {
        str(p.relative_to(folder)): describe_file(p)
        for p in sorted(folder.rglob("*"))
        if p.is_file()
    }
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


ROWS = "a" * 64  # fingerprint of the training rows


def config_of(output: Path, *more: str):
    """A configuration of step 1."""
    words = [
        "--model_name_or_path",
        "m",
        "--zero_stage",
        "2",
        "--data_path",
        "d",
        "--output_dir",
        str(output),
    ]
    return parse("sft", [*words, *more])


def identity_of(output: Path, *more: str, data: str = ROWS) -> RunIdentity:
    """The identity of a run under `config_of`."""
    return RunIdentity("sft", flatten(config_of(output, *more)) | {"rows_per_update": 8}, data)


def save_checkpoint(output: Path, step: int, update: int = 0) -> Path:
    """A checkpoint of this run as the checkpoint manager saves it, with one file."""
    folder, name = CheckpointFolder(output), checkpoint_name(step, update)
    partial = folder.make_partial(name)
    (partial / "shared.pt").write_bytes(bytes(range(200)))
    files = {"shared.pt": describe_file(partial / "shared.pt")}
    config = identity_of(output).config
    Manifest("sft", step, update, 2, config, {"torch": "2"}, ROWS, files, False, 17, "2026").write(
        partial
    )
    folder.commit(name)
    return folder.root / name


def flip(path: Path) -> None:
    """Change one bit of a file."""
    content = bytearray(path.read_bytes())
    content[50] ^= 1
    path.write_bytes(bytes(content))


class _NoCheckpoints:
    """In the place of a `CheckpointManager`: saves nothing and never stops."""

    def save_if_due(self) -> None:
        pass

    def stop_requested(self) -> bool:
        return False

    def stop_if(self, reason: str | None) -> None:
        pass


NO_CHECKPOINTS: Any = _NoCheckpoints()
