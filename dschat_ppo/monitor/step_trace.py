"""`--profile`: a trace of one step by torch's profiler, with the phases as named blocks around the operators."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from torch.profiler import ProfilerActivity, profile

from dschat_ppo.common.dist import on_gpu, rank
from dschat_ppo.common.heartbeat import watchdog_paused
from dschat_ppo.common.logging import logger, print_line

FOLDER = "profile"

Item = TypeVar("Item")


class StepTrace:
    """Records one step of a run on this rank (from 1 on; None: nothing), and writes the trace when the step is
    finished. Every rank writes its own file: where ranks wait for each other shows only in the traces of all of
    them."""

    def __init__(self, output: Path, step: int | None):
        self.output = output
        self.step = step
        self._is_finished = False

    @property
    def file(self) -> Path:
        """The trace of this rank."""
        return self.output / FOLDER / f"step_{self.step}_rank_{rank()}.json.gz"

    def around(self, steps: Iterable[Item], first: int) -> Iterator[Item]:
        """Yield the items of `steps`, each of which is the work of one step, and record what the caller does with one.
        `first` is the number of the first step. If the caller's loop ends before the step is finished, no trace is
        written. If it ends by an exception after `finish`, such as the stop at a checkpoint, the trace is written."""
        for number, item in enumerate(steps, first):
            if number == self.step:
                with self._recorded():
                    yield item
            else:
                yield item

    def finish(self, step: int) -> None:
        """Mark step `step` as finished: what follows in the loop, such as the checkpoint, may end the run."""
        self._is_finished = step == self.step

    @contextmanager
    def _recorded(self) -> Iterator[None]:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # of torch's profiler, which prints its starts and stops
        recorder = profile(activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu())
        recorder.start()
        try:
            yield
            self._is_finished = True
        finally:
            recorder.stop()
            if self._is_finished:
                self._write(recorder)

    def _write(self, recorder: profile) -> None:
        """Write the trace. If it cannot be written, a line says so: the run is worth more than its trace."""
        draft = self.file.with_name(f".{self.file.name}")
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with watchdog_paused():  # a large trace takes minutes
                recorder.export_chrome_trace(str(draft))
            draft.replace(self.file)
        except OSError as problem:
            print_line(f"--profile: {self.file} cannot be written, and the run continues: {problem.strerror}")
            return
        logger().info(
            f"--profile: the trace of step {self.step} is {self.file}; each other rank has its own file. Open it at "
            "https://ui.perfetto.dev or chrome://tracing"
        )


NO_TRACE = StepTrace(Path(), None)
