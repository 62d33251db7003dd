"""The result of every advantage estimator on two toy tasks with the same budget.

    python benchmarks/learning.py [--work DIR] [--json FILE] [--plot FILE.png] [--quick] [--seeds N]
                                  [--tasks addition preference] [--estimators grpo ...] [--ranks N] [--jobs N]

*addition*: sums of two-digit numbers, scored by the rule `exact_match`. The result is `eval/score`, the share of right
answers to held-out questions. *preference*: the quickstart's conversations with their learned reward model. The result
is the share of sampled answers to held-out questions that follow the true rule, which training never sees.

Each run is a `deepspeed` command on `--ranks` ranks, and `--jobs` runs execute at the same time. Batch sizes are those
of a whole step, so both flags change a run only by rounding. All runs of a task start from one SFT model (and one
reward model) and get the same number of prompts, answers and optimizer steps; seeds are those of step 3.
Finished runs are kept in the work folder, so an interrupted benchmark resumes. The exit code is 1 if an estimator does
not improve on its start by `MARGIN` (mean over seeds). `--plot` needs matplotlib: pip install -e '.[plot]'.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from measure import markdown

ROOT = Path(__file__).parent.parent
SEEDS = (1, 2, 3)

# estimator -> the loss it is usually combined with
ESTIMATORS = {
    "gae": ["--policy_loss", "ppo"],
    "grpo": ["--policy_loss", "ppo"],
    "dr_grpo": ["--policy_loss", "ppo", "--loss_aggregation", "constant"],
    "rloo": ["--policy_loss", "reinforce"],
    "reinforce_plus_plus": ["--policy_loss", "ppo"],
    "reinforce_plus_plus_baseline": ["--policy_loss", "ppo"],
    "remax": ["--policy_loss", "reinforce"],
    "opo": ["--policy_loss", "reinforce"],
    "gpg": ["--policy_loss", "reinforce"],
    "grpo_pass_at_k": ["--policy_loss", "ppo"],
}
CRITIC = ("gae",)
QUICK = ("gae", "grpo", "rloo")

# (prompts of a PPO step, answers of an optimizer step), over all ranks
BATCHES = {"addition": (32, 64), "preference": (16, 32)}

# the least improvement of an estimator on its start
MARGIN = {"addition": 0.2, "preference": 0.15}
COUNTED = {"addition": "right answers", "preference": "answers that follow the true rule"}

STEP3 = {
    "--actor_zero_stage": 3,
    "--num_warmup_steps": 2,
    "--dtype": "bf16",
    "--data_split": "0,0,1",
}  # fmt: skip
ADDITION = STEP3 | {
    "--use_reward_model": False,
    "--reward_function": "exact_match",
    "--kl_coef": 0,
    "--eval_interval": 4,
    "--max_prompt_seq_len": 6,
    "--max_answer_seq_len": 4,
    "--n_samples_per_prompt": 8,
    "--actor_learning_rate": 3e-4,
}
PREFERENCE = STEP3 | {
    "--kl_coef": 0.1,
    "--eval_interval": 8,
    "--max_prompt_seq_len": 64,
    "--max_answer_seq_len": 48,
    "--n_samples_per_prompt": 4,
    "--ppo_epochs": 2,
    "--actor_learning_rate": 1.5e-4,
    "--num_train_epochs": 1,
    "--enable_test_mode": True,
    "--test_stop_step": 32,
}


def arguments_of(flags: dict[str, Any]) -> list[str]:
    """Flags as a list of command-line arguments."""
    return [str(word) for pair in flags.items() for word in pair]


def flags_of(task: str, estimator: str, seed: int, made: Path, ranks: int) -> list[str]:
    """The command line of one run of step 3, without its output folder.

    Args:
        made: folder of the task, made by `prepare`.
        ranks: number of ranks that share the batches.
    """
    common = dict(ADDITION if task == "addition" else PREFERENCE)
    prompts, answers = BATCHES[task]
    common |= {"--per_device_generation_batch_size": prompts // ranks}
    common |= {"--per_device_training_batch_size": answers // ranks}
    flags = {"--actor_model_name_or_path": made / "sft", "--data_path": made / "toy/data/prompts.jsonl"}
    flags |= {"--eval_data_path": made / "toy/data/heldout.jsonl", "--advantage_estimator": estimator, "--seed": seed}
    has_critic = estimator in CRITIC
    if task == "preference":
        flags |= {"--critic_model_name_or_path": made / "reward", "--critic_zero_stage": 3}
    elif has_critic:  # there is no reward model, so the critic starts from the SFT model with a new head
        flags |= {"--critic_model_name_or_path": made / "sft", "--critic_zero_stage": 3}
    if has_critic:
        flags |= {"--critic_learning_rate": 2e-4 if task == "preference" else 1e-3}
    return [*arguments_of(common | flags), *ESTIMATORS[estimator]]


def call(command: Sequence[object], log: Path, processes: int = 2) -> float:
    """Run a command in the root of the repository with its output in `log`; returns its duration in seconds.

    `processes`: number of processes that compute at the same time and share the cores.

    Raises:
        SystemExit: the command failed; the message holds the end of the log.
    """
    threads = max(1, len(os.sched_getaffinity(0)) // processes)
    env = {**os.environ, "RANKS": "2", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads))}
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    env["PYTHONPATH"] = f"{ROOT}:{env['PYTHONPATH']}" if env.get("PYTHONPATH") else str(ROOT)
    log.parent.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    with log.open("w", encoding="utf-8") as file:
        argv = [str(word) for word in command]
        code = subprocess.run(argv, cwd=ROOT, env=env, stdout=file, stderr=subprocess.STDOUT, check=False).returncode
    if code:
        end = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-25:])
        sys.exit(f"{end}\nexit code {code}; the whole log is {log}")
    return time.perf_counter() - started


def free_port() -> int:
    """A free port for the rendezvous of the ranks."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def prepare(task: str, work: Path) -> Path:
    """Make the folder `work/TASK/made` with `toy`, `sft` and (preference) `reward`; existing parts are kept."""
    made, scripts = work / task / "made", ROOT / "training_scripts/toy"
    toy = made / "toy"
    if not (toy / "model/model.safetensors").exists():
        module = {"addition": "dschat_ppo.tools.addition", "preference": "dschat_ppo.tools.toy"}[task]
        call([sys.executable, "-m", module, toy], made / "toy.log")
    script = {"addition": "run_sft_addition.sh", "preference": "run_step1_sft.sh"}[task]
    steps = {"sft": [scripts / script, toy, made / "sft"]}
    if task == "preference":
        steps["reward"] = [scripts / "run_step2_reward.sh", toy, made / "sft", made / "reward"]
    for step, command in steps.items():
        if not (made / step / "result.json").exists():
            seconds = call(["bash", *command, "--overwrite_output_dir"], made / f"{step}.log")
            print(f"{task}: {step} in {seconds:.0f} s", flush=True)
    return made


