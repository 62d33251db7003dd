"""The models of a run: checks before any of them is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from datasets import Dataset
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from dschat_ppo.config.data_flags import StepData
from dschat_ppo.config.feature_flags import HasFeatures
from dschat_ppo.config.step_config import StepConfig
from dschat_ppo.errors import UserError
from dschat_ppo.features import hooks
from dschat_ppo.models.kernel_selection import check_attention
from dschat_ppo.models.loading import (
    AS_SAVED,
    ModelChanges,
    check_causal_lm,
    further_changes,
    load_config,
    require_length,
)
from dschat_ppo.models.tokenizers import read_tokenizer
from dschat_ppo.models.vocabulary import check_vocabulary
from dschat_ppo.run.session import naming


def check_language_model(
    config: StepConfig,
    flag: str,
    folder: str,
    tokenizer: PreTrainedTokenizerBase,
    longest: int,
    limits: str,
    changes: ModelChanges = AS_SAVED,
) -> PretrainedConfig:
    """Check that `folder`, which `flag` names, holds a language model that can read the tokenizer's
    ids in rows of up to `longest` tokens, a number that the flags `limits` set, and that the
    `changes` can be made; returns its configuration."""
    model_config = load_config(folder, flag)
    check_vocabulary(tokenizer, model_config, flag, folder, resize=config.run.resize_vocabulary)
    with naming(flag):
        check_causal_lm(folder, changes)
    require_length(folder, longest, limits)
    check_attention(config, flag, folder, scalar=False, kinds=changes.kinds)
    return model_config


def data_of_model(config: StepConfig, folder: str, tokenizer: PreTrainedTokenizerBase) -> StepData:
    """What a step reads of its data, for the model in `folder` that trains."""
    return data_read_by_model(config, config.step_data, folder, tokenizer)


def data_read_by_model(
    features: HasFeatures, data: StepData, folder: str, tokenizer: PreTrainedTokenizerBase
) -> StepData:
    """`data` with content that the model in `folder` takes besides text. A feature offers
    `step_data.read_by_model` with these arguments.

    Args:
        features: the flags of a run or of a tool.
        data: what is read of the data.
        folder: of the model that trains, or that answers the prompts.
        tokenizer: of that model.
    """
    for read_by_feature in hooks("step_data.read_by_model"):
        data = read_by_feature(features, data, folder, tokenizer)
    return data


@dataclass(frozen=True)
class PromptReader:
    """A model that reads the prompts which another one answers."""

    role: str  # as in `StepConfig.models`
    flag: str
    folder: str
    sources: Sequence[str] = ()  # data sources whose prompts it reads; (): all of them


def further_readers(config: StepConfig, folders: Mapping[str, str]) -> list[PromptReader]:
    """The models that features add, and that read the tokens of the model that trains. `folders`:
    role -> local folder."""
    readers = []
    for model in config.further_models:
        if model.reads_tokens_of_actor:
            folder = folders[model.role]
            readers.append(PromptReader(model.role, model.flag, folder, model.sources))
    return readers


def check_prompt_readers(
    features: HasFeatures,
    folder: str,
    readers: Sequence[PromptReader],
    prompts: Sequence[Dataset],
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Check that models can read what prompts hold besides text, before models are loaded. A
    feature offers `checks.check_readers` with these arguments, which raises `UserError`.

    Args:
        features: the flags of a run or of a tool.
        folder: of the model that answers the prompts.
        readers: the other models.
        prompts: token rows.
        tokenizer: of the model that answers.
    """
    for check_readers_of_feature in hooks("checks.check_readers"):
        check_readers_of_feature(features, folder, readers, prompts, tokenizer)


def check_same_tokens(
    config: StepConfig,
    flag: str,
    folder: str,
    tokenizer: PreTrainedTokenizerBase,
    longest: int,
    limits: str,
    changes: ModelChanges = AS_SAVED,
) -> None:
    """Check a language model that reads the ids of the model that trains, whose tokenizer this
    is."""
    folder_tokenizer = read_tokenizer(folder, flag)
    if folder_tokenizer.get_vocab() != tokenizer.get_vocab():
        raise UserError(
            f"{flag} {folder}: its tokenizer differs from that of the model that trains, so it"
            " would read other text; use a model with the same tokenizer"
        )
    check_language_model(config, flag, folder, tokenizer, longest, limits, changes)


def check_further_models(
    config: StepConfig,
    folders: Mapping[str, str],
    tokenizer: PreTrainedTokenizerBase,
    longest: int,
    limits: str,
) -> None:
    """Check the models that features add. A feature offers `checks.check_further_model(model,
    folder, its tokenizer, that of the model that trains)` for what else it wants of them.

    Args:
        config: the flags.
        folders: role -> local folder.
        tokenizer: of the model that trains.
        longest: most tokens of a row.
        limits: the flags that set it.
    """
    for model in config.further_models:
        folder = folders[model.role]
        if model.reads_tokens_of_actor:
            changes = further_changes(config, model)
            check_same_tokens(config, model.flag, folder, tokenizer, longest, limits, changes)
        else:  # its rows have other lengths
            model_tokenizer = read_tokenizer(folder, model.flag)
            check_language_model(config, model.flag, folder, model_tokenizer, 1, limits)
        for check_further_model in hooks("checks.check_further_model"):
            check_further_model(model, folder, read_tokenizer(folder, model.flag), tokenizer)
