"""`manifest.json`: the description of a checkpoint, written as the last of its files, and the check for damage."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypedDict

from dschat_ppo.common.atomic_files import checksum, write_text
from dschat_ppo.common.paths import is_pipe_or_device
from dschat_ppo.errors import UserError

FORMAT = 1  # raise it when older code cannot read new checkpoints
FILE_NAME = "manifest.json"
_OWN_CHECKSUM = "sha256"
_RANK = re.compile(r"(?:^|/|zero_pp_)rank_(\d+)")  # rank_1.pt, and DeepSpeed's zero_pp_rank_1_mp_rank_00_*.pt


class FileEntry(TypedDict):
    """Size and SHA-256 of a file."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The description of a checkpoint.

    Attributes:
        step: optimizer steps done (PPO steps in step 3).
        update: updates done of the PPO step after it.
        config: `RunIdentity.config`: flags, derived batch sizes and fingerprints of the inputs.
        data: fingerprint of the training rows.
        files: path inside the folder -> size and checksum.
        best: whether the evaluation at this checkpoint is the best so far.
        metrics_offset: length of `metrics.jsonl` in bytes at this checkpoint.
        saved_at: ISO 8601.
    """

    kind: Literal["sft", "reward", "ppo"]
    step: int
    update: int
    world_size: int
    config: dict[str, Any]
    versions: dict[str, str]
    data: str
    files: dict[str, FileEntry]
    best: bool
    metrics_offset: int
    saved_at: str
    format: int = FORMAT

    def write(self, folder: Path) -> None:
        """Write `folder/manifest.json` durably. It is the last file of a checkpoint."""
        content = asdict(self)
        sealed = {**content, _OWN_CHECKSUM: _seal(content)}
        write_text(folder / FILE_NAME, json.dumps(sealed, indent=1) + "\n")

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """The manifest of a checkpoint folder. A `UserError` names the folder and the fault."""
        found = read_manifest(folder)
        if isinstance(found, str):
            raise UserError(f"checkpoint {folder}: {found}")
        return found


def describe_file(path: Path) -> FileEntry:
    """The entry of a file in `Manifest.files`."""
    return {"bytes": path.stat().st_size, "sha256": checksum(path)}


def damage(folder: Path, checksums: bool = True) -> str | None:
    """The first fault of a checkpoint folder; None: it is intact.

    All sizes are checked before the first checksum, because checksums read everything. Without `checksums` only those
    and the manifest are, and the manifest's own checksum.
    """
    manifest = read_manifest(folder)
    if isinstance(manifest, str):
        return manifest
    for fault_of in (_size_fault, _content_fault) if checksums else (_size_fault,):
        for name, entry in manifest.files.items():
            if is_pipe_or_device(folder / name):
                return f"{name}{_whose(name)} is not a regular file"
            try:
                fault = fault_of(folder / name, entry)
            except FileNotFoundError:
                return f"{name}{_whose(name)} is missing"
            except OSError as problem:
                return f"{name}{_whose(name)} cannot be read ({problem.strerror})"
            if fault:
                return f"{name}{_whose(name)}{fault}"
    return None


def _size_fault(path: Path, entry: FileEntry) -> str | None:
    size, expected = path.stat().st_size, entry["bytes"]
    if size < expected:
        return f" is truncated: {size} of {expected} bytes"
    return f" has {size} bytes instead of {expected}" if size > expected else None


def _content_fault(path: Path, entry: FileEntry) -> str | None:
    return ": checksum differs: the file changed on disk" if checksum(path) != entry["sha256"] else None


def _whose(name: str) -> str:
    found = _RANK.search(name)
    return f" of rank {int(found[1])}" if found else ""


def _seal(content: dict[str, Any]) -> str:
    """Checksum of the manifest itself, independent of the layout of its JSON."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def read_manifest(folder: Path) -> Manifest | str:
    """The manifest of a checkpoint folder, or its fault."""
    if is_pipe_or_device(folder / FILE_NAME):
        return f"{FILE_NAME} is not a regular file"
    try:
        content = json.loads((folder / FILE_NAME).read_bytes())
    except FileNotFoundError:
        return f"{FILE_NAME} is missing"
    except OSError as problem:
        return f"{FILE_NAME} cannot be read ({problem.strerror})"
    except (ValueError, RecursionError):
        return f"{FILE_NAME} is damaged: it is not JSON"
    if not isinstance(content, dict):
        return f"{FILE_NAME} is damaged: it holds no settings"
    made = content.get("format")
    if type(made) is not int or made < 1:
        return f"{FILE_NAME} is damaged: it does not say its format"
    if made > FORMAT:
        versions = content.get("versions")
        maker = versions.get("dschat_ppo") if isinstance(versions, dict) else None
        by = f" (dschat_ppo {maker})" if maker else ""
        return f"is of format {made}, made by a newer version{by}; this one knows formats up to {FORMAT}"
    missing = [field.name for field in fields(Manifest) if field.default is MISSING and field.name not in content]
    if missing:
        return f"{FILE_NAME} is damaged: it lacks {', '.join(missing)}"
    seal = content.pop(_OWN_CHECKSUM, None)
    if seal != _seal(content):
        return f"{FILE_NAME}: checksum differs: the file changed on disk"
    return Manifest(**{field.name: content[field.name] for field in fields(Manifest) if field.name in content})
