"""The data of the page, which `assets/report.html` renders: jinja2 escapes every text of a run that enters it."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields
from datetime import datetime, timezone
from itertools import chain, groupby
from pathlib import Path
from typing import Any, TypeVar, get_type_hints
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from dschat_ppo.common.paths import short_names
from dschat_ppo.common.progress import duration
from dschat_ppo.config.retired_flags import RETIRED, note_on_retired
from dschat_ppo.config.steps import STEPS
from dschat_ppo.html_report.figures import HEADLINES, OTHER_METRICS, Figure, figures_of
from dschat_ppo.html_report.run_folder import Answer, Points, Run, number_or_none, related_runs

REPORT = "report.html"
ASSETS = Path(__file__).parent / "assets"
MOST_POINTS = {1: 400, 2: 300}  # of one series, by number of runs
MOST_POINTS_OF_MANY = 160
MOST_ANSWER_CHARACTERS = 2000  # of one prompt or answer
MOST_TEXT = 900_000  # characters of all prompts and answers of the page
ENDS = {"eos": "ended", "stop": "ended at a stop string", "length": "cut at the length limit", "data": "of the data"}
Value = TypeVar("Value")


@dataclass(frozen=True)
class Table:
    """A table; the first cell of each row is its heading."""

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Drawing:
    """A figure of the page; `number` is its place in the data of the page.

    Attributes:
        panels: for the script: title, and series with label, number of the run, and values x and y.
        single: the values of a figure with one step, which is no curve: (step, metric, run, value).
        table: first, last, lowest and highest value of each metric.
    """

    number: int
    figure: Figure
    panels: list[dict[str, Any]]
    single: list[tuple[str, ...]]
    table: Table


def page(runs: Sequence[Run], now: float, place: Path) -> str:
    """The page of 1 to 6 runs as text. `now` is in seconds since the epoch; links start from the folder `place`."""
    figures = drawings(runs)
    first = [made for made in figures[:2] if made.figure.section == figures[0].figure.section]
    grouped = groupby(figures[len(first) :], key=lambda made: made.figure.section)
    events = [
        [{"step": at, "name": str(event.get("name", ""))} for event in run.health or []
         if (at := number_or_none(event.get("step"))) is not None]
        for run in runs
    ]  # fmt: skip
    data = {
        "runs": [{"name": run.name, "events": own} for run, own in zip(runs, events, strict=True)],
        "figures": [{"kind": made.figure.kind, "panels": made.panels} for made in figures],
    }
    own = [run.folder.resolve() for run in runs]
    others = [folder for folder in dict.fromkeys(chain.from_iterable(map(related_runs, runs))) if folder not in own]
    files = ["uPlot.LICENSE", "uPlot.iife.min.js", "report.js"]
    licence, library, script = ((ASSETS / name).read_text(encoding="utf-8") for name in files)
    script = f"/*\n{licence}*/\n{library}\n{script}"
    jinja = Environment(loader=FileSystemLoader(ASSETS), autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    jinja.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    return jinja.get_template("report.html").render(
        title="Training report: " + ", ".join(run.name for run in runs),
        made_at=datetime.fromtimestamp(now, tz=timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        style="".join((ASSETS / name).read_text(encoding="utf-8") for name in ("uPlot.min.css", "report.css")),
        script=script,
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        data=data,
        runs=runs,
        overview=overview(runs, now),
        links=[(quote(os.path.relpath(folder / REPORT, place.resolve())), name)
               for folder, name in zip(others, short_names(others) if others else [], strict=True)],
        first=first,
        other=OTHER_METRICS,
        most=MOST_ANSWER_CHARACTERS,
        ends=ENDS,
        sections=[(section, list(group)) for section, group in grouped],
        health=health(runs),
        answers=answers(runs),
        flags=flags(runs),
        retired=[(run.name, note) for run in runs if (note := note_on_retired(run.config))],
        versions=versions(runs),
    )  # fmt: skip


def drawings(runs: Sequence[Run]) -> list[Drawing]:
    """The figures that have data, in the order of the table."""
    made: list[Drawing] = []
    for figure, names in figures_of(dict.fromkeys(name for run in runs for name in run.metrics)):
        if figure.kind == "pair":
            panels = [pair(runs, *figure.metrics)] if len(names) == 2 else []
        elif figure.kind == "stacked":
            panels = [bands(run, number, names, len(runs)) for number, run in enumerate(runs)]
        else:
            panels = lines(runs, names)
        panels = [panel for panel in panels if panel["series"]]
        series = [one for panel in panels for one in panel["series"]]
        if not panels:
            continue
        rows = [(run.name, name, *extent(run.metrics[name])) for name in names for run in runs if name in run.metrics]
        table = Table(f"{figure.title}: numbers", ("run", "metric", "first", "last", "lowest", "highest"), rows)
        steps = {step for one in series for step in one["x"]}
        is_single = figure.kind == "lines" and len(steps) == 1  # a curve needs two points
        single = [(name, run, last) for run, name, _, last, _, _ in rows] if is_single else []
        made.append(
            Drawing(len(made), figure, [] if is_single else panels, [(str(*steps), *one) for one in single], table)
        )
    return made


def lines(runs: Sequence[Run], names: Sequence[str]) -> list[dict[str, Any]]:
    """Of one run, one panel with a line for each metric; of several, a panel for each metric with a line for each run.
    A metric without finite values has no line."""
    found = []
    for name in names:
        series = []
        for number, run in enumerate(runs):
            points = run.metrics.get(name, [])
            if any(value is not None for _, value in points):
                thinned = thin(points, MOST_POINTS.get(len(runs), MOST_POINTS_OF_MANY))
                label = name if len(runs) == 1 else run.name
                xs, ys = [step for step, _ in thinned], [rounded(value) for _, value in thinned]
                series.append({"label": label, "run": number, "x": xs, "y": ys})
        found.append({"title": name, "series": series})
    return found if len(runs) > 1 else [{"title": "", "series": [one for panel in found for one in panel["series"]]}]


def pair(runs: Sequence[Run], across: str, up: str) -> dict[str, Any]:
    """One metric against another: a point for each step that has both, ascending in x, and the last one by itself."""
    series, last = [], []
    for number, run in enumerate(runs):
        ups = {step: rounded(value) for step, value in run.metrics.get(up, []) if value is not None}
        both = [(rounded(x), ups[step]) for step, x in run.metrics.get(across, []) if x is not None and step in ups]
        kept = sorted(evenly(both, MOST_POINTS.get(len(runs), MOST_POINTS_OF_MANY)))
        if both:
            series.append({"label": run.name, "run": number, "x": [x for x, _ in kept], "y": [y for _, y in kept]})
            last.append({"label": "last step", "run": number, "x": [both[-1][0]], "y": [both[-1][1]], "last": True})
    return {"title": f"{up} (up) and {across} (across)", "across": across, "series": series + last}


def bands(run: Run, number: int, names: Sequence[str], runs: int) -> dict[str, Any]:
    """The metrics of a run for areas on top of each other, the largest sum first; a step without one counts as 0. Step
    0, before training, does not count."""
    values = {name: dict(run.metrics[name]) for name in names if name in run.metrics}
    steps = [step for step in run.steps if step > 0] or run.steps
    totals: Points = [(step, sum(own.get(step) or 0.0 for own in values.values())) for step in steps]
    kept = [step for step, _ in thin(totals, MOST_POINTS.get(runs, MOST_POINTS_OF_MANY))]
    series = [
        {"label": name, "run": number, "x": kept, "y": [rounded(values[name].get(step) or 0.0) for step in kept]}
        for name in sorted(values, key=lambda name: -sum(value or 0.0 for value in values[name].values()))
    ]
    return {"title": run.name if runs > 1 else "", "series": series}


def thin(points: Points, most: int) -> Points:
    """About `most` of the points: of each stretch of steps the lowest, the highest and the first NaN; and the last."""
    if len(points) <= most:
        return points
    count, kept = most // 2, {points[-1]}
    for number in range(count):
        stretch = points[number * len(points) // count : (number + 1) * len(points) // count]
        finite = sorted((value, step) for step, value in stretch if value is not None)
        kept |= {(step, value) for value, step in [*finite[:1], *finite[-1:]]}
        kept |= set([point for point in stretch if point[1] is None][:1])
    return sorted(kept, key=lambda point: point[0])


def rounded(value: float | None) -> Any:
    """The value with four significant digits, more than a screen shows; whole numbers below a million as integers."""
    if value is not None and abs(value) < 1e6 and value == int(value):
        return int(value)
    return None if value is None else float(f"{value:.4g}")


def extent(points: Points) -> list[str]:
    """First, last, lowest and highest finite value, as text; "-" without one."""
    finite = [value for _, value in points if value is not None]
    ends = [finite[0], finite[-1], min(finite), max(finite)] if finite else []
    return [f"{rounded(value):g}" for value in ends] or ["-"] * 4


def overview(runs: Sequence[Run], now: float) -> Table:
    """What the runs are and how far they came: kind, state, main metrics, models, data, algorithm and rewards."""
    shown = [(name, words) for name, words in HEADLINES.items() if any(name in run.metrics for run in runs)]
    about = [described(run) for run in runs]
    rows = [
        ("kind", *(run.kind for run in runs)),
        ("state", *(state(run, now) for run in runs)),
        ("steps", *(f"{run.steps[-1]:,}" if run.steps[-1] else "0, evaluation without training" for run in runs)),
        ("duration", *(duration(max(run.times.values()) - min(filter(None, run.times.values()), default=0.0))
                       if any(run.times.values()) else "-" for run in runs)),
        ("times started", *(starts(run) for run in runs)),
        *((words, *(change(run, name) for run in runs)) for name, words in shown),
        *((label, *(one.get(label, "-") for one in about)) for label in dict.fromkeys(chain.from_iterable(about))),
        ("folder", *(str(run.folder) for run in runs)),
    ]  # fmt: skip
    return Table("Runs; numbers are first → last", ("", *(run.name for run in runs)), rows)


def described(run: Run) -> dict[str, str]:
    """What a run trains, on what and by what: the label of a row -> its text."""
    given = {name: value for name, value in run.config.items() if value not in (None, [])}
    found: dict[str, Any] = dict(run.models)
    algorithm = {"advantage_estimator": "advantages", "policy_loss": "policy loss", "objective": "objective"}
    found["algorithm"] = [f"{given[flag]} {what}" for flag, what in algorithm.items() if flag in given]
    if "actor_model_name_or_path" in given:
        model = given.get("reward_model_name_or_path", given.get("critic_model_name_or_path"))
        learned = [model] if given.get("use_reward_model") else []
        rules = given.get("reward_function", [])
        found["reward"] = [*learned, *(rules if isinstance(rules, list) else [rules]), given.get("remote_reward_url")]
    found |= {"data": given.get("data_path"), "held-out data": given.get("eval_data_path")}
    found["held-out reward"] = given.get("eval_reward_function")
    rows = {name: value if isinstance(value, list) else [value] for name, value in found.items()}
    return {name: text for name, value in rows.items() if (text := ", ".join(str(part) for part in value if part))}


def state(run: Run, now: float) -> str:
    """Whether a run is finished, and when it was last seen."""
    if run.result is not None:
        return "finished"
    last = run.times[run.steps[-1]]
    return f"not finished; last step {duration(max(now - last, 0))} before this report" if last else "not finished"


def starts(run: Run) -> str:
    """How often a run was started, and at which steps it was resumed."""
    steps = [f"{at:.0f}" for start in run.starts[1:] if (at := number_or_none(start.get("step"))) is not None]
    return f"{len(run.starts)}, resumed at step {', '.join(steps)}" if steps else "1" if run.starts else "-"


def change(run: Run, name: str) -> str:
    """The first and the last finite value of a metric."""
    first, last, _, _ = extent(run.metrics.get(name, []))
    if sum(value is not None for _, value in run.metrics.get(name, [])) == 1:
        return f"{first}, one {'evaluation' if name.startswith('eval') else 'step'}"
    return first if first == "-" else f"{first} → {last}"


def health(runs: Sequence[Run]) -> Table | None:
    """The health events of all runs; None if no run wrote any file of them."""
    if all(run.health is None for run in runs):
        return None
    rows = []
    for name, event in [(run.name, event) for run in runs for event in run.health or []]:
        cells = [text_of(event.get(key)) for key in ("step", "level", "name", "seen", "cause", "change")]
        if event.get("since") not in (None, event.get("step")):
            cells[0] += f" (since {text_of(event['since'])})"
        rows.append((name, *cells))
    head = ("run", "step", "level", "event", "what was seen", "likely cause", "what to change")
    return Table("Health events, in the order in which they occurred", head, rows)


def answers(runs: Sequence[Run]) -> dict[str, Any]:
    """The answers that fit into the page, in two groups, the number that are shown and that of all.

    held_out: (prompt, the columns to compare, the other columns); a column is (title, answers) of one evaluation: of
        one run the first and the last are compared, of several runs their last ones.
    training: (title, answers with the highest score first) of one step.

    What exceeds `MOST_TEXT` is dropped: of held-out answers whole prompts, so that those kept have all their steps; of
    training samples whole steps, evenly over the run. Each run and kind gets an equal share of the space.
    """
    groups = [(number, kind, [answer for answer in run.answers if answer.kind == kind])
              for number, run in enumerate(runs) for kind in ("held-out", "training")]  # fmt: skip
    groups = [group for group in groups if group[2]]
    kept = {(number, kind): fitting(own, MOST_TEXT // len(groups)) for number, kind, own in groups}
    evaluated: dict[str, dict[tuple[int, int], list[Answer]]] = {}
    training = []
    for number, run in enumerate(runs):
        name = f"{run.name}, " if len(runs) > 1 else ""
        for answer in kept.get((number, "held-out"), []):
            evaluated.setdefault(answer.prompt, {}).setdefault((number, answer.step), []).append(answer)
        for step, group in groupby(kept.get((number, "training"), []), key=lambda answer: answer.step):
            own = sorted(group, key=lambda answer: -(answer.score or 0.0))
            training.append((f"{name}step {step}", own))
    held_out = []
    for prompt, found in evaluated.items():
        keys = sorted(found)
        ends = [max(key for key in keys if key[0] == number) for number in dict.fromkeys(key[0] for key in keys)]
        compared = ends[:2] if len(ends) > 1 else list(dict.fromkeys([keys[0], keys[-1]]))
        columns = [(f"{runs[key[0]].name}, step {key[1]}" if len(runs) > 1 else f"step {key[1]}", found[key])
                   for key in [*compared, *(key for key in keys if key not in compared)]]  # fmt: skip
        held_out.append((prompt, columns[: len(compared)], columns[len(compared) :]))
    return {
        "held_out": held_out, "training": training, "shown": sum(map(len, kept.values())),
        "all": sum(len(own) for _, _, own in groups),
    }  # fmt: skip


def fitting(found: list[Answer], space: int) -> list[Answer]:
    """The answers of as many prompts (held-out) or steps (training) as fit into `space` characters."""
    sizes: dict[str | int, int] = {}
    for answer in found:
        size = min(len(answer.prompt), MOST_ANSWER_CHARACTERS) + min(len(answer.text), MOST_ANSWER_CHARACTERS)
        sizes[unit(answer)] = sizes.get(unit(answer), 0) + size
    kept = list(sizes)
    while len(kept) > 1 and sum(sizes[key] for key in kept) > space:
        kept = evenly(list(sizes), len(kept) * 9 // 10)
    return [answer for answer in found if unit(answer) in set(kept)]


def unit(answer: Answer) -> str | int:
    """What answers are kept or dropped together with: the prompt of a held-out one, the step of a sample."""
    return answer.prompt if answer.kind == "held-out" else answer.step


def evenly(values: list[Value], count: int) -> list[Value]:
    """`count` of the values at even distances, with the first and the last; the last alone for a count of 1."""
    if count >= len(values) or count == 1:
        return values[-1:] if count == 1 else values
    return [values[number * (len(values) - 1) // (count - 1)] for number in range(count)]


def text_of(value: Any) -> str:
    """A value of YAML or JSON as text: None as "-", a list or mapping as JSON, a long number with four digits."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    return json.dumps(value, default=str, ensure_ascii=False) if isinstance(value, (list, dict, bool)) else str(value)


