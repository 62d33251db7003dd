"""`metrics.jsonl` of a run that resumes: as the run wrote it, or written again from the copy in the checkpoint."""

from __future__ import annotations

import hashlib
import json
from itertools import count
from pathlib import Path

from dschat_ppo.checkpoint.manifest import Manifest
from dschat_ppo.common.atomic_files import sync_entries, write_file
from dschat_ppo.common.logging import logger
from dschat_ppo.monitor.writers import METRICS


def restore_metrics(output: Path, checkpoint: Path) -> None:
    """Let `metrics.jsonl` begin with the lines that it had when the checkpoint was saved.

    A file that holds other lines than the run wrote (changed, doubled, with other ends, added by hand) is kept under
    another name. Later lines of the run itself stay; `MetricsWriter` cuts them off, since their steps are done again.

    Args:
        output: `--output_dir`.
        checkpoint: in it, from which the run resumes. One of an earlier version holds no copy: nothing is done.

    Raises:
        OSError: the file cannot be written.
    """
    manifest, place = Manifest.read(checkpoint), output / METRICS
    saved = manifest.files.get(METRICS)
    if saved is None:
        return
    there = place.read_bytes() if place.exists() else b""
    begins_so = hashlib.sha256(there[: saved["bytes"]]).hexdigest() == saved["sha256"]
    if begins_so and _are_later(there[saved["bytes"] :], manifest.step):
        return
    kept = keep_aside(place) if there else None
    write_file(place, (checkpoint / METRICS).read_bytes())
    logger().warning(
        f"{place} is not as the run wrote it: it is restored from checkpoint {checkpoint.name}"
        + (f", and the old file is kept as {kept.name}" if kept else "")
    )


def keep_aside(place: Path) -> Path:
    """Rename `metrics.jsonl` to the first free `metrics.N.jsonl` beside it; returns that."""
    number = next(n for n in count(1) if not (place.parent / f"metrics.{n}.jsonl").exists())
    kept = place.rename(place.parent / f"metrics.{number}.jsonl")
    sync_entries(place.parent)
    return kept


def _are_later(lines: bytes, step: int) -> bool:
    """Whether these are lines of later steps, in order, of which the last may be cut."""
    for line in lines.split(b"\n")[:-1]:
        try:
            later = json.loads(line)["step"]
        except (ValueError, KeyError, TypeError):  # not JSON, without a step, not an object
            return False
        if type(later) is not int or later <= step or line.endswith(b"\r"):
            return False
        step = later
    return True
