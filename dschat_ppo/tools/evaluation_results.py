"""The results of an evaluation: as a table, as responses in text, as rows of training data, and as
JSON."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dschat_ppo.common.paths import shown_path
from dschat_ppo.data.examples import Messages
from dschat_ppo.errors import counted, escaped
from dschat_ppo.monitor.writers import finite_or_null
from dschat_ppo.ppo.evaluation import CUT, EvaluatedPrompt
from dschat_ppo.ppo.response_texts import heading

_UNSCORED = "fewer than two scored answers"
_EQUAL = "equal scores"
_CLOSE = "scores closer than --pair_margin"
_BEST_IS_CUT = "a best answer that the length limit cut"
_BLANK = "a blank best or worst answer"
# why the answers to a prompt make no pair -> how to get one
_WAYS_TO_PAIRS = {
    _UNSCORED: "mend the reward, which gave no score",
    _EQUAL: "raise --samples or --temperature, or score answers more finely",
    _CLOSE: "lower --pair_margin",
    _BEST_IS_CUT: "raise --max_tokens",
    _BLANK: "raise --samples, since step 2 takes no blank answer",
}


class _ScoredAnswer(NamedTuple):
    """An answer to a prompt. `is_cut`: by the length limit."""

    score: float
    text: str
    is_cut: bool


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
    """JSON lines of responses of the first model that are not blank; for SFT: each prompt with its
    best one; or for step 2: each prompt with its best and its worst one, if their scores differ, by
    at least `least_margin`. Of sampled responses, or of greedy ones if there are no others."""
    rows = list[dict[str, Any]]()
    for asked, answered in zip(evaluated.asked, _prompts_of_rows(evaluated), strict=True):
        scored_answers = _scored_answers(answered, evaluated.scored)
        answers_with_text = _without_blank(scored_answers)
        if is_pair:
            if _reason_without_pair(scored_answers, least_margin) is None:
                best = max(answers_with_text, key=_by_score).text
                worst = min(answers_with_text, key=_by_score).text
                rows.append({"prompt": asked, "chosen": best, "rejected": worst})
            continue
        whole_answers = [answer for answer in answers_with_text if not answer.is_cut]
        if not whole_answers:
            continue
        best_score, best, _ = max(whole_answers, key=_by_score)
        if isinstance(asked, str):
            row: dict[str, Any] = {"prompt": asked, "response": best}
        else:
            row = {"messages": [*asked, {"role": "assistant", "content": best}]}
        if evaluated.scored:
            row["score"] = best_score
        rows.append(row)
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def pairs_line(evaluated: Evaluated, least_margin: float) -> str:
    """Of how many prompts `training_rows` makes a pair, and why not of the others; how to get some,
    if there are none."""
    prompts = _prompts_of_rows(evaluated)
    counts = Counter[str | None]()  # reason -> prompts; None: a pair
    for answered in prompts:
        scored_answers = _scored_answers(answered, evaluated.scored)
        counts[_reason_without_pair(scored_answers, least_margin)] += 1
    reasons = [reason for reason in _WAYS_TO_PAIRS if counts[reason]]
    line = f"--write_pairs: pairs from {counts[None]} of {counted(len(prompts), 'prompt')}"
    if reasons:
        line += "; not from those with "
        line += ", ".join(f"{reason} ({counts[reason]})" for reason in reasons)
    if counts[None] == 0:
        ways = dict.fromkeys(_WAYS_TO_PAIRS[reason] for reason in reasons)
        line += f". To get pairs, {'; '.join(ways)}"
    return line


def _prompts_of_rows(evaluated: Evaluated) -> list[EvaluatedPrompt]:
    """The prompts with the answers that become rows."""
    sampled = [result for result in evaluated.results if result.decoding == "sampled"]
    return (sampled or evaluated.results)[0].prompts


def _scored_answers(answered: EvaluatedPrompt, is_scored: bool) -> list[_ScoredAnswer]:
    """Those answers to a prompt that have a score; all without a reward."""
    scored_answers = []
    for score, text, ended in zip(answered.scores, answered.answers, answered.ended, strict=True):
        if not is_scored or not math.isnan(score):
            scored_answers.append(_ScoredAnswer(score, text, ended == CUT))
    return scored_answers


def _by_score(answer: _ScoredAnswer) -> float:
    return answer.score


def _without_blank(scored_answers: Sequence[_ScoredAnswer]) -> list[_ScoredAnswer]:
    """The answers that steps 1 and 2 take: they refuse one of only white space."""
    return [answer for answer in scored_answers if answer.text.strip()]


def _reason_without_pair(
    scored_answers: Sequence[_ScoredAnswer], least_margin: float
) -> str | None:
    """Why the answers to a prompt make no pair, of `_WAYS_TO_PAIRS`; None if they make one. The
    reason is the blank answers if there are fewer than two others, or if only with them the scores
    are far enough apart."""
    if len(scored_answers) < 2:
        return _UNSCORED
    answers_with_text = _without_blank(scored_answers)
    if len(answers_with_text) < 2:
        return _BLANK
    reason = _reason_of_best_and_worst(answers_with_text, least_margin)
    reason_with_blank = _reason_of_best_and_worst(scored_answers, least_margin)
    if reason in (_EQUAL, _CLOSE) and reason_with_blank not in (_EQUAL, _CLOSE):
        return _BLANK
    return reason


def _reason_of_best_and_worst(answers: Sequence[_ScoredAnswer], least_margin: float) -> str | None:
    """Why the best and the worst of at least two answers make no pair; None if they make one."""
    best = max(answers, key=_by_score)
    worst = min(answers, key=_by_score)
    if best.score == worst.score:
        return _EQUAL
    if best.score - worst.score < least_margin:
        return _CLOSE
    if best.is_cut:
        return _BEST_IS_CUT
    return None


def result_json(evaluated: Evaluated) -> str:
    """The evaluation as JSON; NaN becomes null."""
    fields = asdict(evaluated)
    del fields["asked"]  # `prompts` has them as text
    del fields["rows"]
    return json.dumps(finite_or_null(fields), indent=1)
