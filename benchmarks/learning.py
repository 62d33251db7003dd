"""The result of every advantage estimator on two toy tasks with the same budget.

    python benchmarks/learning.py [--work DIR] [--json FILE] [--plot FILE.png] [--quick] [--seeds N]
                                  [--tasks addition preference] [--estimators grpo ...]

*addition*: sums of two-digit numbers, scored by the rule `exact_match`. The result is `eval/score`,
the share of right answers to held-out questions. *preference*: the quickstart's conversations with
their learned reward model. The result is the share of sampled answers to held-out questions that
follow the true rule, which training never sees.

Each run is a launch of two ranks. All runs of a task start from one SFT model (and one reward
model) and get the same number of prompts, answers and optimizer steps; seeds are those of step 3.
Finished runs are kept in the work folder, so an interrupted benchmark resumes. The exit code is 1
if an estimator does not improve on its start by `MARGIN` (mean over seeds). `--plot` needs
matplotlib: pip install -e '.[plot]'.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import time
from pathlib import Path

from measure import ROOT, logged, markdown

SEEDS = (1, 2, 3)
QUICK = ("gae", "grpo", "rloo")
# Estimator -> the loss it is usually combined with. Left out: gdpo, which with one source is grpo
# up to a factor; maxrl, which takes no negative scores; none, which learns from a teacher alone.
ESTIMATORS = {
    "gae": "--policy_loss ppo",
    "grpo": "--policy_loss ppo",
    "dr_grpo": "--policy_loss ppo --loss_aggregation constant",
    "rloo": "--policy_loss reinforce",
    "reinforce_plus_plus": "--policy_loss ppo",
    "reinforce_plus_plus_baseline": "--policy_loss ppo",
    "remax": "--policy_loss reinforce",
    "opo": "--policy_loss reinforce",
    "gpg": "--policy_loss reinforce",
    "grpo_pass_at_k": "--policy_loss ppo",
}
MARGIN = {"addition": 0.2, "preference": 0.15}  # the least improvement of an estimator on its start
COUNTED = {"addition": "right answers", "preference": "answers that follow the true rule"}
STEP3 = (
    "--actor_model_name_or_path {made}/sft --data_path {made}/toy/data/prompts.jsonl --data_split"
    " 0,0,1 --eval_data_path {made}/toy/data/heldout.jsonl --actor_zero_stage 3 --num_warmup_steps"
    " 2 --dtype bf16 "
)
# batch sizes are those of each of the two ranks
FLAGS = {
    "addition": (
        STEP3
        + "--use_reward_model False --reward_function exact_match --kl_coef 0 --eval_interval 4"
        " --max_prompt_seq_len 6 --max_answer_seq_len 4 --n_samples_per_prompt 8"
        " --actor_learning_rate 3e-4 --per_device_generation_batch_size 16"
        " --per_device_training_batch_size 32"
    ),
    "preference": (
        STEP3 + "--critic_model_name_or_path {made}/reward --critic_zero_stage 3 --kl_coef 0.1"
        " --eval_interval 8 --max_prompt_seq_len 64 --max_answer_seq_len 48"
        " --n_samples_per_prompt 4 --ppo_epochs 2 --actor_learning_rate 1.5e-4 --num_train_epochs"
        " 1 --enable_test_mode --test_stop_step 32 --per_device_generation_batch_size 8"
        " --per_device_training_batch_size 16"
    ),
}
# of gae; without a reward model the critic starts from the SFT model with a new head
CRITIC = {
    "addition": (
        "--critic_model_name_or_path {made}/sft --critic_zero_stage 3 --critic_learning_rate 1e-3"
    ),
    "preference": "--critic_learning_rate 2e-4",
}


def flags_of(task: str, estimator: str, seed: int, made: Path) -> list[str]:
    """The command line of one run of step 3, without its output folder. `made`: folder of
    `prepare`."""
    words = f"{FLAGS[task]} {ESTIMATORS[estimator]}".split()
    if estimator == "gae":
        words += CRITIC[task].split()
    own = ["--advantage_estimator", estimator, "--seed", str(seed)]
    return [*(word.format(made=made) for word in words), *own]


def call(command: list[object], log: Path) -> None:
    """Run a command in the root of the repository with its output in `log`. `SystemExit` with its
    end if it fails."""
    started, env = time.perf_counter(), {**os.environ, "RANKS": "2", "PYTHONPATH": str(ROOT)}
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    log.parent.mkdir(parents=True, exist_ok=True)
    logged([str(word) for word in command], log, ROOT, env)
    print(f"{log}: {time.perf_counter() - started:.0f} s", flush=True)


def prepare(task: str, work: Path) -> Path:
    """Make the folder `work/TASK/made` with `toy`, `sft` and (preference) `reward`; existing parts
    are kept."""
    made, scripts = work / task / "made", ROOT / "training_scripts/toy"
    make, script = {
        "addition": ([scripts / "addition.py"], "run_sft_addition.sh"),
        "preference": (["-m", "dschat_ppo.tools.toy"], "run_step1_sft.sh"),
    }[task]
    parts: dict[str, list[object]] = {
        "toy": [sys.executable, *make, made / "toy"],
        "sft": ["bash", scripts / script, made / "toy", made / "sft", "--overwrite_output_dir"],
    }
    if task == "preference":
        models = [made / "toy", made / "sft", made / "reward"]
        parts["reward"] = [
            "bash",
            scripts / "run_step2_reward.sh",
            *models,
            "--overwrite_output_dir",
        ]
    for name, command in parts.items():
        if not (
            made / name / ("model/model.safetensors" if name == "toy" else "result.json")
        ).exists():
            call(command, made / f"{name}.log")
    return made


def learn(task: str, estimator: str, seed: int, work: Path, made: Path) -> Path:
    """One run of step 3, unless it is finished with the same flags; returns its output folder."""
    folder = work / task / estimator / f"seed_{seed}"
    flags, output, kept = (
        flags_of(task, estimator, seed, made),
        folder / "output",
        folder / "flags.json",
    )
    if (
        (output / "result.json").exists()
        and kept.exists()
        and kept.read_text() == json.dumps(flags)
    ):
        return output
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    kept.write_text(json.dumps(flags))
    launch = 'source training_scripts/ranks.sh; launch training/step3_ppo/main.py "$@"'
    call(["bash", "-c", launch, "bash", *flags, "--output_dir", output], folder / "log")
    return output


def points(output: Path, metric: str = "eval/score") -> tuple[list[int], list[float]]:
    """PPO steps and values of a metric of a run."""
    lines = [
        json.loads(line)
        for line in (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    found = [(line["step"], line[metric]) for line in lines if line.get(metric) is not None]
    return [step for step, _ in found], [value for _, value in found]


def rule_rate_of(model_folder: Path, made: Path, seed: int) -> float:
    """Share of a saved model's sampled answers to the held-out questions that follow the true
    rule."""
    import torch
    from transformers import AutoTokenizer

    sys.path.append(str(ROOT / "training_scripts"))
    from quickstart_report import load_lm, rule_rate, sample_responses

    from dschat_ppo.tools.toy import Question

    rows = [
        json.loads(line)
        for line in (made / "toy/data/heldout.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    with torch.no_grad():
        tokenizer = AutoTokenizer.from_pretrained(model_folder)
        answers, _ = sample_responses(
            load_lm(model_folder), tokenizer, [row["prompt"] for row in rows], seed
        )
    return rule_rate([Question(**row["about"]) for row in rows], answers)


def start_and_end(task: str, output: Path, made: Path, seed: int) -> tuple[float, float]:
    """The result of the task before and after a run."""
    if task == "addition":
        _, scores = points(output)
        return scores[0], scores[-1]
    kept = output.parent / "rule_rate.json"  # `learn` removes it together with the run
    if not kept.exists():
        kept.write_text(
            json.dumps(
                [rule_rate_of(folder, made, seed) for folder in (made / "sft", output / "actor")]
            )
        )
    start, end = json.loads(kept.read_text())
    return start, end


def plot(outputs: dict[str, dict[str, list[Path]]], file: Path) -> None:
    """Curves of `eval/score`, means over the seeds: right answers (addition), the learned reward
    (preference)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7 * len(outputs), 4.5), layout="constrained")
    for number, (task, of_task) in enumerate(outputs.items(), start=1):
        axes = figure.add_subplot(
            1, len(outputs), number, title=task, xlabel="PPO step", ylabel="held-out score"
        )
        for estimator, folders in of_task.items():
            steps, scores = zip(*map(points, folders), strict=True)
            axes.plot(
                steps[0], [statistics.mean(at) for at in zip(*scores, strict=True)], label=estimator
            )
        axes.legend(fontsize="small")
    figure.savefig(file, dpi=80)