def learn(task: str, estimator: str, seed: int, work: Path, made: Path, ranks: int, jobs: int) -> Path:
    """One run of step 3, unless it is finished with the same flags; returns its output folder."""
    folder = work / task / estimator / f"seed_{seed}"
    flags, output = flags_of(task, estimator, seed, made, ranks), folder / "output"
    wanted = json.dumps(flags)
    kept = folder / "flags.json"
    if (output / "result.json").exists() and kept.exists() and kept.read_text(encoding="utf-8") == wanted:
        return output
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    kept.write_text(wanted, encoding="utf-8")
    launch = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_accelerators", ranks]
    launch += ["--master_port", free_port(), ROOT / "training/step3_ppo/main.py"]
    seconds = call([*launch, *flags, "--output_dir", output], folder / "log", ranks * jobs)
    print(f"{task}: {estimator}, seed {seed} in {seconds:.0f} s", flush=True)
    return output


def curve(output: Path) -> list[tuple[int, float]]:
    """(PPO step, `eval/score`) of each evaluation of a run."""
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [(line["step"], line["eval/score"]) for line in lines if "eval/score" in line]


def measured_rule_rate(model_folder: Path, made: Path, seed: int) -> float:
    """Share of a saved model's sampled answers to the held-out questions that follow the true rule."""
    import torch
    from transformers import AutoTokenizer

    from dschat_ppo.tools.quickstart_report import load_lm, rule_rate, sample_answers
    from dschat_ppo.tools.toy import Question

    rows = [json.loads(line) for line in (made / "toy/data/heldout.jsonl").read_text(encoding="utf-8").splitlines()]
    with torch.no_grad():
        tokenizer = AutoTokenizer.from_pretrained(model_folder)
        answers, _ = sample_answers(load_lm(model_folder), tokenizer, [row["prompt"] for row in rows], seed)
    return rule_rate([Question(**row["about"]) for row in rows], answers)


def start_and_end(task: str, output: Path, made: Path, seed: int) -> tuple[float, float]:
    """The result of the task before and after a run."""
    if task == "addition":
        scores = curve(output)
        return scores[0][1], scores[-1][1]
    kept = output.parent / "rule_rate.json"  # `learn` removes it together with the run
    if not kept.exists():
        kept.write_text(
            json.dumps([measured_rule_rate(folder, made, seed) for folder in (made / "sft", output / "actor")])
        )
    start, end = json.loads(kept.read_text())
    return start, end


Outputs = dict[str, dict[str, list[Path]]]
Results = dict[str, dict[str, dict[str, float]]]


