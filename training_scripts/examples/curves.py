"""The rewards of the example `calculator` at the start and the end of step 3, by GRPO and by PPO with a critic, and
without its tool: a table of three seeds.

    python training_scripts/examples/curves.py FOLDER

Finished runs are kept in the folder, so an interrupted command resumes.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path

HERE, SEEDS, STEPS = Path(__file__).parent, (1, 2, 3), 4
CASES = [  # name, folder of the example, estimator, more flags
    ("calculator", "calculator", "grpo", []),
    ("calculator", "calculator", "gae", []),
    ("calculator without its tool", "calculator", "grpo", ["--tools"]),
]


def rewards(name: str, example: str, estimator: str, flags: list[str], seed: int, folder: Path) -> tuple[float, float]:
    """Mean reward of the first and of the last `STEPS` PPO steps of a run, which is made unless it is finished."""
    output = folder / "runs" / f"{name} {estimator} {seed}".replace(" ", "_")
    if not (output / "result.json").exists():
        critic = ["--critic_model_name_or_path", folder / example / "sft", "--critic_learning_rate", "1e-3"]
        words = ["--advantage_estimator", estimator, *(critic if estimator == "gae" else []), "--seed", seed, *flags]
        command = ["bash", HERE / example / "run.sh", folder / example, "--output_dir", output, *words]
        subprocess.run([*map(str, command)], check=True)
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    found = [line["reward/score_mean"] for line in lines if "reward/score_mean" in line]
    return statistics.mean(found[:STEPS]), statistics.mean(found[-STEPS:])


def main() -> None:
    """Make the missing runs and print the table."""
    folder = Path(sys.argv[1]).resolve()
    found = [[rewards(*case, seed, folder) for case in CASES] for seed in SEEDS]
    print("| example | estimator | seed 1 | seed 2 | seed 3 |\n|---|---|---|---|---|")
    for number, (name, _, estimator, _) in enumerate(CASES):
        shown = " | ".join("{:.2f} -> {:.2f}".format(*of_seed[number]) for of_seed in found)
        print(f"| {name} | `{estimator}` | {shown} |")


if __name__ == "__main__":
    main()
