"""Write the report of some runs to a file, with the figures of a table. `assets/report.html`
renders the data of the page: jinja2 escapes every text of a run that enters it."""

from __future__ import annotations

import base64
import hashlib
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import MISSING, dataclass
from datetime import datetime, timezone
from fnmatch import fnmatchcase
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from dschat_ppo.common.atomic_files import write_file
from dschat_ppo.common.logging import logger
from dschat_ppo.common.paths import METRICS, REPORT, RESULT, VALIDATION, shown_path
from dschat_ppo.common.progress import duration
from dschat_ppo.config.cli import STEPS
from dschat_ppo.config.step_config import defaults_of
from dschat_ppo.errors import NonFiniteError, StopRequested, UnhealthyRun, UserError, reading
from dschat_ppo.html_report.run_folder import (
    NOT_PLOTTED,
    Answer,
    Points,
    Run,
    number_or_none,
    read_runs,
)

# The metrics of the overview, in its order: name -> its words in the table.
HEADLINES = {
    "reward/score_mean": "score",
    "eval/score": "held-out score",
    "eval/pass@1": "held-out pass@1",
    "kl/ref_k1": "KL to the reference",
    "rollout/length_mean": "length",
    "policy/entropy": "entropy",
    "loss": "loss",
    "eval_loss": "held-out loss",
    "accuracy": "accuracy",
    "eval_accuracy": "held-out accuracy",
}


@dataclass(frozen=True)
class Figure:
    """One figure."""

    section: str  # its heading
    title: str
    metrics: tuple[str, ...]  # patterns of metric names, in the order of the legend
    reading: str  # one sentence on how to read it
    unit: str = ""  # of the vertical axis; "" for a number without one
    # patterns of names that `metrics` matches but the figure does not show
    without: tuple[str, ...] = ()

    def names(self, known: Iterable[str]) -> list[str]:
        """The names among `known` that the figure shows, in the order of its patterns."""
        shown = [
            name
            for name in known
            if not any(fnmatchcase(name, pattern) for pattern in self.without)
        ]
        return list(
            dict.fromkeys(name for at in self.metrics for name in shown if fnmatchcase(name, at))
        )


_REWARD, _POLICY, _VALUE = "Reward and KL", "Policy", "Critic"
_FIT, _COST, _OPTIMIZER = "Loss and accuracy", "Time and memory", "Optimizer"

