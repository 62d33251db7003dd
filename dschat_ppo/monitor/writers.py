"""Writers of `metrics.jsonl`, whose metrics trackers get too, of other files of JSON lines, which
are cut back when a run resumes, and of `config.yaml`, `result.json`, `starts.jsonl`."""

from __future__ import annotations

import json
import math
import os
import platform
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml

import dschat_ppo
from dschat_ppo.common.atomic_files import storage_errors, sync_entries, sync_file, write_file
from dschat_ppo.common.dist import is_main, on_main
from dschat_ppo.common.logging import logger
from dschat_ppo.common.paths import CONFIG, METRICS, RESULT, STARTS
from dschat_ppo.errors import StopRequested, in_one_line
from dschat_ppo.monitor.trackers import SampledResponse, Start, Tracker, Tracking, open_trackers


class JsonLines:
    """Rank 0 appends lines to a file; the other ranks write nothing. A `StorageError` is raised on
    rank 0 only.

    Save `saved_offset()` in the checkpoints of the run. A run that resumes sets `offset` to it
    before `begin`, which removes the lines after it: their steps run again. A run from scratch
    begins at offset 0. `begin` does not create the file; the first `append` does, also without
    lines.
    """

    def __init__(self, path: Path):
        self.path = path
        self.offset = 0  # length in bytes at the checkpoint from which the run resumes

    def begin(self) -> None:
        """Cut the file back to `offset`, if it exists and is longer; of a shorter one, remove an
        incomplete line."""
        if not is_main() or not self.path.exists():
            return
        with storage_errors(self.path), self.path.open("rb+") as file:
            if file.seek(0, os.SEEK_END) >= self.offset:
                file.truncate(self.offset)
            else:
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)

    def append(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Append one line for each object; NaN and infinity become null."""
        if not is_main():
            return
        texts = [json.dumps(finite_or_null(line), allow_nan=False) for line in lines]
        content = "".join(f"{text}\n" for text in texts).encode()
        with storage_errors(self.path):
            is_new = not self.path.exists()
            with self.path.open("ab") as file:
                file.write(content)
            if is_new:
                sync_entries(self.path.parent)

    def saved_offset(self) -> int:
        """Length of the file in bytes, after syncing it to disk; 0 without a file and on ranks
        other than 0."""
        if not is_main() or not self.path.exists():
            return 0
        with storage_errors(self.path), self.path.open("rb") as file:
            sync_file(file.fileno())
            return file.seek(0, os.SEEK_END)


def finite_or_null(value: Any) -> Any:
    """`value`, of dicts, lists, texts and numbers, with None for each NaN and infinity, which JSON
    lacks."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: finite_or_null(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite_or_null(item) for item in value]
    return value


# flags that describe how the command was started, not the run
_OF_ONE_START = ("local_rank", "config")
_LIBRARIES = (
    "torch",
    "deepspeed",
    "transformers",
    "accelerate",
    "datasets",
    "tokenizers",
    "peft",
    "bitsandbytes",
)


class MetricsWriter:
    """Rank 0 writes the metrics of each step as a line of JSON to `metrics.jsonl`, and to trackers.
    Errors of files and trackers are raised on rank 0 only. `resumed` is (`saved_offset` of the
    checkpoint from which the run resumes, first step to run). Lines after the offset are removed,
    because their steps run again. None: a new file."""

    def __init__(
        self, folder: Path, tracking: Tracking | None, resumed: tuple[int, int] | None = None
    ):
        self._lines = JsonLines(folder / METRICS)
        self._trackers: list[Tracker] = []
        self._lines.append([])  # makes the file
        start = Start()
        if resumed:
            offset, first_step = resumed
            self._lines.offset = offset
            written = -1
            if is_main() and tracking:  # before the lines are removed
                written = _last_step(self._lines.path)
            start = Start(first_step, written)
        self._lines.begin()
        if is_main() and tracking is not None:
            self._trackers = open_trackers(tracking, start)

    def saved_offset(self) -> int:
        """Length of `metrics.jsonl` in bytes, after syncing it to disk; 0 on ranks other than 0."""
        return self._lines.saved_offset()

    def write(
        self, step: int, metrics: dict[str, float], responses: Sequence[SampledResponse] = ()
    ) -> None:
        """Write the metrics of one step; NaN and infinity become null in the file. `responses` go
        to trackers only."""
        self._lines.append([{"step": step, "time": round(time.time(), 3), **metrics}])
        self._with_trackers(lambda tracker: tracker.write(step, metrics, responses))

    def _with_trackers(self, act: Callable[[Tracker], None]) -> None:
        """Let each tracker act. One that cannot write is removed, and the run continues: training
        is worth more than its curves, which `metrics.jsonl` has too."""
        for tracker in list(self._trackers):
            try:
                act(tracker)
            except tracker.failures as problem:
                self._trackers.remove(tracker)
                logger().warning(
                    f"{tracker.name} cannot write, and the run continues without it:"
                    f" {in_one_line(problem)}"
                )

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        succeeded = kind is None or issubclass(kind, StopRequested)
        self._with_trackers(lambda tracker: tracker.close(succeeded))


def _last_step(metrics: Path) -> int:
    """The step of the last line of `metrics.jsonl` that has one; -1 without any. A power loss may
    leave other bytes."""
    for line in reversed(metrics.read_bytes().splitlines()):
        with suppress(ValueError, TypeError, LookupError):
            return int(json.loads(line)["step"])
    return -1


def is_finished(folder: Path) -> bool:
    """Whether `result.json` exists and is complete, which marks a finished run."""
    try:
        return isinstance(json.loads((folder / RESULT).read_bytes()), dict)
    except (OSError, ValueError):
        return False


def write_result(folder: Path, result: Mapping[str, Any], name: str = RESULT) -> None:
    """Write `result.json` durably on rank 0; it is the last file of a run and marks it as finished.
    `models.json`, the table of the models, is written in the same way at the start. NaN and
    infinity become null. Collective: a `StorageError` is raised on every rank."""

    def write() -> None:
        content = json.dumps(finite_or_null(result), indent=2) + "\n"
        with storage_errors(folder / name):
            write_file(folder / name, content.encode())

    on_main(write)


def write_config(flags: Mapping[str, Any], folder: Path) -> Path:
    """Write flags by name to `folder/config.yaml`, durably, in the format that `--config` reads."""
    values = {name: value for name, value in flags.items() if name not in _OF_ONE_START}
    write_file(folder / CONFIG, yaml.safe_dump(values, sort_keys=False).encode())
    return folder / CONFIG


def package_versions() -> dict[str, str]:
    """Package -> version, of this one, Python, and the libraries that are installed."""
    versions = {"dschat_ppo": dschat_ppo.__version__, "python": platform.python_version()}
    for library in _LIBRARIES:
        with suppress(PackageNotFoundError):  # an extra
            versions[library] = version(library)
    return versions


def record_start(folder: Path, step: int, world_size: int) -> None:
    """Add a line to `starts.jsonl`, durably, on rank 0. `step`: the first one that this start
    runs."""
    line = {
        "step": step,
        "time": round(time.time(), 3),
        "world_size": world_size,
        "versions": package_versions(),
    }
    lines = JsonLines(folder / STARTS)
    lines.append([line])
    lines.saved_offset()  # syncs it to the disk
