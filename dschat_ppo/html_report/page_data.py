"""What the page draws: figures with thinned series, and the answers that fit into the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dschat_ppo.html_report.figures import FIGURES, Figure, others
from dschat_ppo.html_report.meanings import meaning_of
from dschat_ppo.html_report.run_folder import Answer, Points, Run, number_or_none
from dschat_ppo.html_report.thinning import rounded, thin

MOST_POINTS = {1: 400, 2: 300}  # of one series, by number of runs
MOST_POINTS_OF_MANY = 160
COLOURS = 6  # of the palette in page.css
BANDS = 8  # of a stacked figure: the smallest phases beyond are added up
MOST_ANSWER_CHARACTERS = 2000  # of one prompt or answer
MOST_TEXT = 900_000  # characters of all prompts and answers of the page
ALL_OTHERS = Figure("Other metrics", "", "docs/outputs.md describes the main metrics.", ())


@dataclass(frozen=True)
class Drawing:
    """A figure with its data: `panels` is for the script of the page, `summary` replaces the picture in words."""

    figure: Figure
    panels: list[dict[str, Any]]
    table: list[tuple[str, str, list[str]]]  # (run, metric, first, last, lowest and highest value)
    summary: str


def drawings(runs: Sequence[Run]) -> list[Drawing]:
    """The figures that have data, in the order of the table, then one for each other metric."""
    known = list(dict.fromkeys(name for run in runs for name in run.metrics))
    made = [_drawing(figure, figure.names(known), runs) for figure in FIGURES]
    rest = [Figure("Other metrics", name, ALL_OTHERS.reading, (name,)) for name in others(known)]
    made += [_drawing(figure, [figure.title], runs) for figure in rest]
    return [drawing for drawing in made if drawing is not None]


def _drawing(figure: Figure, names: list[str], runs: Sequence[Run]) -> Drawing | None:
    if figure.kind == "pair":
        if len(names) < 2:
            return None
        names = [metric for metric in figure.metrics if metric in names]
        panels = [pair_panel(names[0], names[1], runs)]
    elif figure.kind == "stacked":
        panels = [stacked_panel(run, number, names, len(runs)) for number, run in enumerate(runs)]
    else:
        panels = line_panels(names, runs)
    panels = [panel for panel in panels if panel["series"]]
    if not panels:
        return None
    table = [
        (run.name, name, _extent(run.metrics[name])) for name in names for run in runs if name in run.metrics
    ]  # fmt: skip
    return Drawing(figure, panels, table, _summary(figure, table))


def line_panels(names: list[str], runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Of one run, one panel with a line for each metric; of several, a panel for each metric with a line for each run.

    A series without finite values has no line.
    """
    drawn = {
        (number, name): _series(run.metrics[name], number, len(runs))
        for number, run in enumerate(runs) for name in names
        if any(value is not None for _, value in run.metrics.get(name, []))
    }  # fmt: skip
    if len(runs) == 1:
        lines = [
            series | {"label": name, "about": meaning_of(name), "colour": i % COLOURS}
            for i, ((_, name), series) in enumerate(drawn.items())
        ]
        return [{"title": "", "series": lines}]
    panels = []
    for name in names:
        own = [(number, series) for (number, other), series in drawn.items() if other == name]
        lines = [series | {"label": runs[number].name, "colour": number % COLOURS} for number, series in own]
        panels.append({"title": name, "about": meaning_of(name), "series": lines})
    return panels


def _series(points: Points, run: int, runs: int) -> dict[str, Any]:
    series = thin(points, MOST_POINTS.get(runs, MOST_POINTS_OF_MANY))
    found = {"run": run, "x": series.steps, "y": series.means, "gaps": series.gaps}
    return found if series.lows is None else found | {"low": series.lows, "high": series.highs}


def pair_panel(across: str, up: str, runs: Sequence[Run]) -> dict[str, Any]:
    """One metric against another: a line for each run through the steps that have both."""
    lines = []
    for number, run in enumerate(runs):
        ups = {step: value for step, value in run.metrics.get(up, []) if value is not None}
        both = [(step, x) for step, x in run.metrics.get(across, []) if x is not None and step in ups]
        if both:
            most = MOST_POINTS.get(len(runs), MOST_POINTS_OF_MANY)
            xs, ys = thin([*both], most), thin([(step, ups[step]) for step, _ in both], most)
            lines.append(
                {"run": number, "label": run.name, "colour": number % COLOURS, "steps": xs.steps, "x": xs.means,
                 "y": ys.means}
            )  # fmt: skip
    return {"title": "", "across": across, "up": up, "series": lines}