FIGURES = [
    Figure(
        _REWARD,
        "Reward",
        ("reward/score_mean", "reward/total_mean"),
        "The score should rise; if score_mean rises while total_mean falls, the KL penalty grows"
        " faster.",
    ),
    Figure(
        _REWARD,
        "Held-out evaluation",
        ("eval/score", "eval/pass@*", "eval/majority@*", "eval/score/*"),
        "The same prompts each time: if the training score rises and this does not, the policy"
        " exploits the reward or memorises its prompts.",
    ),
    Figure(
        _REWARD,
        "KL to the reference",
        ("kl/ref_k1", "kl/ref_k3", "eval/kl_ref_k1", "kl/ref_k1/*"),
        "The distance from the model that training started from: it grows slowly in a healthy run,"
        " and a jump to several times its value means that updates are too large.",
        "nats per token",
    ),
    Figure(
        _REWARD,
        "Spread of the scores",
        (
            "reward/score_std",
            "reward/clipped_std",
            "reward/clipped_share",
            "reward/equal_groups_share",
        ),
        "The standard deviation must stay above 0: nothing is learned from answers that all score"
        " the same.",
    ),
    Figure(
        _REWARD,
        "Reward by source",
        (
            "reward/*_mean",
            "reward/score_mean/*",
            "reward/*_share",
            "eval/reward/*_mean",
            "eval/reward/*_mean/*",
            "eval/reward/*_share",
        ),
        "One line for each reward source or data set: one that stays flat adds nothing, and one"
        " that falls is traded for the others.",
        without=(
            "reward/score_mean",
            "reward/total_mean",
            "reward/equal_groups_share",
            "reward/clipped_share",
        ),
    ),
    Figure(
        _POLICY,
        "Response length",
        ("rollout/length_mean", "rollout/length_max", "eval/length_mean", "rollout/length_mean/*"),
        "If length and score rise together without better answers, the reward favours long"
        " answers.",
        "tokens",
    ),
    Figure(
        _POLICY,
        "Responses that end",
        ("rollout/ended_share", "rollout/distinct_share", "eval/ended_share"),
        "The share that end by themselves should be near 1, and the share of distinct ones should"
        " not collapse.",
    ),
    Figure(
        _POLICY,
        "Entropy",
        ("policy/entropy",),
        "It falls slowly as the policy becomes sure; near 0 the policy repeats itself and no longer"
        " explores.",
        "nats per token",
    ),
    Figure(
        _POLICY,
        "Clip fractions",
        ("policy/clip_fraction", "value/clip_fraction"),
        "The share of tokens that the loss clips: the policy's is usually below 0.2, and above 0.3"
        " its updates are too large; the critic's may be higher.",
    ),
    Figure(
        _POLICY,
        "Size of the policy updates",
        (
            "policy/approx_kl",
            "policy/kl_k3",
            "policy/log_ratio_abs_mean",
            "policy/first_log_ratio_abs_mean",
        ),
        "The policy before and after its updates: the distances stay small and steady in a healthy"
        " run.",
    ),
    Figure(
        _POLICY,
        "Sampling versus training",
        ("rollout/logprob_diff_mean",),
        "The log-probs of generation and of training should be equal: above 0.1 the two do not"
        " compute the same model.",
        "nats",
    ),
    Figure(
        _VALUE,
        "Value loss",
        ("value/loss",),
        "It falls as the critic learns the returns, and rises for a while when the policy finds"
        " better answers.",
    ),
    Figure(
        _VALUE,
        "Explained variance",
        ("value/explained_variance",),
        "The share of the returns' variance that the critic predicts: towards 1 is good, and 0 or"
        " less means that it does not help (which is harmless when all returns are nearly equal).",
    ),
    Figure(
        _FIT,
        "Loss",
        ("loss", "eval_loss", "loss/*", "eval_loss/*"),
        "It should fall and level out; if the held-out loss rises while the other falls, the model"
        " overfits.",
    ),
    Figure(
        _FIT,
        "Accuracy",
        ("accuracy", "eval_accuracy", "accuracy/*", "eval_accuracy/*"),
        "The share of pairs whose chosen response wins: 0.5 is a coin toss, and held-out accuracy"
        " counts.",
    ),
    Figure(
        _FIT,
        "Chosen and rejected",
        ("margin", "eval_margin", "chosen_*", "rejected_*", "eval_chosen_*", "eval_rejected_*"),
        "The lines should part, so that the margin grows; with DPO, if both fall together, chosen"
        " responses become less likely too.",
        without=("*_logprob", "*_logprob/*"),
    ),
    Figure(
        _COST,
        "Time per step by phase",
        ("time/*",),
        "Together they are the time of a step, and the highest line is the phase to speed up.",
        "seconds",
        without=("time/*_tokens_per_s", "time/*_imbalance", "time/*/*"),
    ),
    Figure(
        _COST,
        "Throughput",
        ("time/*_tokens_per_s",),
        "Of all ranks: a lasting fall usually comes from longer responses or a busy machine.",
        "tokens per second",
    ),
    Figure(
        _COST,
        "Memory",
        ("memory/*gib",),
        "Of the fullest rank: a curve that never flattens at equal lengths points to a leak.",
        "GiB",
    ),
    Figure(
        _OPTIMIZER,
        "Gradient norm",
        ("grad_norm", "optim/grad_norm/*"),
        "Before clipping: single spikes are clipped and harmless, and a steady rise announces"
        " divergence.",
    ),
    Figure(
        _OPTIMIZER,
        "Skipped updates",
        ("optim/nonfinite_skipped", "optim/overflow/*"),
        "Skipped for NaN, infinity or an fp16 overflow: rare ones are harmless; if there are more,"
        " look at the files in nonfinite/.",
    ),
    Figure(
        _OPTIMIZER,
        "Learning rate",
        ("lr", "*_lr", "optim/lr/*", "optim/*_lr/*"),
        "The schedule as it ran.",
    ),
]
OTHER_METRICS = "Other metrics"  # the section of the metrics that no figure shows, one figure each


def figures_of(known: Iterable[str]) -> list[tuple[Figure, list[str]]]:
    """The figures with the names among `known` that each shows, then one for each other metric,
    sorted by name."""
    names = list(known)
    found = [(figure, shown) for figure in FIGURES if (shown := figure.names(names))]
    rest = sorted(set(names) - {name for _, shown in found for name in shown} - set(NOT_PLOTTED))
    return found + [(Figure(OTHER_METRICS, name, (name,), ""), [name]) for name in rest]


