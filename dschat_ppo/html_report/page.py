"""Write the report of some runs to a file. `assets/report.html` renders the data of the page:
jinja2 escapes every text of a run that enters it."""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from itertools import groupby
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from dschat_ppo.common.atomic_files import write_file
from dschat_ppo.common.logging import logger
from dschat_ppo.common.paths import METRICS, REPORT, RESULT, VALIDATION, shown_path
from dschat_ppo.errors import (
    NonFiniteError,
    StopRequested,
    UnhealthyRun,
    UserError,
    escaped,
    reading,
)
from dschat_ppo.features import hooks
from dschat_ppo.html_report.charts import charts
from dschat_ppo.html_report.figures import OTHER_METRICS
from dschat_ppo.html_report.responses import shown_responses
from dschat_ppo.html_report.run_folder import Run, number_or_none, read_runs
from dschat_ppo.html_report.tables import flags, health, overview

MOST_RUNS = 6  # that colours and dashes still distinguish
ASSETS = Path(__file__).parent / "assets"


def without_hidden_characters(value: Any) -> Any:
    """A value that enters the page; a text of a run gets escapes such as `\\x00` for characters
    that HTML forbids or does not show; HTML that is ready stays."""
    if isinstance(value, str) and not hasattr(value, "__html__"):
        return escaped(value)
    return value


JINJA = Environment(
    loader=FileSystemLoader(ASSETS),
    autoescape=True,
    finalize=without_hidden_characters,
    undefined=StrictUndefined,
    trim_blocks=True,
)
JINJA.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
MOST_RESPONSE_CHARACTERS = 2000  # of one prompt or response
ENDS = {
    "eos": "ended",
    "stop": "ended at a stop string",
    "length": "cut at the length limit",
    "data": "of the data",
}


def write_report(folders: Sequence[Path], path: Path) -> None:
    """Write one HTML file, whole or not at all, that compares the runs in 1 to `MOST_RUNS`
    `folders`, finished or not; it needs no network, and no large library is imported."""
    check_count(folders)
    text = page(read_runs(folders), time.time())
    # JSON may hold half a surrogate pair, which UTF-8 cannot
    content = text.encode(errors="replace")
    try:
        write_file(path, content)
    except OSError as problem:
        raise UserError(
            f"{path}: cannot be written ({problem.strerror}); name another file by --out"
        ) from problem


def check_count(folders: Sequence[Path]) -> None:
    """Refuse more runs than a page shows."""
    if not 1 <= len(folders) <= MOST_RUNS:
        raise UserError(f"a report shows 1 to {MOST_RUNS} runs, got {len(folders)}; name fewer")


@contextmanager
def reporting(output: Path) -> Iterator[None]:
    """The block is a run that writes to `output`: at its end, also where it stops or a number is
    not finite, the report of its steps is written; on rank 0. So is that of a finished run which
    was killed before it was written."""
    files = [output / METRICS, output / VALIDATION / METRICS]
    before = [last_written(file) for file in files]

    def report() -> None:
        for file, old in zip(files, before, strict=True):
            is_lost = (file.parent / RESULT).exists() and not (file.parent / REPORT).exists()
            if last_written(file) != 0 and (last_written(file) != old or is_lost):
                report_run(file.parent)

    try:
        yield
    except (StopRequested, UnhealthyRun, NonFiniteError) as problem:
        try:
            report()
        finally:  # a second Ctrl-C does not change how the run ended
            raise problem
    report()


def last_written(file: Path) -> int:
    """When a file was written last; 0 without it, while it is empty, or if it cannot be reached."""
    with suppress(OSError):
        status = file.stat()
        if status.st_size:
            return status.st_mtime_ns
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


def page(runs: Sequence[Run], now: float, live: dict[str, Any] | None = None) -> str:
    """The page of up to 6 runs as text.

    Args:
        runs: those to show, in the order of their colours.
        now: seconds since the epoch.
        live: of a page that follows its runs (`live_page.py`): `names` are those of all runs,
            `text` says what they do, `waiting` has a line for each run without a step, and
            `version` names the state of their files. None: a file.
    """
    all_charts = charts(runs)
    beside_overview = [
        chart for chart in all_charts[:2] if chart.figure.section == all_charts[0].figure.section
    ]
    further_charts = all_charts[len(beside_overview) :]
    sections = []
    for section, group in groupby(further_charts, key=lambda chart: chart.figure.section):
        sections.append((section, list(group)))
    licence = _asset("uPlot.LICENSE")
    script = f"/*\n{licence}*/\n{_asset('uPlot.iife.min.js')}\n{_asset('report.js')}"
    style = _asset("uPlot.min.css") + _asset("report.css")
    # what the parts of features need, each a function that gives a text
    script += "".join(script_of_part() for script_of_part in hooks("report_parts.SCRIPT"))
    style += "".join(style_of_part() for style_of_part in hooks("report_parts.STYLE"))
    data = {
        "runs": [{"name": run.name, "events": _events(run)} for run in runs],
        "figures": [chart.panels for chart in all_charts],
    }
    names = [run.name for run in runs]
    if live is not None:
        script += _asset("live.js")
        data["version"] = live["version"]
        names = live["names"]
    return JINJA.get_template("report.html").render(
        title="Training report: " + ", ".join(names),
        made_at=datetime.fromtimestamp(now, tz=timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC"),
        style=style,
        script=script,
        # of the only script that the page lets a browser run
        script_digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        data=data,
        live=live,
        runs=runs,
        overview=overview(runs, now),
        beside_overview=beside_overview,
        other=OTHER_METRICS,
        most=MOST_RESPONSE_CHARACTERS,
        ends=ENDS,
        sections=sections,
        health=health(runs),
        responses=shown_responses(runs),
        flags=flags(runs),
    )


def _asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")


def _events(run: Run) -> list[dict[str, Any]]:
    """The health events with a step, as the script marks them in each figure."""
    events = []
    for event in run.health or []:
        step = number_or_none(event.get("step"))
        if step is not None:
            events.append({"step": step, "name": str(event.get("name", ""))})
    return events
