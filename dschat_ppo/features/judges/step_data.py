"""What judges want of the data of step 3: rubrics and right answers in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from dschat_ppo.config.data_flags import PromptColumn, StepData
from dschat_ppo.config.feature_flags import HasFeatures
from dschat_ppo.config.ppo_config import PPOConfig
from dschat_ppo.config.step_config import StepConfig
from dschat_ppo.errors import UserError
from dschat_ppo.features.judges.flags import JudgeFlags, TrainingJudgeFlags
from dschat_ppo.features.judges.rubric import criteria_of
from dschat_ppo.features.judges.spec import REFERENCE, JudgeSpec


def changed(config: StepConfig, data: StepData) -> StepData:
    """`data` with the `judge_columns` of the judges of training rows, and of rows that evaluate."""
    if not isinstance(config, PPOConfig):
        return data
    flags = config.of(TrainingJudgeFlags)
    evaluating: Sequence[JudgeSpec] = ()
    if flags.eval_judge:
        evaluating = flags.evaluation_specs
    elif not config.validation.eval_reward_function:  # the training reward scores them
        evaluating = flags.specs
    return replace(
        data,
        prompt_columns=[*data.prompt_columns, *judge_columns(flags.specs)],
        eval_prompt_columns=[*data.eval_prompt_columns, *judge_columns(evaluating)],
    )


def columns_of_evaluation(features: HasFeatures) -> list[PromptColumn]:
    """The `judge_columns` of the judges of `tools.evaluate`."""
    return judge_columns(features.of(JudgeFlags).specs)


def judge_columns(specs: Sequence[JudgeSpec]) -> list[PromptColumn]:
    """A column for each judge that needs something of the rows that it scores: its count, which is
    checked when a row is read, so that messages name file and row."""
    columns = []
    for ordinal, spec in enumerate(specs, start=1):
        if spec.rubric or spec.compare == REFERENCE:
            name = f"judge_{ordinal}_needs"
            identity = f"{spec.rubric} {spec.compare} {','.join(spec.sources)}"
            columns.append(PromptColumn(name, partial(counted_needs, spec), identity))
    return columns


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
