"""Whether memory, open files, shared memory or the time of a step grow in a long run.

    python benchmarks/long_run.py [--steps 300] [--work DIR] [--json FILE]

The small run of `benchmarks/faults.py` (two ranks, ZeRO-3, a reward model and a reward service, a checkpoint every
ten PPO steps) with the given number of steps. Each rank is observed from outside after every step. Of the steps from
20 on, the first quarter is compared with the last. The exit code is 1 if memory grew by more than 3 %, the step by more
than 20 % in CPU seconds, or if there are more open files or more shared memory than before.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
from faults import Bench

SETTLED = 20  # steps before anything is compared


@dataclass(frozen=True)
class Sample:
    """Both ranks together: resident bytes without shared pages, open files, bytes in /dev/shm, CPU seconds so far."""

    step: int
    memory: int
    files: int
    shared: int
    cpu: float


def ranks_of(output: Path) -> list[psutil.Process]:
    """The processes of the ranks, known by their command line."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        launcher = any("deepspeed.launcher" in word for word in words)
        if str(output) in words and any(word.startswith("--local_rank=") for word in words) and not launcher:
            found.append(process)
    return found


def look(ranks: list[psutil.Process], step: int) -> Sample:
    """Measure now."""
    memory = sum(rank.memory_info().rss - rank.memory_info().shared for rank in ranks)
    shared = sum(path.stat().st_size for path in Path("/dev/shm").iterdir() if path.is_file())
    cpu = sum(sum(rank.cpu_times()[:2]) for rank in ranks)
    return Sample(step, memory, sum(rank.num_fds() for rank in ranks), shared, cpu)


def watch(bench: Bench, output: Path, steps: int) -> list[Sample]:
    """Run, and measure after each step.

    Raises:
        SystemExit: the run failed.
    """
    process = bench.start(
        {}, output, "--test_stop_step", str(steps), "--num_train_epochs", str(steps), "--save_steps", "10"
    )
    samples: list[Sample] = []
    metrics = output / "metrics.jsonl"
    ranks: list[psutil.Process] = []
    while process.poll() is None:
        done = len(metrics.read_bytes().splitlines()) if metrics.exists() else 0
        if done > (samples[-1].step if samples else 0):
            ranks = ranks or ranks_of(output)
            try:
                samples.append(look(ranks, done))
            except psutil.NoSuchProcess:  # it has just ended
                break
        time.sleep(0.05)
    if process.wait():
        sys.exit(f"the run failed; see {bench.log_of(output)}")
    return samples


def compare(samples: list[Sample]) -> dict[str, float]:
    """Compare the first quarter of the settled steps with the last."""
    settled = [sample for sample in samples if sample.step >= SETTLED]
    quarter = max(2, len(settled) // 4)
    first, last = settled[:quarter], settled[-quarter:]

    def mean(part: list[Sample], name: str) -> float:
        return statistics.mean(getattr(sample, name) for sample in part)

    def per_step(part: list[Sample]) -> float:
        return (part[-1].cpu - part[0].cpu) / (part[-1].step - part[0].step)

    return {
        "steps": samples[-1].step,
        "memory_mib": mean(first, "memory") / 2**20,
        "memory_growth": mean(last, "memory") / mean(first, "memory") - 1,
        "files_before": min(sample.files for sample in first),
        "files_after": min(sample.files for sample in last),
        "shared_bytes_before": min(sample.shared for sample in first),
        "shared_bytes_after": min(sample.shared for sample in last),
        "cpu_seconds_per_step": per_step(first),
        "step_growth": per_step(last) / per_step(first) - 1,
    }


def main() -> int:
    """Run and compare; 1 if a figure grew."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="PPO steps, 40 or more")
    parser.add_argument("--work", type=Path, help="keep models, outputs and logs there")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    chosen = parser.parse_args()
    work = (chosen.work or Path(tempfile.mkdtemp(prefix="long_run_"))).resolve()
    work.mkdir(parents=True, exist_ok=True)
    found = compare(watch(Bench(work), work / "long", chosen.steps))
    for name, value in found.items():
        print(f"{name}: {value:.4g}")
    if chosen.json:
        chosen.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    flat = found["memory_growth"] <= 0.03 and found["step_growth"] <= 0.2
    kept = found["files_after"] <= found["files_before"] and found["shared_bytes_after"] <= found["shared_bytes_before"]
    return 0 if flat and kept else 1


if __name__ == "__main__":
    sys.exit(main())