MOST_RUNS = 6  # that colours and dashes still distinguish
ASSETS = Path(__file__).parent / "assets"
JINJA = Environment(
    loader=FileSystemLoader(ASSETS), autoescape=True, undefined=StrictUndefined, trim_blocks=True
)
JINJA.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
MOST_POINTS = 400  # of one metric of one run; fewer where several runs are compared
MOST_ANSWER_CHARACTERS = 2000  # of one prompt or answer
# of each run: held-out prompts, and steps whose training samples are shown
MOST_PROMPTS, MOST_STEPS = 40, 20
MOST_ANSWERS = 8  # to a held-out prompt in one evaluation
ENDS = {
    "eos": "ended",
    "stop": "ended at a stop string",
    "length": "cut at the length limit",
    "data": "of the data",
}
Value = TypeVar("Value")


@dataclass(frozen=True)
class Table:
    """A table; the first cell of each row is its heading."""

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Drawing:
    """A figure of the page."""

    number: int  # its place in the data of the page
    figure: Figure
    # for the script: title, and series with label, number of the run, values x and y
    panels: list[dict[str, Any]]
    table: Table  # first, last, lowest and highest value of each metric


def write_report(folders: Sequence[Path], path: Path) -> None:
    """Write one HTML file, whole or not at all, that compares the runs in 1 to `MOST_RUNS`
    `folders`, finished or not; it needs no network, and no large library is imported."""
    if not 1 <= len(folders) <= MOST_RUNS:
        raise UserError(f"a report shows 1 to {MOST_RUNS} runs, got {len(folders)}; name fewer")
    text = page(read_runs(folders), time.time())
    # JSON may hold half a surrogate pair, which UTF-8 cannot
    content = text.encode(errors="replace")
    try:
        write_file(path, content)
    except OSError as problem:
        raise UserError(
            f"{path}: cannot be written ({problem.strerror}); name another file by --out"
        ) from problem


@contextmanager
def reporting(output: Path) -> Iterator[None]:
    """The block is a run that writes to `output`: at its end, also where it stops or a number is
    not finite, the report of its steps is written; on rank 0. So is that of a finished run which
    was killed before it was written."""
    files = [output / METRICS, output / VALIDATION / METRICS]
    before = [_last_written(file) for file in files]

    def report() -> None:
        for file, old in zip(files, before, strict=True):
            is_lost = (file.parent / RESULT).exists() and not (file.parent / REPORT).exists()
            if _last_written(file) != 0 and (_last_written(file) != old or is_lost):
                report_run(file.parent)

    try:
        yield
    except (StopRequested, UnhealthyRun, NonFiniteError) as problem:
        try:
            report()
        finally:  # a second Ctrl-C does not change how the run ended
            raise problem
    report()


def _last_written(file: Path) -> int:
    """When a file was written last; 0 without it, while it is empty, or if it cannot be reached."""
    with suppress(OSError):
        found = file.stat()
        return found.st_mtime_ns if found.st_size else 0
    return 0


def report_run(folder: Path) -> None:
    """Write `report.html` into the output folder of a run. What goes wrong is a warning, because
    the run itself is complete."""
    path = folder / REPORT
    try:
        with reading(f"{path}"):
            write_report([folder], path)
    except UserError as problem:
        logger().warning(f"no report: {problem}")
    else:
        logger().info(f"report: {shown_path(path)}")


