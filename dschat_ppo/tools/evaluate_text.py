"""The results of an evaluation as tables, as answers in text, and as JSON."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Any

from dschat_ppo.common.paths import shown_path
from dschat_ppo.errors import escaped
from dschat_ppo.monitor.json_lines import finite_or_null
from dschat_ppo.tools.evaluate_models import Evaluated, Share


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
    columns = list(dict.fromkeys(name for result in found.results for name in result.metrics if "/" not in name))
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
    paths = {result.answers.label: shown_path(result.answers.model) for result in found.results}
    return lines + [f"{label}: {path}" for label, path in paths.items() if label != path]


def answer_lines(found: Evaluated, count: int) -> list[str]:
    """The first `count` prompts, each with the answers of all models; what a terminal would obey is escaped."""
    lines = []
    for place, row in enumerate(found.results[0].answers.rows[:count] if found.results else []):
        lines += [f"prompt {place + 1}:", *_indented(row.prompt)]
        for result in found.results:
            own = result.answers.rows[place]
            for text, score, tokens, ended in zip(own.answers, own.scores, own.lengths, own.ended, strict=True):
                parts = [f"score {number(score) or 'none'}"] if found.scored else []
                parts += [f"{tokens} tokens", *["cut at the length limit"] * (ended == "length")]
                lines += [f"  {result.answers.label}, {result.answers.decoding} ({', '.join(parts)}):"]
                lines += _indented(text)
        lines.append("")
    return lines


def _indented(text: str) -> list[str]:
    return [f"    {line}" for line in escaped(text).split("\n")]


def json_of(found: Evaluated) -> str:
    """Everything, as JSON."""
    results: list[dict[str, Any]] = [
        {
            "model": result.answers.model, "decoding": result.answers.decoding, "metrics": result.metrics,
            "scores_by_source": result.by_source, "wins": result.wins and asdict(result.wins),
            "failed_scores": result.answers.failed, "prompts": [asdict(row) for row in result.answers.rows],
        }
        for result in found.results
    ]  # fmt: skip
    content = {
        "flags": found.flags,
        "results": results,
        "reward_accuracy": {name: asdict(share) for name, share in found.accuracies.items()},
        "pairs": [
            {"data_source": name, "chosen": chosen, "rejected": rejected} for name, chosen, rejected in found.pairs
        ],
    }
    return json.dumps(finite_or_null(content), indent=1)