def main() -> int:
    """Execute the missing runs and print the table; returns 1 if an estimator learned too
    little."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--work", type=Path, default=ROOT / "output/learning", help="folder for models and runs"
    )
    parser.add_argument(
        "--json", type=Path, help="write {task: {estimator: [start, end]}} to this file"
    )
    parser.add_argument("--plot", type=Path, help="plot the curves to this file (.png)")
    parser.add_argument(
        "--quick", action="store_true", help=f"only one seed of {', '.join(QUICK)} on addition"
    )
    parser.add_argument("--seeds", type=int, default=len(SEEDS), choices=range(1, len(SEEDS) + 1))
    parser.add_argument("--tasks", nargs="+", default=list(MARGIN), choices=list(MARGIN))
    parser.add_argument(
        "--estimators", nargs="+", default=list(ESTIMATORS), choices=list(ESTIMATORS)
    )
    chosen = parser.parse_args()
    if chosen.quick:
        chosen.tasks, chosen.estimators, chosen.seeds = ["addition"], list(QUICK), 1
    work, seeds = chosen.work.resolve(), SEEDS[: chosen.seeds]
    results: dict[str, dict[str, list[float]]] = {}
    outputs: dict[str, dict[str, list[Path]]] = {}
    for task in chosen.tasks:
        made = prepare(task, work)
        outputs[task] = {
            name: [learn(task, name, seed, work, made) for seed in seeds]
            for name in chosen.estimators
        }
        results[task] = {}
        for name, folders in outputs[task].items():
            both = [
                start_and_end(task, folder, made, seed)
                for folder, seed in zip(folders, seeds, strict=True)
            ]
            results[task][name] = [statistics.mean(shares) for shares in zip(*both, strict=True)]
    header = [
        "estimator",
        "loss",
        *(f"{task}: {COUNTED[task]}, before -> after" for task in chosen.tasks),
    ]
    rows = []
    for name in chosen.estimators:
        shown = ["{:.2f} -> {:.2f}".format(*results[task][name]) for task in chosen.tasks]
        rows.append([f"`{name}`", f"`{ESTIMATORS[name].split()[1]}`", *shown])
    print(markdown(header, rows))
    if chosen.json:
        chosen.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    if chosen.plot:
        plot(outputs, chosen.plot)
    missed = False
    for task, of_task in results.items():
        for name, (start, end) in of_task.items():
            if not end >= start + MARGIN[task]:
                missed = True
                print(
                    f"{task}: {name} went from {start:.3f} to {end:.3f}, an improvement below"
                    f" {MARGIN[task]}"
                )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
