"""What students of the quickstart's PPO actor reach, and how many tokens were sampled for it: a
table, and a picture.

    python training_scripts/examples/distill/compare.py QUICKSTART_DIR FOLDER [--plot FILE.png]

Compared are PPO itself, a student that learns on its own answers (`run.sh`), and SFT on as many
answers of the teacher, with as many updates. A student's figures are of three seeds. Finished runs
are kept in FOLDER, so an interrupted command resumes. `--plot` needs matplotlib: pip install -e
'.[plot]'.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

HERE, SEEDS = Path(__file__).parent, (1, 2, 3)
STEP1 = HERE.parents[2] / "training/step1_sft/main.py"
ANSWERS = 12 * 32  # of `run.sh`
METRICS = "metrics.jsonl"


def call(*words: object) -> None:
    subprocess.run([*map(str, words)], check=True)


def student(quickstart: Path, output: Path, seed: int) -> None:
    """A student on its own answers."""
    if not (output / "result.json").exists():
        call("bash", HERE / "run.sh", quickstart, output, "--seed", seed)


def sft_on_the_teachers_answers(quickstart: Path, output: Path, seed: int) -> None:
    """SFT with the updates of `run.sh`, on answers of the teacher to the same number of prompts."""
    rows, dtype = output.with_suffix(".jsonl"), os.environ.get("DTYPE", "fp32")
    if not rows.exists():
        call(
            sys.executable,
            "-m",
            "dschat_ppo.tools.evaluate",
            "--model",
            quickstart / "ppo/actor",
            "--data_path",
            quickstart / "toy/data/prompts.jsonl",
            "--max_prompts",
            ANSWERS,
            "--decoding",
            "sampled",
            "--max_tokens",
            48,
            "--dtype",
            dtype,
            "--seed",
            seed,
            "--write_best",
            rows,
        )
    if not (output / "result.json").exists():
        call(
            sys.executable,
            STEP1,
            "--model_name_or_path",
            quickstart / "sft",
            "--data_path",
            rows,
            "--data_split",
            "1,0,0",
            "--eval_fraction",
            0,
            "--max_seq_len",
            128,
            "--per_device_train_batch_size",
            32,
            "--learning_rate",
            "5e-4",
            "--num_warmup_steps",
            2,
            "--max_steps",
            12,
            "--seed",
            seed,
            "--dtype",
            dtype,
            "--output_dir",
            output,
        )


def rule_rate(quickstart: Path, model: Path) -> float:
    """Share of sampled answers to the held-out prompts that follow the true rule."""
    found = model.parent / f"{model.name}.json"
    if not found.exists():
        call(
            sys.executable,
            "-m",
            "dschat_ppo.tools.evaluate",
            "--model",
            model,
            "--data_path",
            quickstart / "toy/data/heldout.jsonl",
            "--reward_function",
            "dschat_ppo.tools.toy:true_rule",
            "--decoding",
            "sampled",
            "--samples",
            4,
            "--max_tokens",
            48,
            "--dtype",
            "fp32",
            "--json",
            found,
        )
    rate: float = json.loads(found.read_text(encoding="utf-8"))["results"][0]["metrics"]["score"]
    return rate


def curve(output: Path) -> tuple[list[float], list[float]]:
    """(sampled tokens, rule rate) of a run at each of its evaluations."""
    tokens, places, rates = 0.0, list[float](), list[float]()
    for line in map(json.loads, (output / METRICS).read_text(encoding="utf-8").splitlines()):
        tokens += line.get("rollout/count", 0) * line.get("rollout/length_mean", 0.0)
        if "eval/score" in line:
            places, rates = [*places, tokens], [*rates, line["eval/score"]]
    return places, rates


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "quickstart", type=Path, help="output folder of training_scripts/quickstart.sh"
    )
    parser.add_argument("folder", type=Path, help="folder for the runs")
    parser.add_argument("--plot", type=Path, help="picture of the runs that sample")
    chosen = parser.parse_args()
    quickstart, folder = chosen.quickstart.resolve(), chosen.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    own, copied = ([folder / f"{name}_{seed}" for seed in SEEDS] for name in ("student", "sft"))
    for seed, on_policy, on_data in zip(SEEDS, own, copied, strict=True):
        student(quickstart, on_policy, seed)
        sft_on_the_teachers_answers(quickstart, on_data, seed)
    start, teacher = (rule_rate(quickstart, quickstart / name) for name in ("sft", "ppo/actor"))
    rates = {
        name: [rule_rate(quickstart, model) for model in models]
        for name, models in {"own": [each / "actor" for each in own], "copied": copied}.items()
    }
    spent, by_student = curve(quickstart / "ppo")[0][-1], curve(own[0])[0][-1]
    print("| | sampled tokens | answers that follow the rule, three seeds |\n|---|---|---|")
    print(
        f"| the start (SFT) | | {start:.2f} |\n| PPO, the teacher | {spent:,.0f} | {teacher:.2f} |"
    )
    for name, title in (
        ("own", "student, on its own answers"),
        ("copied", "SFT on answers of the teacher"),
    ):
        print(
            f"| {title} | {by_student:,.0f} | {', '.join(f'{rate:.2f}' for rate in rates[name])} |"
        )
    if chosen.plot:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(5.5, 3), layout="constrained")
        axes = figure.add_subplot()
        axes.plot(*curve(quickstart / "ppo"), label="PPO, the teacher")
        for number, run in enumerate(own):
            axes.plot(
                *curve(run), color="C1", label="student, three seeds" if number == 0 else None
            )
        axes.set_xlabel("sampled tokens", fontsize="small")
        axes.set_ylabel("answers that follow the rule", fontsize="small")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
        figure.savefig(chosen.plot, dpi=90)


if __name__ == "__main__":
    main()
