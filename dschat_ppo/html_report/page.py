"""The HTML page: all text, tables and descriptions here; the script in `assets/` draws the figures and the answers."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Sequence
from datetime import datetime, timezone
from html import escape
from itertools import chain, groupby
from pathlib import Path
from typing import Any
from urllib.parse import quote

from dschat_ppo.common.paths import short_names
from dschat_ppo.config.retired_flags import note_on_retired
from dschat_ppo.html_report.figures import HEADLINES
from dschat_ppo.html_report.meanings import meaning_of
from dschat_ppo.html_report.page_data import COLOURS, Drawing, answer_rows, drawings, health_marks
from dschat_ppo.html_report.run_folder import Run, number_or_none, related_runs
from dschat_ppo.html_report.run_tables import changed_flags, described, differing_flags, shown_value, versions
from dschat_ppo.html_report.thinning import rounded

REPORT = "report.html"
ASSETS = Path(__file__).parent / "assets"
SCRIPTS = ("chart.js", "answers.js", "page.js")
Row = Sequence[str]  # the cells of a row of a table, as plain text
Section = tuple[str, str]  # its title, and its content as HTML; without content there is no section


def page(runs: Sequence[Run], now: float, place: Path) -> str:
    """The page as text.

    Args:
        runs: 1 to `COLOURS` runs.
        now: seconds since the epoch, the time of the report.
        place: folder of the page, from which its links to other reports start.
    """
    figures = drawings(runs)
    first = [made for made in figures[:2] if made.figure.section == figures[0].figure.section]
    rows, answers = answer_rows(runs)
    data = {
        "runs": [{"name": run.name, "events": health_marks(run)} for run in runs],
        "figures": [{"kind": made.figure.kind, "panels": made.panels} for made in figures],
        "answers": rows,
    }
    script = "\n".join((ASSETS / name).read_text(encoding="utf-8") for name in SCRIPTS)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    made_at = datetime.fromtimestamp(now, tz=timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    title = "Training report: " + ", ".join(run.name for run in runs)
    sections = [
        _overview(runs, now, first, place),
        _health(runs),
        *_figure_sections(figures[len(first) :], len(first)),
        _answers(rows, answers),
        _flags(runs),
        _versions(runs),
    ]
    shown = [(section_title, content) for section_title, content in sections if content]
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; \
script-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'">
<title>{escape(title)}</title>
<style>
{(ASSETS / "page.css").read_text(encoding="utf-8")}</style>
</head>
<body>
<a class="skip" href="#main">Skip to the report</a>
<header><h1>{escape(title)}</h1>
<p class="quiet">Made {made_at} from the files of {"the run" if len(runs) == 1 else f"{len(runs)} runs"}. \
This file needs no network.</p></header>
{_contents([section_title for section_title, _ in shown])}
{_toolbar(runs)}
<main id="main">
<noscript><p>The figures and answers need JavaScript. The tables show their numbers without it.</p></noscript>
{"".join(_section(*section) for section in shown)}
</main>
<script type="application/json" id="data">{json_in_html(data)}</script>
<script>{script}</script>
</body>
</html>
"""


def json_in_html(value: Any) -> str:
    """JSON that ends no `script` element: the characters that HTML could read as a tag are escapes of JSON."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)  # all ASCII
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _toolbar(runs: Sequence[Run]) -> str:
    boxes = [
        f'<label><input type="checkbox" data-run="{number}" checked> {_key(number)}{escape(run.name)}</label>'
        for number, run in enumerate(runs)
    ]
    events = any(run.health for run in runs)
    return f"""<form class="toolbar" aria-label="Settings of all figures">
