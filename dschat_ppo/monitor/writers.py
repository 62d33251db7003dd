"""Where metrics go: `metrics.jsonl` always, TensorBoard if asked for."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from dschat_ppo.common.atomic_files import sync_entries, sync_file, write_file
from dschat_ppo.common.dist import broadcast_object, is_main
from dschat_ppo.common.logging import logger
from dschat_ppo.errors import StorageError

RESULT, METRICS = "result.json", "metrics.jsonl"


class MetricsWriter:
    """Rank 0 writes one JSON object a line to `metrics.jsonl`, and mirrors its numbers to TensorBoard.

    Args:
        folder: of the outputs.
        tensorboard: TensorBoard folder; None for none.
        resumed: (`saved_offset` when the state that a run goes on from was saved, the first step to come); lines from
            there on are cut off, since those steps are done again. None: a new file.

    A file that is shorter than what was saved has lost lines of steps that are done: a warning says so.
    """

    def __init__(self, folder: Path, tensorboard: Path | None, resumed: tuple[int, int] | None = None):
        self._file: Any = None
        self._board: Any = None
        if is_main():
            self._file = (folder / METRICS).open("ab")
            sync_entries(folder)
            self._begin_at(resumed[0] if resumed else 0)
            if tensorboard is not None:
                from torch.utils.tensorboard import SummaryWriter

                self._board = SummaryWriter(str(tensorboard), purge_step=resumed[1] if resumed else None)

    def saved_offset(self) -> int:
        """Bytes of `metrics.jsonl`, all of them on the disk; 0 on the ranks that do not write.

        Raises:
            StorageError: they cannot be put there; on rank 0 alone.
        """
        if self._file is None:
            return 0
        try:
            sync_file(self._file.fileno())
            return int(self._file.seek(0, os.SEEK_END))
        except OSError as problem:
            raise StorageError(_cannot_write(self._file.name, problem)) from problem

    def copy_to(self, file: Path) -> None:
        """Write what `metrics.jsonl` holds to another file, durably. On rank 0.

        Raises:
            OSError: it cannot be written.
        """
        write_file(file, Path(self._file.name).read_bytes())

    def _begin_at(self, offset: int) -> None:
        there = self._file.tell()
        if there < offset:
            logger().warning(
                f"{self._file.name}: has {there} bytes, but {offset} when the checkpoint was saved from which the run "
                "goes on: lines of steps that are done are lost"
            )
            with Path(self._file.name).open("rb") as lines:  # the last one may have been cut
                offset = sum(len(line) for line in lines if line.endswith(b"\n"))
        self._file.truncate(offset)

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """Write the metrics of one step; a number that is not finite becomes null in the file.

        Raises:
            StorageError: it cannot be written; on rank 0 alone.
        """
        if self._file is None:
            return
        line: dict[str, float | None] = {"step": step, "time": round(time.time(), 3)}
        line |= _finite_or_null(metrics)
        try:
            self._file.write(f"{json.dumps(line)}\n".encode())
            self._file.flush()
        except OSError as problem:
            raise StorageError(_cannot_write(self._file.name, problem)) from problem
        if self._board is not None:
            for name, value in metrics.items():
                self._board.add_scalar(name, value, step)

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()
        if self._board is not None:
            self._board.close()


def _finite_or_null(metrics: dict[str, float]) -> dict[str, float | None]:
    """JSON has no NaN and no infinity (the gradient norm of an overflowed fp16 step): null stands for them."""
    return {name: value if math.isfinite(value) else None for name, value in metrics.items()}


def is_finished(folder: Path) -> bool:
    """Whether `result.json` is there and whole: the mark of a finished step."""
    try:
        return isinstance(json.loads((folder / RESULT).read_bytes()), dict)
    except (OSError, ValueError):
        return False


def write_result(folder: Path, result: dict[str, float]) -> None:
    """Write `result.json` durably, the mark of a finished step and the last file that it writes. Collective.

    Rank 0 writes. A number that is not finite becomes null.

    Raises:
        StorageError: it cannot be written; on every rank.
    """
    file, problem = folder / RESULT, None
    if is_main():
        try:
            write_file(file, (json.dumps(_finite_or_null(result), indent=2) + "\n").encode())
        except OSError as raised:
            problem = _cannot_write(str(file), raised)
    problem = broadcast_object(problem)
    if problem is not None:
        raise StorageError(problem)


def _cannot_write(file: str, problem: OSError) -> str:
    return f"{file}: cannot be written ({problem.strerror}); free space, then run the same command again"
