"""What a fault cost a run: processes left over, saved steps lost, different numbers; and the table of all faults."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from measure import markdown
from safetensors.torch import load_file

MARKS = ("<!-- faults -->", "<!-- /faults -->")
MEASURED = ("time", "time/", "memory/")


@dataclass(frozen=True)
class Outcome:
    """How a run with a fault ended, and how its second start did."""

    name: str
    code: int
    met: bool  # the fault ended the first start, or did not have to
    orphans: int
    steps_lost: int
    equal: bool
    seconds: float

    @property
    def survived(self) -> bool:
        return self.met and self.orphans == 0 and self.steps_lost == 0 and self.equal


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


def finished(output: Path) -> bool:
    """Whether the run in this output folder is finished."""
    return (output / "result.json").exists()


def saved_steps(log: str) -> int:
    """The last PPO step whose checkpoint was saved, from the log; 0: none."""
    steps = [
        line.split("step_")[1][:6] for line in log.splitlines() if "checkpoint step_" in line and ": saved" in line
    ]
    return max(map(int, steps), default=0)


def resumed_at(log: str) -> int:
    """The PPO step after which the second start resumed, from the log; 0: it started from scratch."""
    steps = [line.split("step_")[1][:6] for line in log.splitlines() if "resuming from" in line]
    return int(steps[-1]) if steps else 0


def metrics_of(output: Path) -> list[dict[str, Any]]:
    """Lines of `metrics.jsonl` without what measures the machine."""
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [{name: value for name, value in line.items() if not name.startswith(MEASURED)} for line in lines]


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
        [o.name, str(o.code), str(o.orphans), str(o.steps_lost), "yes" if o.equal else "no"] for o in outcomes
    ]  # fmt: skip
    header = ["fault", "exit code", "processes left", "saved steps lost", "metrics and weights equal after resuming"]
    return markdown(header, rows)