<label>Smoothing <input type="range" id="smoothing" min="0" max="95" value="0" step="5">
<output for="smoothing">0 %</output></label>
<label><input type="checkbox" id="outliers"> Ignore outliers</label>
{'<label><input type="checkbox" id="events" checked> Health events</label>' if events else ""}
{"".join(boxes) if len(runs) > 1 else ""}
</form>"""


def _key(colour: int) -> str:
    """The line of a legend in a colour and dash of the palette."""
    return (
        '<svg class="key" width="26" height="8" aria-hidden="true">'
        f'<path class="line c{colour % COLOURS}" d="M1 4H25"/></svg> '
    )


def _section(title: str, content: str) -> str:
    """A section; all but the first are folded on a phone."""
    heading = f"<h2>{escape(title)}</h2>"
    if title != "Overview":
        heading, content = "", f'<details class="part" open><summary>{heading}</summary>\n{content}</details>'
    return f'<section id="{_anchor(title)}" aria-label="{escape(title)}">{heading}{content}</section>\n'


def _anchor(title: str) -> str:
    return title.lower().replace(" ", "-")


def _contents(titles: Sequence[str]) -> str:
    """Links to the sections."""
    links = [f'<li><a href="#{_anchor(title)}">{escape(title)}</a></li>' for title in titles]
    return f'<nav aria-label="Sections"><ul>{"".join(links)}</ul></nav>'


def _folded(summary: str, content: str) -> str:
    return f"<details><summary>{escape(summary)}</summary>{content}</details>"


def _table(caption: str, head: Row, rows: Sequence[Row], style: str = "") -> str:
    """A table that scrolls sideways on a narrow screen; the first cell of each row is its heading."""
    heads = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    lines = [
        f'<tr><th scope="row">{escape(row[0])}</th>' + "".join(f"<td>{escape(cell)}</td>" for cell in row[1:]) + "</tr>"
        for row in rows
    ]
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="{escape(caption)}"><table class="{style}">'
        f"<caption>{escape(caption)}</caption><thead><tr>{heads}</tr></thead>"
        f"<tbody>{''.join(lines)}</tbody></table></div>\n"
    )


def _overview(runs: Sequence[Run], now: float, figures: Sequence[Drawing], place: Path) -> Section:
    """What the runs are, beside `figures`; and links to the reports of the steps before and after them."""
    shown = [(name, words) for name, words in HEADLINES if any(name in run.metrics for run in runs)]
    about = [described(run) for run in runs]
    labels = dict.fromkeys(label for one in about for label in one)
    rows: list[Row] = [
        ("kind", *(run.kind for run in runs)),
        ("state", *(_state(run, now) for run in runs)),
        ("steps", *(_steps(run) for run in runs)),
        ("duration", *(_duration(run) for run in runs)),
        ("times started", *(_starts(run) for run in runs)),
        *((words, *(_change(run, name) for run in runs)) for name, words in shown),
        *((label, *(one.get(label, "-") for one in about)) for label in labels),
        ("folder", *(str(run.folder) for run in runs)),
    ]
    table = _table("Runs; numbers are first → last", ("", *(run.name for run in runs)), rows, "overview")
    damage = [
        f"<p>{escape(run.name)}: {escape(file)} has {count} damaged part(s), which the report does not show.</p>"
        for run in runs for file, count in run.damaged.items()
    ]  # fmt: skip
    own = [run.folder.resolve() for run in runs]
    others = [folder for folder in dict.fromkeys(chain.from_iterable(map(related_runs, runs))) if folder not in own]
    links = [
        f'<a href="{quote(os.path.relpath(folder / REPORT, place.resolve()))}">{escape(name)}</a>'
        for folder, name in zip(others, short_names(others) if others else [], strict=True)
    ]
    steps = f"<p>Reports of the steps before and after: {', '.join(links)}</p>" if links else ""
    curves = "".join(_figure(made, number) for number, made in enumerate(figures))
    return "Overview", f'<div class="top"><div>{table}{steps}{"".join(damage)}</div><div>{curves}</div></div>'


def _steps(run: Run) -> str:
    is_validation = run.steps[-1] == 0 and run.result is not None
    return "0, evaluation without training" if is_validation else f"{run.steps[-1]:,}"


def _state(run: Run, now: float) -> str:
    if run.result is not None:
        return "finished"
    last = run.times[run.steps[-1]]
    return f"not finished; last step {_span(now - last)} before this report" if last else "not finished"


def _duration(run: Run) -> str:
    times = [time for time in run.times.values() if time]
    return _span(max(times) - min(times)) if times else "-"


def _span(seconds: float) -> str:
    """Seconds as "42 s", "12 min" or "3 h 20 min"."""
    if seconds < 100:
        return f"{max(seconds, 0):.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


def _starts(run: Run) -> str:
    resumed = [number_or_none(start.get("step")) for start in run.starts]
    steps = [f"{step:.0f}" for step in resumed[1:] if step is not None]
    if not run.starts:
        return "-"
    return "1" if not steps else f"{len(run.starts)}, resumed at step {', '.join(steps)}"


def _change(run: Run, name: str) -> str:
    finite = [value for _, value in run.metrics.get(name, []) if value is not None]
    if len(finite) == 1:
        return f"{rounded(finite[0]):g}, one {'evaluation' if name.startswith('eval') else 'step'}"
    return f"{rounded(finite[0]):g} → {rounded(finite[-1]):g}" if finite else "-"


def _health(runs: Sequence[Run]) -> Section:
    """The health events of all runs; nothing if no run wrote any file of them."""
    recorded = [run for run in runs if run.health is not None]
    if not recorded:
        return "Health", ""
    keys = ("step", "level", "name", "seen", "cause", "change")
    rows: list[Row] = []
    for run in recorded:
        for event in run.health or []:
            cells = [shown_value(event.get(key)) for key in keys]
            since = event.get("since")
            if since is not None and since != event.get("step"):
                cells[0] += f" (since {shown_value(since)})"
            rows.append((run.name, *cells))
    if not rows:
        return "Health", "<p>No health event: no metric crossed its threshold.</p>"
    head = ("run", "step", "level", "event", "what was seen", "likely cause", "what to change")
    return "Health", _table("Health events, in the order in which they occurred", head, rows)


def _figure_sections(figures: list[Drawing], number: int) -> list[Section]:
    """Figures by their sections; `number` is that of the first one in the data of the page."""
    sections = []
    for title, group in groupby(figures, key=lambda made: made.figure.section):
        parts = []
        for made in group:
            parts.append(_figure(made, number))
            number += 1
        content = f'<div class="figures">{"".join(parts)}</div>'
        if title == "Other metrics":
            content = _folded(f"{len(parts)} more metrics", content)
        sections.append((title, content))
    return sections


def _figure(made: Drawing, number: int) -> str:
    head = ("run", "metric", "first", "last", "lowest", "highest", "meaning")
    rows = [(run, name, *values, meaning_of(name)) for run, name, values in made.table]
    numbers = _table(f"{made.figure.title}: numbers", head, rows, "numbers")
    unit = f' <span class="quiet">({escape(made.figure.unit)})</span>' if made.figure.unit else ""
    return f"""<figure id="figure-{number}">
