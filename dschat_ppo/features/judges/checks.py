"""Checks of the models of judges, before weights are loaded."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from dschat_ppo.common.logging import logger
from dschat_ppo.config.feature_needs import FurtherModel
from dschat_ppo.features.judges.spec import EVALUATION_FLAG, FLAG


def check_further_model(
    model: FurtherModel,
    folder: str,
    tokenizer: PreTrainedTokenizerBase,
    trained: PreTrainedTokenizerBase,
) -> None:
    """Say so if a judge has no chat template. Arguments as `check_further_models`."""
    if model.flag in (FLAG, EVALUATION_FLAG) and tokenizer.chat_template is None:
        logger().warning(
            f"{model.flag} {folder}: its tokenizer has no chat template, so it reads its question"
            " as plain text; a model that was trained on chats judges better"
        )
