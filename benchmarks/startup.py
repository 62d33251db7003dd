"""Where the time goes from the command of step 3 to the first token of its first rollout, on the toy, warm.

    python benchmarks/startup.py [--ranks N] [--repeats N] [--against CHECKOUT] [--json F] [--docs docs/benchmarks.md]

Each repeat runs, one after another: `import torch, transformers, deepspeed` in a new process; `main.py --help`; the
step until its first token, whose phases rank 0 notes (`startup_main.py`), started as the scripts of `training_scripts/`
do; and the same by the `deepspeed` command. The prepared data and DeepSpeed's operators exist from a first run that is
not counted. The table has medians, as seconds of CPU of all processes and of wall time, and the CPU seconds as a
multiple of the plain imports', which compares machines and checkouts. With `--against`, another checkout of this
project alternates with this one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from measure import publish

HERE = Path(__file__).resolve().parents[1]
MARKS = ("<!-- startup -->", "<!-- /startup -->")
PLAIN = "import torch, transformers, deepspeed"
HELP, IMPORTS, TOTAL = "`main.py --help`", f"`{PLAIN}`", "**command to first token**"
BY_DEEPSPEED = "the same by the `deepspeed` command"
# Starts a step as the scripts of this checkout do. $1: "script" or "deepspeed"; then the program and its flags.
START = """set -eu
source training_scripts/ranks.sh
by_command() { deepspeed --num_accelerators "$RANKS" --master_port "$MASTER_PORT" "$@"; }
declare -F launch >/dev/null || launch() { by_command "$@"; } # earlier checkouts
if [ "$1" = script ]; then launch "${@:2}"; else by_command "${@:2}"; fi"""
MAIN = "training/step3_ppo/main.py"
Cost = tuple[float, float]  # seconds of CPU, seconds of wall time


def make_models(folder: Path) -> None:
    """The untrained actor and the data of the toy, and an untrained reward model of the same shape."""
    import torch
    from transformers import AutoConfig, AutoTokenizer, LlamaForSequenceClassification

    from dschat_ppo.tools.toy import make

    make(folder, seed=1234)
    config = AutoConfig.from_pretrained(folder / "model", num_labels=1)
    torch.manual_seed(1)
    LlamaForSequenceClassification(config).save_pretrained(folder / "reward")
    AutoTokenizer.from_pretrained(folder / "model").save_pretrained(folder / "reward")


def step_flags(work: Path, output: Path) -> list[str]:
    """Flags of step 3 as in training_scripts/toy/run_step3_ppo.sh."""
    words = f"""--actor_model_name_or_path {work}/model --critic_model_name_or_path {work}/reward
        --data_path {work}/data/prompts.jsonl --data_split 0,0,1 --data_output_path {work}/cache
        --max_prompt_seq_len 64 --max_answer_seq_len 48 --per_device_generation_batch_size 32
        --per_device_training_batch_size 16 --ppo_epochs 2 --actor_zero_stage 3 --critic_zero_stage 3 --dtype bf16
        --output_dir {output}"""
    return words.split()


def run(command: list[str], checkout: Path, **added: str) -> Cost:
    """Run a command with the modules of a checkout, to its end."""
    env = os.environ | {"PYTHONPATH": str(checkout), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"} | added
    began = time.perf_counter()
    with tempfile.TemporaryFile() as printed:
        process = subprocess.Popen(command, env=env, cwd=checkout, stdout=printed, stderr=subprocess.STDOUT)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            printed.seek(0)
            sys.exit(f"{' '.join(command)} failed:\n{printed.read().decode(errors='replace')[-4000:]}")
    return used.ru_utime + used.ru_stime, time.perf_counter() - began


def start_step(checkout: Path, work: Path, ranks: int, way: str) -> dict[str, Cost]:
    """Phase -> its cost on rank 0, in order; the last one is the whole start, with the CPU seconds of all ranks.

    `way`: "script" or "deepspeed", see `START`.
    """
    with tempfile.TemporaryDirectory(dir=work) as name:
        file, began = Path(name, "marks.json"), time.time()
        settings = {"main": str(checkout / MAIN), "file": str(file), "pid": os.getpid()}
        program = [str(HERE / "benchmarks/startup_main.py"), *step_flags(work, Path(name, "output"))]
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        command = ["bash", "-c", START, "start", way, *program]
        cpu, _ = run(command, checkout, STARTUP=json.dumps(settings), RANKS=str(ranks), PATH=path)
        marks = json.loads(file.read_text())
    return phases_of(marks, began) | {TOTAL: (cpu, marks[-1][1] - began)}


def phases_of(marks: list[tuple[str, float, float]], began: float) -> dict[str, Cost]:
    """Cost of each phase from the marks of `startup_main.py` and the time of the command."""
    found, before, spent = {}, began, 0.0
    for number, (name, when, cpu) in enumerate(marks):
        found[name] = (cpu - spent, when - before)
        before, spent = when, 0.0 if number == 0 else cpu  # the launcher is another process
    return found


def measure(checkouts: dict[str, Path], work: Path, ranks: int, repeats: int) -> dict[str, dict[str, Cost]]:
    """Checkout -> what was run -> medians. Run 0, which makes caches, does not count."""
    found: dict[str, dict[str, list[Cost]]] = {name: {} for name in checkouts}
    for number in range(repeats + 1):
        for name, checkout in checkouts.items():
            costs = {IMPORTS: run([sys.executable, "-c", PLAIN], checkout)}
            costs[HELP] = run([sys.executable, MAIN, "--help"], checkout)
            costs |= start_step(checkout, work, ranks, "script")
            costs[BY_DEEPSPEED] = start_step(checkout, work, ranks, "deepspeed")[TOTAL]
            for what, cost in costs.items():
                found[name].setdefault(what, []).extend([cost] if number else [])
            print(f"{name}, run {number}: {costs[TOTAL][0]:.1f} s of CPU", file=sys.stderr, flush=True)
    return {
        name: {what: tuple(map(statistics.median, zip(*costs, strict=True))) for what, costs in of.items()}  # type: ignore[misc]
        for name, of in found.items()
    }


def table(found: dict[str, dict[str, Cost]]) -> str:
    """A Markdown table, with columns for each checkout."""
    header = ["phase", *(f"{name}: {unit}" for name in found for unit in ("CPU s", "wall s", "x plain imports"))]
    lines = [header, ["---"] * len(header)]
    for what in next(iter(found.values())):
        cells = [what]
        for of in found.values():
            cpu, wall = of[what]
            cells += [f"{cpu:.2f}", f"{wall:.2f}", f"{cpu / of[IMPORTS][0]:.2f}"]
        lines.append(cells)
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    """Measure and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--against", type=Path, help="another checkout of this project")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    parser.add_argument("--docs", type=Path, help="write the table into this file")
    arguments = parser.parse_args()
    checkouts = {"here": HERE} if arguments.against is None else {"before": arguments.against.resolve(), "here": HERE}
    with tempfile.TemporaryDirectory(prefix="startup_") as name:
        make_models(Path(name))
        found = measure(checkouts, Path(name), arguments.ranks, arguments.repeats)
    publish(found, table(found), MARKS, arguments.json, arguments.docs)


if __name__ == "__main__":
    main()
