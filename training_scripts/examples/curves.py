"""The rewards of the examples with episodes in step 3, by GRPO and by PPO with a critic, and
without the calculator: a table of three seeds, and a picture of their curves if a file is named for
it. One rank, fp32.

    python training_scripts/examples/curves.py FOLDER [PICTURE.png]

Finished runs are kept in the folder, so an interrupted command resumes. The picture needs
matplotlib: pip install -e '.[plot]'.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

HERE, SEEDS, STEPS = Path(__file__).parent, (1, 2, 3), 4
CASES = [  # name, folder of the example, estimator, more flags
    ("calculator", "calculator", "grpo", []),
    ("calculator", "calculator", "gae", ["--critic_learning_rate", "1e-3"]),
    ("calculator without its tool", "calculator", "grpo", ["--tools"]),
    ("twenty questions", "twenty_questions", "grpo", []),
    (
        "twenty questions",
        "twenty_questions",
        "gae",
        ["--gae_lambda", "1", "--critic_learning_rate", "3e-3"],
    ),
]


def rewards(
    name: str, example: str, estimator: str, flags: list[str], seed: int, folder: Path
) -> list[float]:
    """Mean reward of each PPO step of a run, which is made unless it is finished."""
    output = folder / "runs" / f"{name} {estimator} {seed}".replace(" ", "_")
    if not (output / "result.json").exists():
        words = ["--advantage_estimator", estimator, "--seed", seed, "--output_dir", output, *flags]
        command = ["bash", HERE / example / "run.sh", folder / example, *words]
        subprocess.run(
            [*map(str, command)], env=os.environ | {"RANKS": "1", "DTYPE": "fp32"}, check=True
        )
    lines = [
        json.loads(line)
        for line in (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    return [line["reward/score_mean"] for line in lines if "reward/score_mean" in line]


def plot(found: list[list[list[float]]], file: str) -> None:
    """A line for each seed, for the examples side by side."""
    from matplotlib.figure import Figure

    figure, examples = (
        Figure(figsize=(14, 4.5), layout="constrained"),
        [*dict.fromkeys(case[1] for case in CASES)],
    )
    axes = dict(zip(examples, figure.subplots(1, len(examples), sharey=True), strict=True))
    for case, ((name, example, estimator, _), curves) in enumerate(zip(CASES, found, strict=True)):
        for number, curve in enumerate(curves):
            label = f"{name}, {estimator}" if number == 0 else None
            axes[example].plot(
                range(1, len(curve) + 1), curve, f"C{case % 3}", linewidth=1, label=label
            )
        axes[example].set(xlabel="PPO step", ylabel="mean reward")
        axes[example].legend(fontsize="small")
    figure.savefig(file, dpi=80)


def main() -> None:
    """Make the missing runs and print the table."""
    folder = Path(sys.argv[1]).resolve()
    found: list[list[list[float]]] = [[] for _ in CASES]
    for seed in SEEDS:
        for curves, case in zip(found, CASES, strict=True):
            curves.append(rewards(*case, seed, folder))
    print("| example | estimator | seed 1 | seed 2 | seed 3 |\n|---|---|---|---|---|")
    for (name, _, estimator, _), curves in zip(CASES, found, strict=True):
        ends = [
            (statistics.mean(curve[:STEPS]), statistics.mean(curve[-STEPS:])) for curve in curves
        ]
        print(
            f"| {name} | `{estimator}` |"
            f" {' | '.join('{:.2f} -> {:.2f}'.format(*both) for both in ends)} |"
        )
    if len(sys.argv) > 2:
        plot(found, sys.argv[2])


if __name__ == "__main__":
    main()