def run_all(
    tasks: Sequence[str], estimators: Sequence[str], seeds: Sequence[int], work: Path, ranks: int, jobs: int
) -> tuple[Results, Outputs]:
    """(task -> estimator -> start and end, means over the seeds; task -> estimator -> output folders)."""
    results: Results = {}
    outputs: Outputs = {}
    for task in tasks:
        made = prepare(task, work)
        results[task], outputs[task] = {}, {}
        with ThreadPoolExecutor(jobs) as pool:
            running = {
                estimator: [pool.submit(learn, task, estimator, seed, work, made, ranks, jobs) for seed in seeds]
                for estimator in estimators
            }
        for estimator in estimators:
            folders = [run.result() for run in running[estimator]]
            shares = [start_and_end(task, *run) for run in zip(folders, [made] * len(seeds), seeds, strict=True)]
            starts, ends = zip(*shares, strict=True)
            results[task][estimator] = {"start": statistics.mean(starts), "end": statistics.mean(ends)}
            outputs[task][estimator] = folders
    return results, outputs


def table(results: Results) -> str:
    """Markdown: a row for each estimator."""
    tasks = list(results)
    header = ["estimator", "loss", *(f"{task}: {COUNTED[task]}, before -> after" for task in tasks)]
    rows = []
    for estimator in results[tasks[0]]:
        cells = [results[task][estimator] for task in tasks]
        shown = [f"{cell['start']:.2f} -> {cell['end']:.2f}" for cell in cells]
        rows.append([f"`{estimator}`", f"`{ESTIMATORS[estimator][1]}`", *shown])
    return markdown(header, rows)


def failures(results: Results) -> list[str]:
    """One line for each estimator that did not improve by the margin."""
    return [
        f"{task}: {estimator} went from {found['start']:.3f} to {found['end']:.3f}, an improvement below {MARGIN[task]}"
        for task, of_task in results.items()
        for estimator, found in of_task.items()
        if not found["end"] >= found["start"] + MARGIN[task]
    ]


def plot(outputs: Outputs, file: Path) -> None:
    """Curves of `eval/score`, means over the seeds: right answers (addition), the learned reward (preference)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7 * len(outputs), 4.5), layout="constrained")
    for number, (task, of_task) in enumerate(outputs.items(), start=1):
        axes = figure.add_subplot(1, len(outputs), number)
        for estimator, folders in of_task.items():
            curves = [curve(folder) for folder in folders]
            steps = [step for step, _ in curves[0]]
            axes.plot(
                steps, [statistics.mean(point[1] for point in at) for at in zip(*curves, strict=True)], label=estimator
            )
        axes.set(title=task, xlabel="PPO step", ylabel="held-out score")
        axes.legend(fontsize="small")
    figure.savefig(file, dpi=80)


def arguments() -> argparse.Namespace:
    """Parse the command line.

    Raises:
        SystemExit: `--plot` without matplotlib.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--work", type=Path, default=ROOT / "output/learning", help="folder for models and finished runs"
    )
    parser.add_argument("--json", type=Path, help="write {task: {estimator: {start, end}}} to this file")
    parser.add_argument("--plot", type=Path, help="plot the curves to this file (.png)")
    parser.add_argument("--quick", action="store_true", help=f"only one seed of {', '.join(QUICK)} on addition")
    parser.add_argument(
        "--seeds", type=int, default=len(SEEDS), choices=range(1, len(SEEDS) + 1), help="number of seeds"
    )
    parser.add_argument("--ranks", type=int, default=2, choices=(1, 2, 4), help="ranks of each run")
    parser.add_argument("--jobs", type=int, default=1, help="runs that execute at the same time")
    parser.add_argument("--tasks", nargs="+", default=list(MARGIN), choices=list(MARGIN))
    parser.add_argument("--estimators", nargs="+", default=list(ESTIMATORS), choices=list(ESTIMATORS))
    chosen = parser.parse_args()
    if chosen.plot:
        try:
            import matplotlib  # noqa: F401
        except ImportError:
            parser.error("--plot needs matplotlib, which is not installed: pip install -e '.[plot]'")
    if chosen.quick:
        chosen.tasks, chosen.estimators, chosen.seeds = ["addition"], list(QUICK), 1
    return chosen


def main() -> int:
    """Execute the missing runs and print the table; returns 1 if an estimator learned too little."""
    chosen = arguments()
    work = chosen.work.resolve()
    results, outputs = run_all(chosen.tasks, chosen.estimators, SEEDS[: chosen.seeds], work, chosen.ranks, chosen.jobs)
    print(table(results))
    if chosen.json:
        chosen.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    if chosen.plot:
        plot(outputs, chosen.plot)
    missed = failures(results)
    for line in missed:
        print(line)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