<figcaption><h3>{escape(made.figure.title)}{unit}</h3><p>{escape(made.figure.reading)}</p></figcaption>
<div class="plot" data-figure="{number}" data-summary="{escape(made.summary)}"></div>
<details class="table"><summary>Numbers</summary>{numbers}</details>
</figure>
"""


def _answers(rows: list[dict[str, Any]], answers: int) -> Section:
    if not rows:
        return "Answers", ""
    note = f"<p>{len(rows):,} of {answers:,} answers are in this file.</p>" if len(rows) < answers else ""
    return "Answers", f'{note}<div class="cards"></div>'


def _flags(runs: Sequence[Run]) -> Section:
    parts = []
    if len(runs) > 1:
        rows = differing_flags(runs)
        head = ("flag", *(run.name for run in runs))
        parts.append(
            _table("Flags that differ between the runs", head, rows)
            if rows else "<p>All flags of the runs are equal.</p>"
        )  # fmt: skip
    for run in runs:
        if not run.config:
            parts.append(f"<p>{escape(run.name)} has no readable config.yaml.</p>")
            continue
        changed = _table(f"{run.name}: flags that differ from their defaults", ("flag", "value"), changed_flags(run))
        everything = [(f"--{flag}", shown_value(value)) for flag, value in sorted(run.config.items())]
        table = _table(f"{run.name}: all flags", ("flag", "value"), everything)
        parts.append(
            changed if len(runs) == 1 else f"<details><summary>{escape(run.name)}</summary>{changed}</details>"
        )
        parts.append(_folded(f"All flags of {run.name}", table))
        if left := note_on_retired(run.config):
            parts.append(f"<p>{escape(run.name)} is of an earlier version; {escape(left)}.</p>")
    return "Flags", "".join(parts)


def _versions(runs: Sequence[Run]) -> Section:
    rows = versions(runs)
    if not rows:
        return "Versions", "<p>The runs did not record library versions.</p>"
    return "Versions", _table("Library versions", ("library", *(run.name for run in runs)), rows)
