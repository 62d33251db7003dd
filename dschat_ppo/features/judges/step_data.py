"""What judges want of the data of step 3: rubrics and right answers in them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from dschat_ppo.config.data_flags import PromptColumn, StepData
from dschat_ppo.config.step_config import StepConfig
from dschat_ppo.errors import UserError
from dschat_ppo.features.judges.flags import TrainingJudgeFlags
from dschat_ppo.features.judges.rubric import criteria_of
from dschat_ppo.features.judges.spec import REFERENCE, JudgeSpec


def changed(config: StepConfig, data: StepData) -> StepData:
    """`data` with a column for each judge of the training rows that needs something of them: its
    count, which is checked when a row is read, so that messages name file and row."""
    if config.kind != "ppo":
        return data
    columns = list(data.prompt_columns)
    for ordinal, spec in enumerate(config.of(TrainingJudgeFlags).specs, start=1):
        if spec.rubric or spec.compare == REFERENCE:
            name = f"judge_{ordinal}_needs"
            identity = f"{spec.rubric} {spec.compare} {','.join(spec.sources)}"
            columns.append(PromptColumn(name, partial(counted_needs, spec), identity))
    return replace(data, prompt_columns=columns)


def counted_needs(spec: JudgeSpec, row: dict[str, Any], example: Any, settings: Any) -> list[int]:
    """How many criteria, or right answers, a row has for a judge. `UserError` if it has none, or
    its rubric is malformed; a row without one may lie off the judge's route. Arguments as
    `PromptColumn.ids_of`."""
    if spec.rubric:
        value = row.get(spec.rubric)
        if value is None and spec.sources:
            return [0]
        if value is None:
            raise UserError(f"has no value at '{spec.rubric}' ({spec}: rubric={spec.rubric})")
        return [len(criteria_of(value, spec.rubric))]
    names = ("label", "answer")
    has_reference = example.truth is not None or any(row.get(name) is not None for name in names)
    if not has_reference and not spec.sources:
        raise UserError(
            f"has no right answer ({spec}: compare={REFERENCE}); name its column with"
            " --answer_column"
        )
    return [int(has_reference)]
