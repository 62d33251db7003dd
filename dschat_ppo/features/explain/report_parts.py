"""The part of a report that shows the tokens of its training samples."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dschat_ppo.errors import UserError
from dschat_ppo.features.explain import token_page
from dschat_ppo.features.explain.record_files import RecordedStep, read_step, recorded_steps

# of each run
MOST_ANSWERS = 64
MOST_CHARACTERS = 2_000_000


def fold_outs_of(run: Path, steps: Sequence[int]) -> dict[int, list[str]]:
    """PPO step -> HTML for each line of it in `samples.jsonl`, in their order, of these steps of a
    run that are recorded. Where there are too many for a page, the first step and the newest ones
    stay; a damaged record is left out."""
    files = recorded_steps(run)
    recorded = [step for step in steps if step in files]
    by_importance = recorded[:1] + recorded[1:][::-1]
    by_step: dict[int, list[str]] = {}
    answers = 0
    characters = 0
    for step in by_importance:
        try:
            fold_outs = _of_samples(read_step(files[step]))
        except UserError:
            continue
        answers += len(fold_outs)
        characters += sum(map(len, fold_outs))
        if answers > MOST_ANSWERS or characters > MOST_CHARACTERS:
            break
        by_step[step] = fold_outs
    return by_step


def _of_samples(step: RecordedStep) -> list[str]:
    """The fold-out of each sample of a step."""
    by_index = {row.index: row for row in step.rows}
    return [token_page.fold_out(by_index[index], step) for index in step.samples]


STYLE = token_page.style
SCRIPT = token_page.script
