"""What a checkpoint says of itself in `manifest.json`, written last of its files, and whether they are as it says."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypedDict

from dschat_ppo.checkpoint.state_file import write_text
from dschat_ppo.common.atomic_files import checksum
from dschat_ppo.errors import UserError

FORMAT = 1  # raise it when a checkpoint of today could not be read by the code of before
FILE_NAME = "manifest.json"
_OWN_CHECKSUM = "sha256"
_RANK = re.compile(r"(?:^|/|zero_pp_)rank_(\d+)")  # rank_1.pt, and DeepSpeed's zero_pp_rank_1_mp_rank_00_*.pt


class FileEntry(TypedDict):
    """Size and SHA-256 of a file."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """A checkpoint.

    `kind`: the step; `step`: optimizer steps done (PPO steps in step 3), `update`: updates done of the PPO step after
    it; `world_size`: number of ranks; `config`: flag -> value, and what the flags amount to (see `changes`);
    `versions`: package -> version; `data`: fingerprint of the token rows; `files`: path inside the folder -> size and
    checksum; `best`: whether it is that of the best evaluation so far; `metrics_offset`: bytes of `metrics.jsonl` that
    belong to it; `saved_at`: ISO 8601; `format`: of the checkpoint.
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
        """Write `folder/manifest.json` durably; the last of a checkpoint's files.

        Raises:
            OSError: it cannot be written.
        """
        content = asdict(self)
        sealed = {**content, _OWN_CHECKSUM: _seal(content)}
        write_text(folder / FILE_NAME, json.dumps(sealed, indent=1) + "\n")

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """The manifest of a checkpoint folder.

        Raises:
            UserError: there is none, or it cannot be used; the message names folder and fault.
        """
        found = read_manifest(folder)
        if isinstance(found, str):
            raise UserError(f"checkpoint {folder}: {found}")
        return found


def describe_file(path: Path) -> FileEntry:
    """Size and checksum of a file as they go into `Manifest.files`."""
    return {"bytes": path.stat().st_size, "sha256": checksum(path)}


def damage(folder: Path, checksums: bool = True) -> str | None:
    """The first fault found in a checkpoint folder; None: it is intact.

    All sizes are looked at before the first checksum, which takes reading everything. The manifest's own checksum is
    looked at in any case.

    Args:
        folder: of the checkpoint.
        checksums: False looks at the manifest and the sizes alone.
    """
    manifest = read_manifest(folder)
    if isinstance(manifest, str):
        return manifest
    look = (_wrong_size, _wrong_content) if checksums else (_wrong_size,)
    for fault_of in look:
        for name, entry in manifest.files.items():
            try:
                fault = fault_of(folder / name, entry)
            except FileNotFoundError:
                return f"{name}{_whose(name)} is missing"
            except OSError as problem:
                return f"{name}{_whose(name)} cannot be read ({problem.strerror})"
            if fault:
                return f"{name}{_whose(name)}{fault}"
    return None


def _wrong_size(path: Path, entry: FileEntry) -> str | None:
    there, due = path.stat().st_size, entry["bytes"]
    if there < due:
        return f" is truncated: {there} of {due} bytes"
    return f" has {there} bytes instead of {due}" if there > due else None


def _wrong_content(path: Path, entry: FileEntry) -> str | None:
    return ": checksum differs: the file changed on disk" if checksum(path) != entry["sha256"] else None


def _whose(name: str) -> str:
    found = _RANK.search(name)
    return f" of rank {int(found[1])}" if found else ""


def _seal(content: dict[str, Any]) -> str:
    """Checksum of the manifest itself, independent of how its JSON is laid out."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def read_manifest(folder: Path) -> Manifest | str:
    """The manifest of a checkpoint folder, or what is wrong with it."""
    try:
        content = json.loads((folder / FILE_NAME).read_bytes())
    except FileNotFoundError:
        return f"{FILE_NAME} is missing"
    except OSError as problem:
        return f"{FILE_NAME} cannot be read ({problem.strerror})"
    except ValueError:
        return f"{FILE_NAME} is damaged: it is not JSON"
    if not isinstance(content, dict):
        return f"{FILE_NAME} is damaged: it holds no settings"
    return _checked(content)


def _checked(content: dict[str, Any]) -> Manifest | str:
    made = content.get("format")
    if type(made) is not int or made < 1:
        return f"{FILE_NAME} is damaged: it does not say its format"
    if made > FORMAT:
        return f"is of format {made}, made by a newer version{_maker(content)}; this one knows formats up to {FORMAT}"
    missing = [field.name for field in fields(Manifest) if field.name not in content]
    if missing:
        return f"{FILE_NAME} is damaged: it lacks {', '.join(missing)}"
    seal = content.pop(_OWN_CHECKSUM, None)
    if seal != _seal(content):
        return f"{FILE_NAME}: checksum differs: the file changed on disk"
    return Manifest(**{field.name: content[field.name] for field in fields(Manifest)})


def _maker(content: dict[str, Any]) -> str:
    versions = content.get("versions")
    made = versions.get("dschat_ppo") if isinstance(versions, dict) else None
    return f" (dschat_ppo {made})" if made else ""
