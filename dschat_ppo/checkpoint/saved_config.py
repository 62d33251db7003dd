"""`config.yaml`, the flags of a run beside its outputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from dschat_ppo.checkpoint.config_diff import FLAGS
from dschat_ppo.checkpoint.folder import CheckpointFolder
from dschat_ppo.checkpoint.manifest import Manifest
from dschat_ppo.common.atomic_files import write_file
from dschat_ppo.common.logging import logger
from dschat_ppo.config.cli import flatten

CONFIG = "config.yaml"
_OF_ONE_START = ("local_rank", "config")


def write_config(config: Any, folder: Path) -> Path:
    """Write the resolved configuration to `folder/config.yaml` durably, readable again through `--config`.

    Raises:
        OSError: it cannot be written; the old content is still there.
    """
    return _write(flatten(config), folder)


def read_config(folder: Path) -> dict[str, Any] | None:
    """Flag -> value as an earlier run left them in an output folder.

    If `config.yaml` cannot be read, it is written again from the newest intact checkpoint.

    Returns:
        The flags, or None where neither has them.

    Raises:
        OSError: `config.yaml` cannot be written.
    """
    try:
        saved = yaml.safe_load((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):  # not UTF-8; a date that is none
        saved = None
    return saved if isinstance(saved, dict) else _restore(folder)


def _restore(folder: Path) -> dict[str, Any] | None:
    checkpoints = CheckpointFolder(folder)
    name, _ = checkpoints.newest_intact(checksums=False)
    if name is None:
        return None
    saved = {flag: value for flag, value in Manifest.read(checkpoints.root / name).config.items() if flag in FLAGS}
    path = _write(saved, folder)
    logger().warning(f"{path} could not be read; it is restored from checkpoint {name}")
    return saved


def _write(flags: dict[str, Any], folder: Path) -> Path:
    path = folder / CONFIG
    values = {name: value for name, value in flags.items() if name not in _OF_ONE_START}
    write_file(path, yaml.safe_dump(values, sort_keys=False).encode())
    return path
