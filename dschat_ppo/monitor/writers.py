"""Where metrics go: `metrics.jsonl` always, TensorBoard if asked for."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from dschat_ppo.common.dist import is_main
from dschat_ppo.errors import StorageError

RESULT, METRICS = "result.json", "metrics.jsonl"


class MetricsWriter:
    """Rank 0 writes one JSON object a line to `metrics.jsonl`, and mirrors its numbers to TensorBoard.

    Args:
        folder: of the outputs.
        tensorboard: TensorBoard folder; None for none.
        resumed: (`saved_offset` when the state that a run goes on from was saved, the first step to come); lines from
            there on are cut off, since those steps are done again. None: a new file.
    """

    def __init__(self, folder: Path, tensorboard: Path | None, resumed: tuple[int, int] | None = None):
        self._file: Any = None
        self._board: Any = None
        if is_main():
            self._file = (folder / METRICS).open("ab")
            self._file.truncate(min(resumed[0], self._file.tell()) if resumed else 0)
            if tensorboard is not None:
                from torch.utils.tensorboard import SummaryWriter

                self._board = SummaryWriter(str(tensorboard), purge_step=resumed[1] if resumed else None)

    def saved_offset(self) -> int:
        """Bytes of `metrics.jsonl`, all of them on the disk; 0 on the ranks that do not write."""
        if self._file is None:
            return 0
        os.fsync(self._file.fileno())
        return int(self._file.seek(0, os.SEEK_END))

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
            raise StorageError(f"{self._file.name}: cannot be written ({problem.strerror})") from problem
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


def write_result(folder: Path, result: dict[str, float]) -> None:
    """Write `result.json`, the mark of a finished step. Rank 0 only; the last file that a step writes.

    A number that is not finite becomes null.
    """
    if is_main():
        temporary = folder / f"{RESULT}.partial"
        temporary.write_text(json.dumps(_finite_or_null(result), indent=2) + "\n", encoding="utf-8")
        temporary.replace(folder / RESULT)
