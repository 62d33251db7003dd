"""The results of an evaluation as tables, as JSON and as one HTML page."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from importlib.resources import files
from typing import Any

import jinja2

from dschat_ppo.common.paths import shown_path
from dschat_ppo.monitor.json_lines import finite_or_null
from dschat_ppo.tools.evaluate_models import Share
from dschat_ppo.tools.evaluate_run import Evaluated, Result

MOST_COLUMNS = 4  # answers side by side on a wide screen


def columns_of(found: Evaluated) -> list[str]:
    """The metrics of the table: those that some result has, over all data sets."""
    names = dict.fromkeys(name for result in found.results for name in result.metrics if "/" not in name)
    return list(names)


def shown(share: Share | None) -> str:
    """A share with its interval, in percent."""
    if share is None:
        return ""
    return f"{100 * share.share:.1f} % [{100 * share.low:.1f}, {100 * share.high:.1f}]"


def number(value: float | None) -> str:
    """A metric with four significant digits; "" if there is none."""
    return "" if value is None or math.isnan(value) else f"{value:.4g}"


def model_table(found: Evaluated) -> list[list[str]]:
    """Head and one line for each model and way of decoding; with several data sets further lines for these."""
    columns = columns_of(found)
    sources = found.results[0].answers.sources if found.scored and found.results else []
    sources = sources if len(sources) > 1 else []
    compared = [f"wins against {found.results[0].answers.label} [95 %]"] if any(r.wins for r in found.results) else []
    lines = [["model", "decoding", *columns, *(f"score of {name}" for name in sources), *compared]]
    for result in found.results:
        cells = [number(result.metrics.get(name)) for name in columns]
        cells += [number(result.by_source.get(name)) for name in sources]
        cells += [shown(result.wins) for _ in compared]
        lines.append([result.answers.label, result.answers.decoding, *cells])
        for data_set in dict.fromkeys(row.data_source for row in result.answers.rows if row.data_source is not None):
            own = [*columns, *(f"reward/{name}_mean" for name in sources)]
            cells = [number(result.metrics.get(f"{name}/{data_set}")) for name in own]
            lines.append([f"  {data_set}", result.answers.decoding, *cells, *("" for _ in compared)])
    return lines


def pair_table(found: Evaluated) -> list[list[str]]:
    """Head and one line for all pairs and each data set."""
    lines = [["reward model on pairs", "pairs", "accuracy [95 %]"]]
    return lines + [[name, str(share.count), shown(share)] for name, share in found.accuracies.items()]


def tables(found: Evaluated) -> list[str]:
    """The tables as lines of text."""
    lines = []
    for table in ([model_table(found)] if found.results else []) + ([pair_table(found)] if found.accuracies else []):
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines += ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in table]
    return lines


def notes(found: Evaluated) -> list[str]:
    """How to read the table of the models, a sentence on each line, and the path of each model."""
    lines = []
    score, samples = float(found.flags["pass_score"]), int(found.flags["samples"])
    if found.results and found.scored:
        answer = "share of prompts whose answer" if samples == 1 else "probability that one answer to a prompt"
        lines.append(f"pass@1: {answer} scores at least {score:g} (--pass_score)")
        if samples > 1:
            lines.append("pass@k: probability that at least one of k sampled answers to a prompt scores that much")
        if any(result.wins for result in found.results):
            first = found.results[0].answers.label
            lines.append(
                f"wins: share of prompts on which the model scores higher than {first} with the same decoding; a tie "
                "counts half; in brackets Wilson's 95 % interval"
            )
    decodings = {result.answers.decoding for result in found.results}
    if decodings == {"greedy", "sampled"}:
        lines.append(
            "greedy: only the single most likely answer to each prompt, so its score may differ much from that of "
            "sampled answers"
        )
    if "sampled" in decodings:
        lines.append(f"sampled: the answers, and so the numbers, depend on --seed ({found.flags['seed']})")
    return lines + [f"{label}: {path}" for label, path in model_paths(found).items() if label != path]


def model_paths(found: Evaluated) -> dict[str, str]:
    """Short name of each model -> its path."""
    return {result.answers.label: shown_path(result.answers.model) for result in found.results}


def _as_dict(result: Result) -> dict[str, Any]:
    answers = result.answers
    return {
        "model": answers.model, "decoding": answers.decoding, "metrics": result.metrics,
        "scores_by_source": result.by_source, "wins": result.wins and asdict(result.wins),
        "failed_scores": answers.failed, "prompts": [asdict(row) for row in answers.rows],
    }  # fmt: skip


def json_of(found: Evaluated) -> str:
    """Everything, as JSON."""
    content = {
        "flags": found.flags,
        "results": [_as_dict(result) for result in found.results],
        "reward_accuracy": {name: asdict(share) for name, share in found.accuracies.items()},
        "pairs": [
            {"data_source": name, "chosen": chosen, "rejected": rejected} for name, chosen, rejected in found.pairs
        ],
    }
    return json.dumps(finite_or_null(content), indent=1)


def html_of(found: Evaluated) -> str:
    """One page: tables, and the answers to each prompt side by side, in a row for each way of decoding."""
    models = model_paths(found)
    decodings = list(dict.fromkeys(result.answers.decoding for result in found.results))
    rows = decodings if len(models) > 1 else [""]  # one model: its decodings are side by side
    columns = len(models) if len(models) > 1 else len(decodings)
    prompts = []
    for place, row in enumerate(found.results[0].answers.rows if found.results else []):
        groups = [
            [_cell(result, place) for result in found.results if decoding in ("", result.answers.decoding)]
            for decoding in rows
        ]
        prompts.append({"number": place + 1, "prompt": row.prompt, "groups": groups})
    text = (files("dschat_ppo.tools") / "web" / "evaluation.html").read_text(encoding="utf-8")
    page = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(text)
    return page.render(
        tables=([model_table(found)] if found.results else []) + ([pair_table(found)] if found.accuracies else []),
        prompts=prompts, flags=found.flags, scored=found.scored, notes=notes(found), models=models,
        columns=math.ceil(columns / math.ceil(columns / MOST_COLUMNS)) if columns else 1,  # rows of equal length
    )  # fmt: skip


def _cell(result: Result, place: int) -> dict[str, Any]:
    """The answers of one model to the prompt number `place`, for the page."""
    answers, own = result.answers, result.answers.rows[place]
    return {
        "name": f"{answers.label}, {answers.decoding}", "path": shown_path(answers.model),
        "answers": list(zip(own.answers, map(number, own.scores), own.lengths, own.ended, strict=True)),
    }  # fmt: skip
