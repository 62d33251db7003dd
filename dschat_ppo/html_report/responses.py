"""The responses that a report shows: those of evaluations side by side, and samples of training."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from typing import Any, TypeVar

from dschat_ppo.features import hooks
from dschat_ppo.html_report.run_folder import ReportedResponse, Run

# of each run: held-out prompts, and steps whose training samples are shown
MOST_PROMPTS = 40
MOST_STEPS = 20
MOST_RESPONSES = 8  # to a held-out prompt in one evaluation

Titled = tuple[str, list[ReportedResponse]]  # (title, responses)
Value = TypeVar("Value")


@dataclass(frozen=True)
class ShownResponses:
    """What the section on responses shows.

    held_out: (prompt, columns); a column has the responses of one evaluation. Of one run the first
        and the last evaluation are compared, of several runs their last ones.
    training: The responses of one step each, that with the highest score first.
    """

    held_out: list[tuple[str, list[Titled]]]
    training: list[Titled]


def shown_responses(runs: Sequence[Run]) -> ShownResponses:
    """The responses to `MOST_PROMPTS` held-out prompts of each run, and training samples of
    `MOST_STEPS` of its steps."""
    columns_by_prompt: dict[tuple[str, str], list[Titled]] = {}
    training: list[Titled] = []
    for run in runs:
        prefix = f"{run.name}, " if len(runs) > 1 else ""
        by_prompt = _held_out_by_prompt(run)
        for prompt in list(by_prompt)[:MOST_PROMPTS]:
            by_step = by_prompt[prompt]
            steps = [min(by_step), max(by_step)]
            if len(runs) > 1 or steps[0] == steps[1]:
                steps = steps[1:]
            columns = columns_by_prompt.setdefault(prompt, [])
            for step in steps:
                columns.append((f"{prefix}step {step}", by_step[step][:MOST_RESPONSES]))
        steps_shown = evenly(_samples_by_step(run), MOST_STEPS)
        for step, samples in _with_fold_outs(run, steps_shown):
            by_score = sorted(samples, key=lambda sample: -(sample.score or 0.0))
            training.append((f"{prefix}step {step}", by_score))
    held_out = [(prompt, columns) for (prompt, _), columns in columns_by_prompt.items()]
    return _with_contents(ShownResponses(held_out, training))


def _with_contents(shown: ShownResponses) -> ShownResponses:
    """The responses with what shows the contents of their prompts. A feature offers
    `report_parts.content_parts_of(contents)`: HTML of each, "" where it shows nothing. It gets the
    contents of held-out prompts and those of training samples, the newest first, in turn, because
    a page may hold a part of them."""
    of_held_out = [columns[0][1] for _, columns in shown.held_out]
    of_training = [group for _, group in reversed(shown.training)]
    contents: dict[str, Mapping[str, Any]] = {}
    no_responses = list[ReportedResponse]()
    for pair in zip_longest(of_held_out, of_training, fillvalue=no_responses):
        for response in chain(*pair):
            if response.content:
                contents[_key(response)] = response.content
    if not contents:
        return shown
    html_of_contents = dict.fromkeys(contents, "")
    for content_parts_of in hooks("report_parts.content_parts_of"):
        for key, html in zip(contents, content_parts_of(list(contents.values())), strict=True):
            html_of_contents[key] += html

    def with_parts(titled: list[Titled]) -> list[Titled]:
        """The same responses with what shows their contents."""
        groups = []
        for title, group in titled:
            responses = []
            for response in group:
                html = html_of_contents.get(_key(response), "")
                responses.append(replace(response, content_part=html))
            groups.append((title, responses))
        return groups

    held_out = [(prompt, with_parts(columns)) for prompt, columns in shown.held_out]
    return ShownResponses(held_out, with_parts(shown.training))


def _key(response: ReportedResponse) -> str:
    """What tells the content of its prompt from that of others."""
    return json.dumps(response.content, sort_keys=True)


def _held_out_by_prompt(run: Run) -> dict[tuple[str, str], dict[int, list[ReportedResponse]]]:
    """(prompt, key of its content) -> step -> its responses in the evaluation after this step."""
    by_prompt: dict[tuple[str, str], dict[int, list[ReportedResponse]]] = {}
    for response in run.responses:
        if response.kind == "held-out":
            by_step = by_prompt.setdefault((response.prompt, _key(response)), {})
            by_step.setdefault(response.step, []).append(response)
    return by_prompt


def _samples_by_step(run: Run) -> list[tuple[int, list[ReportedResponse]]]:
    """(step, its training samples), in the order of the file; a step that the run repeats after it
    resumed may come twice."""
    by_step: list[tuple[int, list[ReportedResponse]]] = []
    for response in run.responses:
        if response.kind != "training":
            continue
        if not by_step or by_step[-1][0] != response.step:
            by_step.append((response.step, []))
        by_step[-1][1].append(response)
    return by_step


def _with_fold_outs(
    run: Run, samples_by_step: list[tuple[int, list[ReportedResponse]]]
) -> list[tuple[int, list[ReportedResponse]]]:
    """The training samples with what features fold out under them. A feature offers
    `report_parts.fold_outs_of(folder of the run, steps)`: step -> HTML for each of its samples."""
    steps = [step for step, _ in samples_by_step]
    for fold_outs_of in hooks("report_parts.fold_outs_of"):
        fold_outs = fold_outs_of(run.folder, steps)
        extended = []
        for step, samples in samples_by_step:
            fold_outs_of_step = fold_outs.get(step, [])
            if len(fold_outs_of_step) == len(samples):
                samples = [
                    replace(sample, fold_outs=[*sample.fold_outs, fold_out])
                    for sample, fold_out in zip(samples, fold_outs_of_step, strict=True)
                ]
            extended.append((step, samples))
        samples_by_step = extended
    return samples_by_step


def evenly(values: list[Value], count: int) -> list[Value]:
    """At most `count` of the values, 2 or more, at even distances, with the first and the last."""
    if len(values) <= count:
        return values
    return [values[index * (len(values) - 1) // (count - 1)] for index in range(count)]
