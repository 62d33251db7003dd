"""The results of an evaluation: as a table, as responses in text, as rows of training data, and as
JSON."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from dschat_ppo.common.paths import shown_path
from dschat_ppo.data.examples import Messages
from dschat_ppo.errors import escaped
from dschat_ppo.monitor.writers import finite_or_null
from dschat_ppo.ppo.evaluation import CUT, EvaluatedPrompt
from dschat_ppo.ppo.response_texts import heading


@dataclass(frozen=True)
class Share:
    """A share of `count` prompts, with its 95 % confidence interval."""

    share: float
    low: float
    high: float
    count: int


@dataclass
class Result:
    """The responses of one model with one way of decoding, a row of the table."""

    model: str  # as the user gave it
    label: str  # its short name
    decoding: str  # "greedy" or "sampled"
    metrics: dict[str, float]  # with several data sets also "NAME/DATA SET"
    scores_by_source: dict[str, float]  # mean of each reward source
    failed_scores: int  # responses whose reward function failed, or that no source scored
    prompts: list[EvaluatedPrompt]  # one for each prompt; the scores are NaN if nothing scores them
    # against the first model with the same decoding; None for that one, and without a reward
    wins: Share | None = None

    @property
    def scores(self) -> Tensor:
        """(prompts, n) fp64."""
        return torch.tensor([row.scores for row in self.prompts], dtype=torch.float64)


@dataclass(frozen=True)
class Evaluated:
    """All results, in the form of the JSON file."""

    flags: dict[str, str]
    scored: bool  # there is a reward
    results: list[Result]
    asked: list[str | Messages]  # the prompts of the first model, in the order of its responses
    rows: list[str]  # the data row of each prompt, as `row_text`


def metric_text(value: float | None) -> str:
    """A metric with four significant digits; "" if there is none."""
    if value is None or math.isnan(value):
        return ""
    return f"{value:.4g}"


def result_table(evaluated: Evaluated) -> list[str]:
    """Head and one line for each model and way of decoding; with several data sets further lines
    for these."""
    first = evaluated.results[0]
    names: dict[str, None] = {}
    for result in evaluated.results:
        names |= dict.fromkeys(result.metrics)
    metrics = [name for name in names if "/" not in name or name.startswith("episode/")]
    head = ["model", "decoding", *metrics]
    if len(first.scores_by_source) > 1:
        for source in first.scores_by_source:
            metrics.append(f"reward/{source}_mean")
            head.append(f"score of {source}")
    has_wins = any(result.wins for result in evaluated.results)
    if has_wins:
        head.append(f"wins against {first.label} [95 %]")
    lines = [head]
    for result in evaluated.results:
        # label of a line -> what follows the names of its metrics
        suffixes = {result.label: ""}
        for row in result.prompts:
            if row.data_source:
                suffixes[f"  {row.data_source}"] = f"/{row.data_source}"
        for label, suffix in suffixes.items():
            cells = [metric_text(result.metrics.get(f"{name}{suffix}")) for name in metrics]
            if has_wins and not suffix:  # wins are counted over all data sets
                cells.append(_wins_text(result.wins))
            elif has_wins:
                cells.append("")
            lines.append([label, result.decoding, *cells])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded_lines = []
    for line in lines:
        padded = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
        padded_lines.append("  ".join(padded).rstrip())
    return padded_lines


def _wins_text(wins: Share | None) -> str:
    if wins is None:
        return ""
    return f"{100 * wins.share:.1f} % [{100 * wins.low:.1f}, {100 * wins.high:.1f}]"


def result_notes(evaluated: Evaluated) -> list[str]:
    """What the numbers depend on, a sentence on each line, and the path of each model."""
    lines = []
    if evaluated.scored:
        lines.append(
            f"pass: a score of at least {float(evaluated.flags['pass_score']):g} (--pass_score)"
        )
    if any(result.decoding == "sampled" for result in evaluated.results):
        lines.append(
            "sampled: the answers, and so the numbers, depend on --seed"
            f" ({evaluated.flags['seed']})"
        )
    paths = {result.label: shown_path(result.model) for result in evaluated.results}
    return lines + [f"{label}: {path}" for label, path in paths.items() if label != path]


def response_lines(evaluated: Evaluated, count: int) -> list[str]:
    """The first `count` prompts, each with the responses of all models; what a terminal would obey
    is escaped."""
    lines = []
    for index, row in enumerate(evaluated.results[0].prompts[:count]):
        lines += [f"prompt {index + 1}:", *_escaped_lines(row.prompt)]
        for result in evaluated.results:
            answered = result.prompts[index]
            sections_of_responses = answered.turns or [[]] * len(answered.answers)
            columns = zip(
                answered.answers,
                answered.scores,
                answered.lengths,
                answered.ended,
                sections_of_responses,
                strict=True,
            )
            for text, score, tokens, ended, sections in columns:
                remarks = []
                if evaluated.scored:
                    remarks.append(f"score {metric_text(score) or 'none'}")
                remarks.append(f"{tokens} tokens")
                if ended == CUT:
                    remarks.append("cut at the length limit")
                lines.append(f"  {result.label}, {result.decoding} ({', '.join(remarks)}):")
                for section in sections:
                    lines.append(f"    {heading(section)}:")
                    lines += [f"  {line}" for line in _escaped_lines(section["text"])]
                if not sections:
                    lines += _escaped_lines(text)
        lines.append("")
    return lines


def _escaped_lines(text: str) -> list[str]:
    """The lines of a text, indented."""
    return [f"    {line}" for line in escaped(text).split("\n")]


def training_rows(evaluated: Evaluated, is_pair: bool, least_margin: float = 0.0) -> str:
    """JSON lines for SFT: each prompt with the best response of the first model; or for step 2:
    each prompt with its best and its worst response, if their scores differ, by at least
    `least_margin`. Of sampled responses, or of greedy ones if there are no others."""
    sampled = [result for result in evaluated.results if result.decoding == "sampled"]
    of_first_model = (sampled or evaluated.results)[0]
    rows = list[dict[str, Any]]()
    for asked, answered in zip(evaluated.asked, of_first_model.prompts, strict=True):
        candidates = []  # (score, text, how it ended)
        for score, text, ended in zip(
            answered.scores, answered.answers, answered.ended, strict=True
        ):
            has_score = not evaluated.scored or not math.isnan(score)
            if has_score and (is_pair or ended != CUT):
                candidates.append((score, text, ended))
        if not candidates:
            continue
        best_score, best, best_ended = max(candidates, key=lambda candidate: candidate[0])
        worst_score, worst, _ = min(candidates, key=lambda candidate: candidate[0])
        if is_pair:
            margin = best_score - worst_score
            if margin > 0 and margin >= least_margin and best_ended != CUT:
                rows.append({"prompt": asked, "chosen": best, "rejected": worst})
            continue
        if isinstance(asked, str):
            row: dict[str, Any] = {"prompt": asked, "response": best}
        else:
            row = {"messages": [*asked, {"role": "assistant", "content": best}]}
        if evaluated.scored:
            row["score"] = best_score
        rows.append(row)
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def result_json(evaluated: Evaluated) -> str:
    """The evaluation as JSON; NaN becomes null."""
    fields = asdict(evaluated)
    del fields["asked"]  # `prompts` has them as text
    del fields["rows"]
    return json.dumps(finite_or_null(fields), indent=1)
