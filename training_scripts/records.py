"""What it costs to reach a held-out score: the tasks of docs/records.md, each with its script.

    bash training_scripts/records.sh NAME [--seeds 1 2 3] [--out FOLDER] [more flags of its script]

Each seed runs the script of its task from an empty folder, data and SFT included. The cost of a
task on a CPU is the CPU time of all processes of the script, on two cores: unlike seconds on the
clock it hardly depends on what else the machine does. On a GPU it is seconds on the clock, which
ask for an idle machine.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import time
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).resolve().parent
TARGET = 0.95
CORES = 2
PACKAGES = ("torch", "deepspeed", "transformers")
SET_CHILD_SUBREAPER = 36  # prctl: orphans of this process become its children


@dataclass(frozen=True)
class Task:
    """A script that ends with an evaluation, and what a record of it runs.

    Args:
        script: below `training_scripts`; its words are a folder and flags of step 3 (quickstart:
            of all steps).
        step3: the folder of step 3 in that folder.
        flags: of the script.
        sft_flags: of its SFT, where the script asks for them (`SFT_FLAGS`).
        on_gpu: whether it needs a GPU.
    """

    script: str
    step3: str
    flags: tuple[str, ...] = ()
    sft_flags: tuple[str, ...] = ()
    on_gpu: bool = False


TASKS = {
    "calculator": Task(
        "examples/calculator/run.sh",
        "grpo",
        flags=("--max_steps", "48", "--eval_max_prompts", "128"),
        sft_flags=("--num_train_epochs", "6"),
    ),
    "addition": Task(
        "toy/run_grpo_addition.sh",
        "grpo",
        flags=("--num_train_epochs", "3", "--actor_learning_rate", "5e-4", "--eval_interval", "16"),
    ),
    "quickstart": Task("quickstart.sh", "ppo"),
    "gpu": Task("quickstart.sh", "ppo", on_gpu=True),
}


@dataclass(frozen=True)
class Cost:
    """What one seed took and reached.

    Args:
        seed: of SFT and of the steps after it.
        score: of the last evaluation.
        cpu_seconds: of all processes.
        wall_seconds: on the clock.
        trained_tokens: of prompts and responses that steps 1 and 2 trained on.
        sampled_tokens: of responses of step 3, without its evaluations.
    """

    seed: int
    score: float
    cpu_seconds: float
    wall_seconds: float
    trained_tokens: int
    sampled_tokens: int


def run_measured(command: list[str], environment: dict[str, str], log: Path) -> tuple[float, float]:
    """Run a command -> CPU seconds of it and of all processes that it started, those that outlive
    their parents too, and seconds on the clock. `SystemExit` with the end of its output if it
    fails."""
    ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.perf_counter()
    with log.open("w", encoding="utf-8") as file:
        code = subprocess.run(
            command, env=environment, stdout=file, stderr=subprocess.STDOUT, check=False
        ).returncode
    wall_seconds = time.perf_counter() - started
    if code != 0:
        end = log.read_text(encoding="utf-8", errors="replace")[-2000:]
        raise SystemExit(f"{end}\nerror: {command[1]} ended with exit code {code}; see {log}")
    while True:
        try:
            os.wait()  # counts an orphan's time
        except ChildProcessError:
            break
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    user_seconds = after.ru_utime - before.ru_utime
    return user_seconds + after.ru_stime - before.ru_stime, wall_seconds


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def measure(task: Task, seed: int, folder: Path, more_flags: list[str]) -> Cost:
    """Run a task with a seed in a new folder."""
    folder.mkdir(parents=True)
    out = folder / "out"
    flags = ["--seed", str(seed), *task.flags, *more_flags]
    environment = os.environ | {"SFT_FLAGS": " ".join(["--seed", str(seed), *task.sft_flags])}
    if task.on_gpu:
        environment["RANKS"] = "1"
    else:
        environment |= {"RANKS": str(CORES), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    command = ["bash", str(SCRIPTS / task.script), str(out), *flags]
    cpu_seconds, wall_seconds = run_measured(command, environment, folder / "log")
    trained_tokens = 0
    sampled_tokens = 0
    scores = []
    for path in out.glob("*/metrics.jsonl"):
        for line in metrics_of(path.parent):
            trained_tokens += round(line.get("tokens", 0))
            sampled_tokens += round(
                line.get("rollout/count", 0) * line.get("rollout/length_mean", 0)
            )
    for line in metrics_of(out / task.step3):
        if "eval/score" in line:
            scores.append(line["eval/score"])
    return Cost(seed, scores[-1], cpu_seconds, wall_seconds, trained_tokens, sampled_tokens)


def band(values: list[float], digits: int) -> str:
    """Mean, least and greatest of some values."""
    mean = statistics.mean(values)
    return f"{mean:.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def summary(name: str, on_gpu: bool, costs: list[Cost]) -> str:
    """The line that docs/records.md takes: the cost and its band, and what else may be compared."""
    if on_gpu:
        unit = "seconds"
        seconds = [cost.wall_seconds for cost in costs]
    else:
        unit = "CPU seconds"
        seconds = [cost.cpu_seconds for cost in costs]
    trained = statistics.mean(cost.trained_tokens for cost in costs)
    sampled = statistics.mean(cost.sampled_tokens for cost in costs)
    return (
        f"{name}: {band(seconds, 1)} {unit}, seeds {' '.join(str(cost.seed) for cost in costs)}; "
        f"held out {band([cost.score for cost in costs], 3)}; "
        f"{trained:,.0f} tokens trained in SFT and reward model, {sampled:,.0f} sampled"
    )


def prepare(task: Task, parser: argparse.ArgumentParser) -> str:
    """The name of the processor or GPU that a task runs on. On a CPU this process and those that
    it starts get two cores, and kernels that are compiled once for a machine are compiled before a
    seed is measured. An error of the command line if the device is missing."""
    import torch

    if task.on_gpu:
        if not torch.cuda.is_available():
            parser.error("this record needs a GPU, and there is none; it has not been measured yet")
        return str(torch.cuda.get_device_name())
    from dschat_ppo.cpu_kernels.operations import kernels

    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < CORES:
        parser.error(f"this record needs {CORES} cores, and may use {len(cores)}")
    os.sched_setaffinity(0, cores[:CORES])
    for dtype in (torch.bfloat16, torch.float32):
        kernels(dtype)
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def conditions(device: str) -> dict[str, str]:
    """What a cost is compared by: commit, device and versions."""
    git = ["git", "-C", str(SCRIPTS), "describe", "--always", "--dirty", "--abbrev=8"]
    commit = "unknown"
    if shutil.which("git"):
        described = subprocess.run(git, capture_output=True, text=True, check=False)
        commit = described.stdout.strip() or commit
    versions = {package: version(package) for package in PACKAGES}
    return {"commit": commit, "device": device, **versions}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="records.sh",
        description=f"What a held-out score of {TARGET} costs.",
        epilog="More flags go to the script of the task.",
        allow_abbrev=False,
    )
    parser.add_argument("name", choices=TASKS, help="the task")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="(default: 1 2 3)")
    parser.add_argument("--out", type=Path, help="a new folder (default: output/records/NAME-TIME)")
    args, more_flags = parser.parse_known_args()
    task = TASKS[args.name]
    out = args.out
    if out is None:
        out = SCRIPTS.parent / "output/records" / f"{args.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    if out.exists():
        parser.error(f"--out {out}: exists; name a new folder")
    about = conditions(prepare(task, parser))
    costs = []
    for seed in args.seeds:
        cost = measure(task, seed, out.resolve() / f"seed_{seed}", more_flags)
        costs.append(cost)
        print(
            f"{args.name}: seed {seed}: {cost.score:.3f} held out, {cost.cpu_seconds:.1f} CPU"
            f" seconds, {cost.wall_seconds:.1f} seconds",
            flush=True,
        )
        content = {"task": args.name, **about, "flags": more_flags}
        content["seeds"] = [asdict(cost) for cost in costs]
        (out / "record.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    print(summary(args.name, task.on_gpu, costs))
    missed = [f"{cost.score:.3f} (seed {cost.seed})" for cost in costs if cost.score < TARGET]
    if missed:
        raise SystemExit(f"no record: {', '.join(missed)} is less than {TARGET}")


if __name__ == "__main__":
    main()
