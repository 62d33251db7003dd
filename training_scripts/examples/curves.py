"""The rewards of the examples with episodes in step 3, by GRPO and by PPO with a critic: a table of
three seeds, and a picture of their curves if a file is named for it. One rank, fp32.

    python training_scripts/examples/curves.py FOLDER [PICTURE.png]
    python training_scripts/examples/curves.py FOLDER --agents [--estimator grpo]

The first command has the calculator also without its tool; the second one the same tasks as agents
(`agents/`), as a function, as a program and, where `verifiers` is installed, as a task of that,
beside `--tools` and `--environment`. Finished runs are kept in the folder, so an interrupted
command resumes, and both share their runs. The picture needs matplotlib: pip install -e '.[plot]'.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).parent
SEEDS = (1, 2, 3)
STEPS = 4  # at the beginning and at the end, of which the table has means


@dataclass(frozen=True)
class Case:
    """A line of the table. `form`: of an agent, "" without one; `flags`: more flags of step 3."""

    name: str
    example: str
    estimator: str
    flags: Sequence[str] = field(default=())
    form: str = ""

    def command(self, folder: Path) -> list[str]:
        """The script of its run, without what all runs have."""
        if self.form:
            script = HERE / "agents/run.sh"
            return ["bash", str(script), str(folder), self.example, self.form]
        return ["bash", str(HERE / self.example / "run.sh"), str(folder / self.example)]

    def output(self, folder: Path, seed: int) -> Path:
        """The folder of its run with this seed."""
        words = f"{self.name} {self.estimator} {seed}"
        return folder / "runs" / words.replace(" ", "_").replace(",", "")


CALCULATOR_GAE = ("--critic_learning_rate", "1e-3")
QUESTIONS_GAE = ("--gae_lambda", "1", "--critic_learning_rate", "3e-3")
CASES = [
    Case("calculator", "calculator", "grpo"),
    Case("calculator", "calculator", "gae", CALCULATOR_GAE),
    Case("calculator without its tool", "calculator", "grpo", ("--tools",)),
    Case("twenty questions", "twenty_questions", "grpo"),
    Case("twenty questions", "twenty_questions", "gae", QUESTIONS_GAE),
]


def agent_cases() -> list[Case]:
    """The tasks as agents, each beside the one that is no agent."""
    cases = list[Case]()
    for case in CASES:
        if "--tools" in case.flags:
            continue
        cases.append(case)
        forms = ["function", "program"]
        if case.example == "calculator" and find_spec("verifiers") is not None:
            forms.append("verifiers")
        for form in forms:
            name = f"{case.name}, {form}"
            cases.append(Case(name, case.example, case.estimator, case.flags, form))
    return cases


def rewards(case: Case, seed: int, folder: Path) -> list[float]:
    """Mean reward of each PPO step of a run, which is made unless it is finished."""
    output = case.output(folder, seed)
    if not (output / "result.json").exists():
        words = ["--advantage_estimator", case.estimator, "--seed", str(seed)]
        words += ["--output_dir", str(output), *case.flags]
        environment = os.environ | {"RANKS": "1", "DTYPE": "fp32"}
        subprocess.run([*case.command(folder), *words], env=environment, check=True)
    curve = list[float]()
    for text in (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        line = json.loads(text)
        if "reward/score_mean" in line:
            curve.append(line["reward/score_mean"])
    return curve


def plot(
    cases: Sequence[Case], curves_of_cases: Sequence[Sequence[list[float]]], file: str
) -> None:
    """A line for each seed, for the examples side by side."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 4.5), layout="constrained")
    examples = list(dict.fromkeys(case.example for case in cases))
    axes = dict(zip(examples, figure.subplots(1, len(examples), sharey=True), strict=True))
    for index, (case, curves) in enumerate(zip(cases, curves_of_cases, strict=True)):
        of_example = axes[case.example]
        for number, curve in enumerate(curves):
            label = None
            if number == 0:
                label = f"{case.name}, {case.estimator}"
            steps = range(1, len(curve) + 1)
            of_example.plot(steps, curve, f"C{index % 3}", linewidth=1, label=label)
        of_example.set(xlabel="PPO step", ylabel="mean reward")
        of_example.legend(fontsize="small")
    figure.savefig(file, dpi=80)


def main() -> None:
    """Make the missing runs and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="of models, data and runs")
    parser.add_argument("picture", nargs="?", help="a file for a picture of the curves")
    parser.add_argument("--agents", action="store_true", help="the tasks as agents too")
    parser.add_argument("--estimator", choices=["grpo", "gae"], help="runs of this one alone")
    options = parser.parse_args()
    folder = options.folder.resolve()
    cases = CASES
    if options.agents:
        cases = agent_cases()
    if options.estimator:
        cases = [case for case in cases if case.estimator == options.estimator]
    curves_of_cases: list[list[list[float]]] = [[] for _ in cases]
    for seed in SEEDS:
        for case, curves in zip(cases, curves_of_cases, strict=True):
            curves.append(rewards(case, seed, folder))
    print("| example | estimator | seed 1 | seed 2 | seed 3 |\n|---|---|---|---|---|")
    for case, curves in zip(cases, curves_of_cases, strict=True):
        ends = list[str]()
        for curve in curves:
            first, last = statistics.mean(curve[:STEPS]), statistics.mean(curve[-STEPS:])
            ends.append(f"{first:.2f} -> {last:.2f}")
        print(f"| {case.name} | `{case.estimator}` | {' | '.join(ends)} |")
    if options.picture:
        plot(cases, curves_of_cases, options.picture)


if __name__ == "__main__":
    main()
