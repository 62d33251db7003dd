"""What distillation wants of the data of step 3."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from dschat_ppo.config.data_flags import PromptColumn, StepData
from dschat_ppo.config.step_config import StepConfig
from dschat_ppo.errors import UserError
from dschat_ppo.features.distillation.flags import DistillationFlags


def changed(config: StepConfig, data: StepData) -> StepData:
    """`data` with the answers of the rows, if some are learned from, and with what the teacher
    reads, if that is not the prompt."""
    if config.kind != "ppo":
        return data
    flags = config.of(DistillationFlags)
    column = flags.teacher_prompt_column
    prompt_columns = list(data.prompt_columns)
    if column:
        ids_of = partial(teacher_prompt, column)
        prompt_columns.append(PromptColumn("teacher_prompt_ids", ids_of, column))
    keeps_answers = data.keeps_answers or flags.sampled_share < 1
    return replace(data, prompt_columns=prompt_columns, keeps_answers=keeps_answers)


def teacher_prompt(column: str, row: dict[str, Any], example: Any, settings: Any) -> list[int]:
    """The ids of what a teacher reads: the prompt with the text in the row's `column` in place of
    its text, or of that of its last message. `UserError` if that is longer than a prompt may be.
    Other arguments as `PromptColumn.ids_of`."""
    # modules that take seconds to import, when rows are read
    from dschat_ppo.data.encode import encode_example
    from dschat_ppo.data.examples import has_value, text_at

    if not has_value(row, column):
        raise UserError(f"has no value at '{column}' (--teacher_prompt_column)")
    text = text_at(row, column)
    teacher_example = replace(example, prompt=text, answers=[])
    if not isinstance(example.prompt, str):
        *earlier, last = example.prompt
        messages = [*earlier, {**last, "content": text}]
        teacher_example = replace(example, prompt=messages, answers=[])
    ids = encode_example(settings.tokenizer, teacher_example).prompt
    limit = settings.step.limit
    if len(ids) > limit:
        raise UserError(
            f"--teacher_prompt_column {column}: the teacher would read {len(ids)} tokens, more than"
            f" --max_prompt_seq_len {limit}; raise it"
        )
    return ids
