"""The figures of a report with their data: the lines that the page's script draws, and a table of
numbers below each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dschat_ppo.html_report.figures import Figure, figures_of
from dschat_ppo.html_report.run_folder import Points, Run
from dschat_ppo.html_report.tables import Table, extent, rounded

MOST_POINTS = 400  # of one metric of one run; fewer where several runs are compared


@dataclass(frozen=True)
class Chart:
    """A figure of the page with its data."""

    number: int  # its index in the data of the page
    figure: Figure
    # for the script: title, and series with label, index of the run, values x and y
    panels: list[dict[str, Any]]
    table: Table  # first, last, lowest and highest value of each metric


def charts(runs: Sequence[Run]) -> list[Chart]:
    """The figures that have data, in the order of `FIGURES`."""
    all_names: dict[str, None] = {}
    for run in runs:
        all_names |= dict.fromkeys(run.metrics)
    with_data: list[Chart] = []
    for figure, names in figures_of(all_names):
        panels = [panel for panel in panels_of(runs, names) if panel["series"]]
        if not panels:
            continue
        rows = []
        for name in names:
            for run in runs:
                if name in run.metrics:
                    rows.append((run.name, name, *extent(run.metrics[name])))
        head = ("run", "metric", "first", "last", "lowest", "highest")
        table = Table(f"{figure.title}: numbers", head, rows)
        with_data.append(Chart(len(with_data), figure, panels, table))
    return with_data


def panels_of(runs: Sequence[Run], names: Sequence[str]) -> list[dict[str, Any]]:
    """Of one run, one panel with a line for each metric; of several, a panel for each metric with a
    line for each run. A metric without a finite value has no line."""
    most_points = 2 * MOST_POINTS // (len(runs) + 1)
    panels = []
    all_series = []
    for name in names:
        series_of_metric = []
        for run_index, run in enumerate(runs):
            points = thin(run.metrics.get(name, []), most_points)
            if all(value is None for _, value in points):
                continue
            series_of_metric.append(
                {
                    "label": name if len(runs) == 1 else run.name,
                    "run": run_index,
                    "x": [step for step, _ in points],
                    "y": [rounded(value) for _, value in points],
                }
            )
        panels.append({"title": name, "series": series_of_metric})
        all_series += series_of_metric
    if len(runs) > 1:
        return panels
    return [{"title": "", "series": all_series}]


def thin(points: Points, most: int) -> Points:
    """About `most` of the points: of each stretch of steps the lowest, the highest and the first
    NaN; and the last."""
    if len(points) <= most:
        return points
    stretches = most // 2
    selected = {points[-1]}
    for index in range(stretches):
        begin = index * len(points) // stretches
        end = (index + 1) * len(points) // stretches
        by_value = sorted((value, step) for step, value in points[begin:end] if value is not None)
        if by_value:
            for value, step in (by_value[0], by_value[-1]):
                selected.add((step, value))
        nans = [point for point in points[begin:end] if point[1] is None]
        if nans:
            selected.add(nans[0])
    return sorted(selected, key=lambda point: point[0])
