"""What a fault cost a run: processes left over, saved steps lost, different numbers; and the table of all faults."""

from __future__ import annotations

import json
import os
import random
import re
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from measure import markdown
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parent.parent
MEASURED = ("time", "seconds", "memory/")  # "seconds": of result.json


@dataclass(frozen=True)
class Outcome:
    """How the first start of a run ended, and how its second start did.

    `met`: the fault came before the end; `code`: of the first start; `left`: processes and segments of shared memory;
    `steps_lost`: saved, and computed again; `equal`: metrics and weights are those of the run without a fault.
    """

    name: str
    met: bool
    code: int
    left: int
    steps_lost: int
    equal: bool

    @property
    def survived(self) -> bool:
        return self.left == 0 and self.steps_lost == 0 and self.equal


def free_port() -> int:
    """A port below those that systems give to connections, so that no other launch takes it meanwhile."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def launcher(ranks: int) -> list[str]:
    """The command that starts ranks, before the script; each has a port of its own."""
    words = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_accelerators", str(ranks)]
    return [*words, "--master_port", str(free_port())]


def environment(tree: Path = ROOT, **more: str) -> dict[str, str]:
    """Variables of a command that runs the code of `tree` with one thread a process."""
    paths = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    paths["PYTHONPATH"] = f"{tree}:{os.environ.get('PYTHONPATH', '')}"
    return {**os.environ, **paths, "OMP_NUM_THREADS": "1", **more}


def logged(command: list[str], log: Path, folder: Path, env: dict[str, str]) -> str:
    """Run a command in `folder`, its output in `log`; returns that. `SystemExit` with its end if it fails."""
    with log.open("w", encoding="utf-8") as file:
        code = subprocess.run(
            command, cwd=folder, env=env, stdout=file, stderr=subprocess.STDOUT, check=False
        ).returncode
    said = log.read_text(encoding="utf-8", errors="replace")
    if code:
        end = "\n".join(said.splitlines()[-25:])
        raise SystemExit(f"{end}\nexit code {code}; the whole log is {log}")
    return said


def left_over(word: str, timeout: float = 40.0) -> int:
    """Processes that still have `word` in their command line after a while; they are killed."""
    deadline = time.monotonic() + timeout
    while True:
        found = [p for p in psutil.process_iter(["cmdline"]) if any(word in part for part in p.info["cmdline"] or [])]
        if not found or time.monotonic() > deadline:
            break
        time.sleep(0.2)
    for process in found:
        process.kill()
    return len(found)


def comes_in_time(process: subprocess.Popen[str], folder: Path, pattern: str, delay: float) -> bool:
    """Wait for files and then `delay` seconds; whether the process still runs."""
    while process.poll() is None and not any(folder.glob(pattern)):
        time.sleep(0.02)
    with suppress(subprocess.TimeoutExpired):
        process.wait(delay)
    return process.poll() is None


def is_finished(output: Path) -> bool:
    """Whether the run in this output folder is finished."""
    return (output / "result.json").exists()


def lost_steps(first: str, both: str) -> int:
    """Steps that the first start saved and the second computed again, from the log of the first and that of both."""
    saved = re.findall(r"checkpoint step_(\d+)\S*: saved", first)
    resumed = re.findall(r"resuming from .*step_(\d+)", both)
    return max(0, max(map(int, saved), default=0) - (int(resumed[-1]) if resumed else 0))


def metrics_of(output: Path) -> list[dict[str, Any]]:
    """Lines of `metrics.jsonl` without what measures the machine."""
    lines = (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [without_times(json.loads(line)) for line in lines]


def without_times(line: dict[str, Any]) -> dict[str, Any]:
    """A line without what measures the machine."""
    return {name: value for name, value in line.items() if not name.startswith(MEASURED)}


def same_outputs(one: Path, other: Path) -> bool:
    """Whether metrics and saved weights are equal to the last bit."""
    if metrics_of(one) != metrics_of(other):
        return False
    models, others = ({path.relative_to(output) for path in output.rglob("*.safetensors")} for output in (one, other))
    if models != others or not models:
        return False
    for model in models:
        first, second = load_file(one / model), load_file(other / model)
        if first.keys() != second.keys() or not all(torch.equal(first[name], second[name]) for name in first):
            return False
    return True


def table(outcomes: list[Outcome]) -> str:
    """Markdown: a row for each fault."""
    rows = [
        [o.name, str(o.code) if o.met else "0 (it had ended)", str(o.left), str(o.steps_lost),
         "yes" if o.equal else "no"]
        for o in outcomes
    ]  # fmt: skip
    return markdown(["fault", "exit code", "processes left", "saved steps lost", "equal after resuming"], rows)
