"""The tables of a report: what the runs are, their health events, and their flags."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import MISSING, dataclass
from typing import Any

from dschat_ppo.common.progress import duration
from dschat_ppo.config.cli import STEPS
from dschat_ppo.config.step_config import defaults_of
from dschat_ppo.html_report.run_folder import Points, Run, trains_reward_model

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
class Table:
    """A table; the first cell of each row is its heading."""

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


def overview(runs: Sequence[Run], now: float) -> Table:
    """What the runs are and how far they came: kind, state, main metrics and models."""
    rows = [
        ("kind", *(run.kind for run in runs)),
        ("state", *(state(run, now) for run in runs)),
        ("steps", *(_steps(run) for run in runs)),
        ("duration", *(_time_of_steps(run) for run in runs)),
        ("times started", *(str(len(run.starts) or "-") for run in runs)),
    ]
    for name, words in HEADLINES.items():
        if any(name in run.metrics for run in runs):
            rows.append((words, *(change(run, name) for run in runs)))
    labels: dict[str, None] = {}
    for run in runs:
        labels |= dict.fromkeys(run.models)
    for label in labels:
        rows.append((label, *(cell_text(run.models.get(label)) for run in runs)))
    rows.append(("folder", *(str(run.folder) for run in runs)))
    return Table("Runs; numbers are first → last", ("", *(run.name for run in runs)), rows)


def _steps(run: Run) -> str:
    last = run.steps[-1]
    if last:
        return f"{last:,}"
    return "0, evaluation without training"


def _time_of_steps(run: Run) -> str:
    """The time from the first to the last step whose time is known."""
    times = [time for time in run.times.values() if time]
    if not times:
        return "-"
    return duration(max(run.times.values()) - min(times))


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
    points = run.metrics.get(name, [])
    first, last, _, _ = extent(points)
    if len(points) < 2:
        return first
    return f"{first} → {last}"


def extent(points: Points) -> list[str]:
    """First, last, lowest and highest finite value, as text; "-" without one."""
    finite = [value for _, value in points if value is not None]
    if not finite:
        return ["-"] * 4
    ends = [finite[0], finite[-1], min(finite), max(finite)]
    return [f"{rounded(value):g}" for value in ends]


def rounded(value: float | None) -> Any:
    """The value with four significant digits, more than a screen shows; whole numbers below a
    million as integers."""
    if value is None:
        return None
    if abs(value) < 1e6 and value == int(value):
        return int(value)
    return float(f"{value:.4g}")


def health(runs: Sequence[Run]) -> Table | None:
    """The health events of all runs; None if no run wrote any file of them."""
    if all(run.health is None for run in runs):
        return None
    keys = ("step", "level", "name", "seen", "cause", "change")
    rows = []
    for run in runs:
        for event in run.health or []:
            rows.append((run.name, *(cell_text(event.get(key)) for key in keys)))
    head = ("run", "step", "level", "event", "what was seen", "likely cause", "what to change")
    return Table("Health events, in the order in which they occurred", head, rows)


def flags(runs: Sequence[Run]) -> list[tuple[str, Table]]:
    """(heading, table): the flags that differ between the runs, and of each run those unlike its
    defaults."""
    tables = []
    if len(runs) > 1:
        tables.append(("", _differing_flags(runs)))
    for run in runs:
        step_defaults = defaults(run.config)
        changed = []
        for flag, value in run.config.items():
            if step_defaults.get(flag, MISSING) != value:
                changed.append((f"--{flag}", cell_text(value)))
        title = f"Flags of {run.name} that differ from their defaults"
        heading = title if len(runs) > 1 else ""
        tables.append((heading, Table(title, ("flag", "value"), changed)))
    return tables


def _differing_flags(runs: Sequence[Run]) -> Table:
    names: set[str] = set()
    for run in runs:
        names |= set(run.config)
    rows = []
    for flag in sorted(names):
        texts = [cell_text(run.config.get(flag)) for run in runs]
        if len(set(texts)) > 1:
            rows.append([f"--{flag}", *texts])
    return Table("Flags that differ between the runs", ("flag", *(run.name for run in runs)), rows)


def defaults(config: dict[str, Any]) -> dict[str, Any]:
    """Flag -> default of the step that a configuration belongs to."""
    if "actor_model_name_or_path" in config:
        step = "ppo"
    elif "objective" not in config:
        step = "sft"
    elif trains_reward_model(config["objective"]):
        step = "reward"
    else:
        step = "dpo"
    return defaults_of(STEPS[step])


def cell_text(value: Any) -> str:
    """A value of YAML or JSON as text: None as "-", a list or mapping as JSON, a long number with
    four digits."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, (list, dict, bool)):
        return json.dumps(value, default=str, ensure_ascii=False)
    return str(value)
