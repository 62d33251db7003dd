"""`config.yaml` and `metrics.jsonl` in the output folder of a run: restored from a checkpoint when they are damaged."""

from __future__ import annotations

import hashlib
import json
from itertools import count
from pathlib import Path
from typing import Any

import yaml

from dschat_ppo.checkpoint.config_diff import FLAGS
from dschat_ppo.checkpoint.folder import CheckpointFolder
from dschat_ppo.checkpoint.manifest import Manifest
from dschat_ppo.common.atomic_files import sync_entries, write_file
from dschat_ppo.common.logging import logger
from dschat_ppo.config.cli import flatten
from dschat_ppo.config.steps import StepConfig
from dschat_ppo.monitor.writers import METRICS

CONFIG = "config.yaml"
_OF_ONE_START = ("local_rank", "config")  # flags that describe how the command was started, not the run


def write_config(config: StepConfig, folder: Path) -> Path:
    """Write the resolved configuration to `folder/config.yaml`, durably, in the format that `--config` reads."""
    return _write_flags(flatten(config), folder)


def read_config(folder: Path) -> dict[str, Any] | None:
    """The flags of the earlier run in an output folder, by name; None if neither file has them. If `config.yaml` cannot
    be read, it is restored from the newest intact checkpoint."""
    try:
        saved = yaml.safe_load((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):  # ValueError: not UTF-8, or an invalid date
        saved = None
    if isinstance(saved, dict):
        return saved
    checkpoints = CheckpointFolder(folder)
    name, _ = checkpoints.newest_intact(checksums=False)
    if name is None:
        return None
    saved = {flag: value for flag, value in Manifest.read(checkpoints.root / name).config.items() if flag in FLAGS}
    path = _write_flags(saved, folder)
    logger().warning(f"{path} could not be read; it is restored from checkpoint {name}")
    return saved


def _write_flags(flags: dict[str, Any], folder: Path) -> Path:
    path = folder / CONFIG
    values = {name: value for name, value in flags.items() if name not in _OF_ONE_START}
    write_file(path, yaml.safe_dump(values, sort_keys=False).encode())
    return path


def restore_metrics(output: Path, checkpoint: Path) -> None:
    """Make `metrics.jsonl` begin with the lines that it had when the checkpoint was saved.

    A file whose lines are not those of the run (changed, doubled, with other line ends, added by hand) is kept under
    another name. Later lines of the run itself stay; `MetricsWriter` cuts them off, since their steps are repeated.
    Checkpoints of an earlier version hold no copy of the metrics: then nothing is done.
    """
    manifest, path = Manifest.read(checkpoint), output / METRICS
    saved = manifest.files.get(METRICS)
    if saved is None:
        return
    content = path.read_bytes() if path.exists() else b""
    is_prefix = hashlib.sha256(content[: saved["bytes"]]).hexdigest() == saved["sha256"]
    if is_prefix and _are_later_steps(content[saved["bytes"] :], manifest.step):
        return
    kept = keep_old_metrics(path) if content else None
    write_file(path, (checkpoint / METRICS).read_bytes())
    logger().warning(
        f"{path} is not as the run wrote it: it is restored from checkpoint {checkpoint.name}"
        + (f", and the old file is kept as {kept.name}" if kept else "")
    )


def keep_old_metrics(path: Path) -> Path:
    """Rename `metrics.jsonl` to the first free `metrics.N.jsonl` in its folder; return that path."""
    number = next(n for n in count(1) if not (path.parent / f"metrics.{n}.jsonl").exists())
    kept = path.rename(path.parent / f"metrics.{number}.jsonl")
    sync_entries(path.parent)
    return kept


def _are_later_steps(lines: bytes, step: int) -> bool:
    """Whether these are lines of later steps in ascending order. The last line may be incomplete."""
    for line in lines.split(b"\n")[:-1]:
        try:
            later = json.loads(line)["step"]
        except (ValueError, KeyError, TypeError):  # not JSON, without a step, not an object
            return False
        if type(later) is not int or later <= step or line.endswith(b"\r"):
            return False
        step = later
    return True
