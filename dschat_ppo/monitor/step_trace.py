"""`--profile`: a trace of one step by torch's profiler, with the phases as named blocks around the
operators."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from torch.profiler import ProfilerActivity, profile

from dschat_ppo.common.dist import on_gpu, rank
from dschat_ppo.common.heartbeat import watchdog_paused
from dschat_ppo.common.logging import logger, print_line

FOLDER = "profile"

Item = TypeVar("Item")


class StepTrace:
    """Records one step of a run on this rank (from 1 on; None: nothing). Every rank writes its own
    file: where ranks wait for each other shows only in the traces of all of them."""

    def __init__(self, output: Path, step: int | None):
        self.output = output
        self.step = step

    @property
    def file(self) -> Path:
        return self.output / FOLDER / f"step_{self.step}_rank_{rank()}.json.gz"

    def around(self, steps: Iterable[Item], first: int) -> Iterator[Item]:
        """Yield the items of `steps`, each of which is the work of one step, and record what the
        caller does with one, also if it ends by an exception. `first` is the number of the first
        step."""
        for step, item in enumerate(steps, first):
            if step != self.step:
                yield item
                continue
            # of torch's profiler, which prints its starts and stops
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")
            activities = [ProfilerActivity.CPU]
            if on_gpu():
                activities.append(ProfilerActivity.CUDA)
            recorder = profile(activities=activities)
            recorder.start()
            try:
                yield item
            finally:
                recorder.stop()
                self._write(recorder)

    def _write(self, recorder: profile) -> None:
        """Write the trace. If it cannot be written, a line says so: the run is worth more than its
        trace."""
        draft = self.file.with_name(f".{self.file.name}")
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with watchdog_paused():  # a large trace takes minutes
                recorder.export_chrome_trace(str(draft))
            draft.replace(self.file)
        except OSError as problem:
            print_line(
                f"--profile: {self.file} cannot be written, and the run continues:"
                f" {problem.strerror}"
            )
            return
        logger().info(
            f"--profile: the trace of step {self.step} is {self.file}; each other rank has its own"
            " file. Open it at https://ui.perfetto.dev or chrome://tracing"
        )


NO_TRACE = StepTrace(Path(), None)