def flags(runs: Sequence[Run]) -> list[tuple[str, Table]]:
    """(heading, table): the flags that differ between the runs, and of each run those unlike its defaults, and all."""
    found = []
    if len(runs) > 1:
        names = sorted({flag for run in runs for flag in run.config})
        rows = [[f"--{flag}", *(text_of(run.config.get(flag)) for run in runs)] for flag in names]
        head = ("flag", *(run.name for run in runs))
        found.append(
            ("", Table("Flags that differ between the runs", head, [row for row in rows if len(set(row[1:])) > 1]))
        )
    for run in runs:
        known, head = defaults(run.config), ("flag", "value")
        changed = [(f"--{flag}", text_of(value)) for flag, value in run.config.items()
                   if flag not in RETIRED and known.get(flag, MISSING) != value]  # fmt: skip
        every = [(f"--{flag}", text_of(value)) for flag, value in sorted(run.config.items())]
        heading = f"Flags of {run.name} that differ from their defaults" if len(runs) > 1 else ""
        found.append((heading, Table(f"{run.name}: flags that differ from their defaults", head, changed)))
        found.append((f"All flags of {run.name}", Table(f"{run.name}: all flags", head, every)))
    return found


def defaults(config: dict[str, Any]) -> dict[str, Any]:
    """Flag -> default of the step that a configuration belongs to; MISSING where it must be given."""
    if "actor_model_name_or_path" in config:
        step = STEPS["ppo"]
    elif "objective" in config:
        step = STEPS["reward" if config["objective"] in ("reward", "process") else "dpo"]
    else:
        step = STEPS["sft"]
    own = chain.from_iterable(fields(group) for group in get_type_hints(step.config).values())
    return {
        flag.name: flag.default if flag.default_factory is MISSING else flag.default_factory() for flag in own
    } | step.defaults


def versions(runs: Sequence[Run]) -> Table:
    """The libraries as `starts.jsonl` records them; "a, then b" where a resumed run changed the version."""
    recorded = [[start["versions"] for start in run.starts if isinstance(start.get("versions"), dict)] for run in runs]
    names = dict.fromkeys(name for own in recorded for found in own for name in found)
    rows = [(name, *(", then ".join(dict.fromkeys(str(found[name]) for found in own if name in found)) or "-"
                     for own in recorded)) for name in names]  # fmt: skip
    return Table("Library versions", ("library", *(run.name for run in runs)), rows)