def page(runs: Sequence[Run], now: float) -> str:
    """The page of 1 to 6 runs as text. `now` is in seconds since the epoch."""
    figures = drawings(runs)
    first = [made for made in figures[:2] if made.figure.section == figures[0].figure.section]
    grouped = groupby(figures[len(first) :], key=lambda made: made.figure.section)
    events = [
        [
            {"step": at, "name": str(event.get("name", ""))}
            for event in run.health or []
            if (at := number_or_none(event.get("step"))) is not None
        ]
        for run in runs
    ]
    data = {
        "runs": [{"name": run.name, "events": own} for run, own in zip(runs, events, strict=True)],
        "figures": [made.panels for made in figures],
    }
    files = ["uPlot.LICENSE", "uPlot.iife.min.js", "report.js"]
    licence, library, script = ((ASSETS / name).read_text(encoding="utf-8") for name in files)
    script = f"/*\n{licence}*/\n{library}\n{script}"
    return JINJA.get_template("report.html").render(
        title="Training report: " + ", ".join(run.name for run in runs),
        made_at=datetime.fromtimestamp(now, tz=timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        style="".join(
            (ASSETS / name).read_text(encoding="utf-8") for name in ("uPlot.min.css", "report.css")
        ),
        script=script,
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        data=data,
        runs=runs,
        overview=overview(runs, now),
        first=first,
        other=OTHER_METRICS,
        most=MOST_ANSWER_CHARACTERS,
        ends=ENDS,
        sections=[(section, list(group)) for section, group in grouped],
        health=health(runs),
        answers=answers(runs),
        flags=flags(runs),
    )


def drawings(runs: Sequence[Run]) -> list[Drawing]:
    """The figures that have data, in the order of the table."""
    made: list[Drawing] = []
    for figure, names in figures_of(dict.fromkeys(name for run in runs for name in run.metrics)):
        if panels := [panel for panel in lines(runs, names) if panel["series"]]:
            rows = [
                (run.name, name, *extent(run.metrics[name]))
                for name in names
                for run in runs
                if name in run.metrics
            ]
            head = ("run", "metric", "first", "last", "lowest", "highest")
            made.append(
                Drawing(len(made), figure, panels, Table(f"{figure.title}: numbers", head, rows))
            )
    return made


def lines(runs: Sequence[Run], names: Sequence[str]) -> list[dict[str, Any]]:
    """Of one run, one panel with a line for each metric; of several, a panel for each metric with a
    line for each run. A metric without a finite value has no line."""
    found = []
    for name in names:
        series = []
        for number, run in enumerate(runs):
            points = thin(run.metrics.get(name, []), 2 * MOST_POINTS // (len(runs) + 1))
            if any(value is not None for _, value in points):
                xs = [step for step, _ in points]
                ys = [rounded(value) for _, value in points]
                series.append(
                    {"label": name if len(runs) == 1 else run.name, "run": number, "x": xs, "y": ys}
                )
        found.append({"title": name, "series": series})
    if len(runs) > 1:
        return found
    return [{"title": "", "series": [one for panel in found for one in panel["series"]]}]


def thin(points: Points, most: int) -> Points:
    """About `most` of the points: of each stretch of steps the lowest, the highest and the first
    NaN; and the last."""
    if len(points) <= most:
        return points
    count = most // 2
    kept = {points[-1]}
    for number in range(count):
        stretch = points[number * len(points) // count : (number + 1) * len(points) // count]
        finite = sorted((value, step) for step, value in stretch if value is not None)
        kept |= {(step, value) for value, step in [*finite[:1], *finite[-1:]]}
        kept |= set([point for point in stretch if point[1] is None][:1])
    return sorted(kept, key=lambda point: point[0])


def rounded(value: float | None) -> Any:
    """The value with four significant digits, more than a screen shows; whole numbers below a
    million as integers."""
    if value is not None and abs(value) < 1e6 and value == int(value):
        return int(value)
    if value is None:
        return None
    return float(f"{value:.4g}")


def extent(points: Points) -> list[str]:
    """First, last, lowest and highest finite value, as text; "-" without one."""
    finite = [value for _, value in points if value is not None]
    if finite:
        ends = [finite[0], finite[-1], min(finite), max(finite)]
    else:
        ends = []
    return [f"{rounded(value):g}" for value in ends] or ["-"] * 4


def overview(runs: Sequence[Run], now: float) -> Table:
    """What the runs are and how far they came: kind, state, main metrics and models."""
    shown = [
        (name, words)
        for name, words in HEADLINES.items()
        if any(name in run.metrics for run in runs)
    ]
    models = dict.fromkeys(label for run in runs for label in run.models)
    rows = [
        ("kind", *(run.kind for run in runs)),
        ("state", *(state(run, now) for run in runs)),
        (
            "steps",
            *(
                f"{run.steps[-1]:,}" if run.steps[-1] else "0, evaluation without training"
                for run in runs
            ),
        ),
        (
            "duration",
            *(
                (
                    duration(
                        max(run.times.values()) - min(filter(None, run.times.values()), default=0.0)
                    )
                    if any(run.times.values())
                    else "-"
                )
                for run in runs
            ),
        ),
        ("times started", *(str(len(run.starts) or "-") for run in runs)),
        *((words, *(change(run, name) for run in runs)) for name, words in shown),
        *((label, *(text_of(run.models.get(label)) for run in runs)) for label in models),
        ("folder", *(str(run.folder) for run in runs)),
    ]
    return Table("Runs; numbers are first → last", ("", *(run.name for run in runs)), rows)


def state(run: Run, now: float) -> str:
    """Whether a run is finished, and when it was last seen."""
    if run.result is not None:
        return "finished"
    last = run.times[run.steps[-1]]
    if last:
        return f"not finished; last step {duration(max(now - last, 0))} before this report"
    return "not finished"


def change(run: Run, name: str) -> str:
    """The first and the last finite value of a metric."""
    first, last, _, _ = extent(run.metrics.get(name, []))
    if len(run.metrics.get(name, [])) < 2:
        return first
    return f"{first} → {last}"


def health(runs: Sequence[Run]) -> Table | None:
    """The health events of all runs; None if no run wrote any file of them."""
    if all(run.health is None for run in runs):
        return None
    keys = ("step", "level", "name", "seen", "cause", "change")
    rows = [
        (run.name, *(text_of(event.get(key)) for key in keys))
        for run in runs
        for event in run.health or []
    ]
    head = ("run", "step", "level", "event", "what was seen", "likely cause", "what to change")
    return Table("Health events, in the order in which they occurred", head, rows)


def answers(runs: Sequence[Run]) -> dict[str, Any]:
    """The answers to compare: `MOST_PROMPTS` held-out prompts of each run, and training samples of
    `MOST_STEPS` steps.

    held_out: (prompt, columns); a column is (title, answers) of one evaluation: of one run the
    first and the last are compared, of several runs their last ones. training: (title, answers with
    the highest score first) of one step.
    """
    held_out: dict[str, list[tuple[str, list[Answer]]]] = {}
    training = []
    for run in runs:
        name = f"{run.name}, " if len(runs) > 1 else ""
        by_prompt: dict[str, dict[int, list[Answer]]] = {}
        for answer in run.answers:
            if answer.kind == "held-out":
                by_prompt.setdefault(answer.prompt, {}).setdefault(answer.step, []).append(answer)
        for prompt in list(by_prompt)[:MOST_PROMPTS]:
            steps = sorted(by_prompt[prompt])
            for step in dict.fromkeys(steps[-1:] if len(runs) > 1 else [steps[0], steps[-1]]):
                held_out.setdefault(prompt, []).append(
                    (f"{name}step {step}", by_prompt[prompt][step][:MOST_ANSWERS])
                )
        samples = [answer for answer in run.answers if answer.kind == "training"]
        by_step = [
            (step, list(own)) for step, own in groupby(samples, key=lambda answer: answer.step)
        ]
        for step, own in evenly(by_step, MOST_STEPS):
            training.append(
                (f"{name}step {step}", sorted(own, key=lambda answer: -(answer.score or 0.0)))
            )
    return {"held_out": list(held_out.items()), "training": training}


def evenly(values: list[Value], count: int) -> list[Value]:
    """At most `count` of the values, 2 or more, at even distances, with the first and the last."""
    if len(values) <= count:
        return values
    return [values[number * (len(values) - 1) // (count - 1)] for number in range(count)]


def text_of(value: Any) -> str:
    """A value of YAML or JSON as text: None as "-", a list or mapping as JSON, a long number with
    four digits."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, (list, dict, bool)):
        return json.dumps(value, default=str, ensure_ascii=False)
    return str(value)


def flags(runs: Sequence[Run]) -> list[tuple[str, Table]]:
    """(heading, table): the flags that differ between the runs, and of each run those unlike its
    defaults."""
    found = []
    if len(runs) > 1:
        names = sorted({flag for run in runs for flag in run.config})
        rows = [[f"--{flag}", *(text_of(run.config.get(flag)) for run in runs)] for flag in names]
        rows = [row for row in rows if len(set(row[1:])) > 1]
        found.append(
            (
                "",
                Table(
                    "Flags that differ between the runs",
                    ("flag", *(run.name for run in runs)),
                    rows,
                ),
            )
        )
    for run in runs:
        known = defaults(run.config)
        title = f"Flags of {run.name} that differ from their defaults"
        changed = [
            (f"--{flag}", text_of(value))
            for flag, value in run.config.items()
            if known.get(flag, MISSING) != value
        ]
        found.append((title if len(runs) > 1 else "", Table(title, ("flag", "value"), changed)))
    return found


def defaults(config: dict[str, Any]) -> dict[str, Any]:
    """Flag -> default of the step that a configuration belongs to."""
    if "actor_model_name_or_path" in config:
        return defaults_of(STEPS["ppo"])
    if "objective" in config:
        return defaults_of(
            STEPS["reward" if config["objective"] in ("reward", "process") else "dpo"]
        )
    return defaults_of(STEPS["sft"])
