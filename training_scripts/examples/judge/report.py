"""The table of `run.sh`, and a picture of its curves if a file is named for it.

    python training_scripts/examples/judge/report.py OUT_DIR SEED ... [--plot FILE.png]

The picture needs matplotlib: pip install -e '.[plot]'.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

RUNS = {"judge": "the judge", "reward": "the learned reward"}  # as in names of folders
PHASES = ("rollout", "score", "reward", "train")  # of a PPO step
RULE = "eval/score"  # share of answers that follow the true rule
METRICS = "metrics.jsonl"


def metrics_of(out: Path, kind: str, seed: int) -> list[dict[str, Any]]:
    lines = (out / f"grpo_{kind}_{seed}" / METRICS).read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def curve(lines: list[dict[str, Any]]) -> dict[int, float]:
    """PPO step -> share of answers that follow the true rule."""
    return {line["step"]: line[RULE] for line in lines if RULE in line}


def step_seconds(lines: list[dict[str, Any]]) -> tuple[float, float]:
    """Median time of a PPO step, without evaluations, and of its scoring by the reward."""
    sums = []
    scoring = []
    for line in lines:
        if "time/train" in line:
            sums.append(sum(line.get(f"time/{phase}", 0.0) for phase in PHASES))
            scoring.append(line["time/reward"])
    return statistics.median(sums), statistics.median(scoring)


def plot(curves: dict[str, list[dict[int, float]]], file: Path) -> None:
    """A line for each seed, their mean, and the band between the lowest and the highest."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5, 3), layout="constrained")
    axes = figure.add_subplot()
    for index, (kind, title) in enumerate(RUNS.items()):
        steps = list(curves[kind][0])
        values = [[seed_curve[step] for seed_curve in curves[kind]] for step in steps]
        colour = f"C{index}"
        axes.fill_between(
            steps,
            [min(each) for each in values],
            [max(each) for each in values],
            color=colour,
            alpha=0.2,
        )
        for seed_curve in curves[kind]:
            axes.plot(steps, list(seed_curve.values()), color=colour, linewidth=0.6)
        means = [statistics.mean(each) for each in values]
        axes.plot(steps, means, color=colour, linewidth=2, label=f"{title}, mean of the seeds")
    axes.set_xlabel("PPO step", fontsize="small")
    axes.set_ylabel("answers that follow the rule", fontsize="small")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(file, dpi=90)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="output folder of run.sh")
    parser.add_argument("seeds", type=int, nargs="+")
    parser.add_argument("--plot", type=Path, help="picture of the runs")
    chosen = parser.parse_args()
    curves: dict[str, list[dict[int, float]]] = {}
    print("| GRPO with | answers that follow the rule, by seed | mean | s/step | of it scoring |")
    print("|---|---|---|---|---|")
    for kind, title in RUNS.items():
        runs = [metrics_of(chosen.out, kind, seed) for seed in chosen.seeds]
        curves[kind] = [curve(lines) for lines in runs]
        starts = [list(values.values())[0] for values in curves[kind]]
        ends = [list(values.values())[-1] for values in curves[kind]]
        shares = ", ".join(
            f"{start:.2f} -> {end:.2f}" for start, end in zip(starts, ends, strict=True)
        )
        timed = [step_seconds(lines) for lines in runs]
        whole = statistics.median(seconds for seconds, _ in timed)
        scoring = statistics.median(seconds / whole_step for whole_step, seconds in timed)
        print(f"| {title} | {shares} | {statistics.mean(ends):.3f} | {whole:.2f} | {scoring:.0%} |")
    if chosen.plot:
        plot(curves, chosen.plot)


if __name__ == "__main__":
    main()
