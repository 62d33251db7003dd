"""Step 3 until its first token: `training/step3_ppo/main.py`, which notes on rank 0 when each phase of the start ends.

$STARTUP is JSON: {"main": path of main.py, "file": where the marks go, "began": Unix time of the command}. A mark is
[name, Unix time, CPU seconds of this process and its ended children]. The first one, "launcher", is the start of this
process, with the CPU seconds of the script that starts it, what that script has run before, and DeepSpeed's launcher.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import resource
import runpy
import sys
import time
from types import ModuleType
from typing import Any

import psutil

SETTINGS = json.loads(os.environ["STARTUP"])
MARKS: list[tuple[str, float, float]] = []
STEP = "dschat_ppo.ppo.train_ppo"  # the module that holds the step
PHASES = {"prepare data": "checks", "load models": "data", "train": "self-check"}  # phase -> what ends when it begins


def mark(name: str) -> None:
    """Note that a part of the start has ended."""
    parts = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    MARKS.append((name, time.time(), sum(part.ru_utime + part.ru_stime for part in parts)))


def mark_launcher() -> None:
    """The launchers are the parents of this process up to the benchmark."""
    spent = 0.0
    for process in psutil.Process().parents():
        if process.pid == SETTINGS["pid"]:
            break
        spent += sum(process.cpu_times()[:4])  # user and system, its own and those of its ended children
    MARKS.append(("launcher", psutil.Process().create_time(), spent))


class _AfterImport(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports `STEP` as always, and then notes its parts."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != STEP:
            return None
        self.spec = importlib.machinery.PathFinder.find_spec(name, path)
        return importlib.util.spec_from_loader(name, self)

    def exec_module(self, module: ModuleType) -> None:
        self.spec.loader.exec_module(module)  # type: ignore[union-attr]
        mark("imports")
        _note_calls(module)


def _note_calls(step: Any) -> None:
    """Note when the step's function calls the functions that begin its parts, and when the first token is there."""
    announce, begin_run, engines = step.announce, step.begin_run, step.RLHFEngine

    def noting_announce(name: str) -> None:
        announce(name)
        if name in PHASES:
            mark(PHASES[name])
        if name == "train":
            _note_first_token()

    def noting_begin(*args: Any) -> Any:
        begun = begin_run(*args)
        mark("process group")
        return begun

    def noting_engines(*args: Any) -> Any:
        built = engines(*args)
        mark("engines")
        return built

    step.announce, step.begin_run, step.RLHFEngine = noting_announce, noting_begin, noting_engines


def _note_first_token() -> None:
    from dschat_ppo.rollout.continuous_batching import ContinuousBatching

    generate = ContinuousBatching._generate_tokens

    def noting(self: ContinuousBatching, *args: Any) -> Any:
        finished = generate(self, *args)
        mark("first token")
        if os.environ["RANK"] == "0":
            with open(SETTINGS["file"], "w", encoding="utf-8") as file:
                json.dump(MARKS, file)
        os._exit(0)
        return finished

    ContinuousBatching._generate_tokens = noting  # type: ignore[method-assign]


if __name__ == "__main__":
    mark_launcher()
    sys.meta_path.insert(0, _AfterImport())
    runpy.run_path(SETTINGS["main"], run_name="__main__")