def stacked_panel(run: Run, number: int, names: list[str], runs: int) -> dict[str, Any]:
    """The metrics of one run as bands on top of each other, the largest sum first; a step without one counts as 0."""
    sums = {name: sum(value or 0.0 for _, value in run.metrics[name]) for name in names if name in run.metrics}
    order = sorted(sums, key=lambda name: -sums[name])
    kept, small = (order, []) if len(order) <= BANDS else (order[: BANDS - 1], order[BANDS - 1 :])
    bands = [(name, _filled([name], run)) for name in kept] + ([("other phases", _filled(small, run))] if small else [])
    series = []
    for colour, (name, points) in enumerate(bands):
        band = thin(points, MOST_POINTS.get(runs, MOST_POINTS_OF_MANY))
        about = meaning_of(name) if name in run.metrics else f"the {len(small)} shortest: {', '.join(small)}"
        series.append(
            {"run": number, "label": name, "about": about, "colour": colour, "x": band.steps, "y": band.means}
        )  # fmt: skip
    return {"title": run.name if runs > 1 else "", "series": series}


def _filled(names: list[str], run: Run) -> Points:
    """The sum of some metrics at every step of the run. Step 0, before training, does not count."""
    values = {name: dict(run.metrics[name]) for name in names}
    steps = [step for step in run.steps if step > 0] or run.steps
    return [(step, sum(own.get(step) or 0.0 for own in values.values())) for step in steps]


def _extent(points: Points) -> list[str]:
    """First, last, lowest and highest finite value, as text; "-" without one."""
    finite = [value for _, value in points if value is not None]
    ends = [finite[0], finite[-1], min(finite), max(finite)] if finite else []
    return [f"{rounded(value):g}" for value in ends] or ["-"] * 4


def _summary(figure: Figure, table: list[tuple[str, str, list[str]]]) -> str:
    kind = {"lines": "Line chart", "stacked": "Stacked areas", "pair": "One metric against another"}[figure.kind]
    parts = [f"{name} of {run} from {first} to {last}" for run, name, (first, last, _, _) in table[:8]]
    more = f"; and {len(table) - 8} more in the table below" if len(table) > 8 else ""
    return f"{kind}. {figure.title}: {'; '.join(parts)}{more}."


def health_marks(run: Run) -> list[dict[str, Any]]:
    """Step and name of each health event, for the marks in the figures."""
    return [
        {"step": step, "name": str(event.get("name", ""))}
        for event in run.health or [] if (step := number_or_none(event.get("step"))) is not None
    ]  # fmt: skip


def answer_rows(runs: Sequence[Run]) -> tuple[list[dict[str, Any]], int]:
    """(answers for the page, number of answers of all runs).

    What exceeds `MOST_TEXT` is dropped: of held-out answers whole prompts, so that those kept have all their steps; of
    training samples whole steps, evenly over the run. Each run and kind gets an equal share of the space.
    """
    groups = [
        (number, [answer for answer in run.answers if answer.kind == kind])
        for number, run in enumerate(runs) for kind in ("held-out", "training")
    ]  # fmt: skip
    filled = [(number, answers) for number, answers in groups if answers]
    rows = []
    for number, answers in filled:
        for answer in _fitting(answers, MOST_TEXT // len(filled)):
            row = {
                "run": number, "kind": answer.kind, "step": answer.step, "prompt": cut(answer.prompt),
                "text": cut(answer.text), "score": answer.score, "kl": answer.kl, "tokens": answer.tokens,
                "ended": answer.ended,
            }  # fmt: skip
            rows.append(row | ({"scores": answer.scores} if len(answer.scores) > 1 else {}))
    return rows, sum(len(answers) for _, answers in groups)


def cut(text: str) -> str:
    """The text, or its first `MOST_ANSWER_CHARACTERS` characters with the number of those that are missing."""
    missing = len(text) - MOST_ANSWER_CHARACTERS
    return text if missing <= 0 else f"{text[:MOST_ANSWER_CHARACTERS]} [... {missing:,} more characters]"


def _fitting(answers: list[Answer], space: int) -> list[Answer]:
    """The answers of as many prompts (held-out) or steps (training) as fit into `space` characters."""
    keys = list(dict.fromkeys(_unit(answer) for answer in answers))
    sizes = dict.fromkeys(keys, 0)
    for answer in answers:
        sizes[_unit(answer)] += min(len(answer.prompt), MOST_ANSWER_CHARACTERS) + min(
            len(answer.text), MOST_ANSWER_CHARACTERS
        )
    count = len(keys)
    while count > 1 and sum(sizes[key] for key in evenly(keys, count)) > space:
        count = count * 9 // 10
    kept = set(evenly(keys, count))
    return [answer for answer in answers if _unit(answer) in kept]


def _unit(answer: Answer) -> str | int:
    return answer.prompt if answer.kind == "held-out" else answer.step


def evenly(values: list[Any], count: int) -> list[Any]:
    """`count` of the values at even distances, with the first and the last; the last alone for a count of 1."""
    if count >= len(values):
        return values
    if count == 1:
        return values[-1:]
    return [values[number * (len(values) - 1) // (count - 1)] for number in range(count)]
