"""Checks of teachers, before weights are loaded."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from dschat_ppo.common.logging import logger
from dschat_ppo.config.feature_needs import FurtherModel
from dschat_ppo.data.templates import answer_ends
from dschat_ppo.features.distillation.flags import TEACHER


def check_further_model(
    model: FurtherModel,
    folder: str,
    tokenizer: PreTrainedTokenizerBase,
    trained: PreTrainedTokenizerBase,
) -> None:
    """Warn if the responses of a teacher end with other tokens than those of the model that trains.
    Arguments as `check_further_models`."""
    if model.flag != TEACHER:
        return
    teacher_ends = answer_ends(tokenizer)
    student_ends = answer_ends(trained)
    if teacher_ends == student_ends:
        return
    theirs = trained.convert_ids_to_tokens(list(teacher_ends))
    ours = trained.convert_ids_to_tokens(list(student_ends))
    logger().warning(
        f"{model.flag} {folder}: ends its answers with {theirs}, but the model that trains with"
        f" {ours}, so it learns to go on where it should end; use models with the same chat"
        " template and EOS"
    )
