"""Checks of the model folders of step 3: vocabularies, kinds and lengths, before any weight is read."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from dschat_ppo.common.logging import logger
from dschat_ppo.config.steps import PPOConfig
from dschat_ppo.engine.rlhf_engine import ModelFolders
from dschat_ppo.errors import UserError
from dschat_ppo.models.loading import (
    check_causal_lm,
    check_length,
    check_sequence_classifier,
    check_vocabulary,
    load_config,
    model_folder,
)
from dschat_ppo.models.tokenizers import load_tokenizer
from dschat_ppo.rewards.learned_reward import saved_separator, saved_statistics
from dschat_ppo.session.begin_run import naming

ACTOR = "--actor_model_name_or_path"
LIMITS = "--max_prompt_seq_len + --max_answer_seq_len"


def model_folders(config: PPOConfig) -> ModelFolders:
    """Local folders of the models; hub names are downloaded.

    Raises:
        UserError: a model does not exist.
    """
    critic, reward = config.critic_folder, config.reward_folder
    return ModelFolders(
        model_folder(config.ppo.actor_model_name_or_path, ACTOR),
        None if critic is None else model_folder(critic, config.critic_flag),
        None if reward is None else model_folder(reward, config.reward_flag),
    )


def check_models(config: PPOConfig, folders: ModelFolders, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that the folders hold models that their roles can use.

    Raises:
        UserError: one does not; the message names its flag and folder.
    """
    longest = config.ppo.max_prompt_seq_len + config.ppo.max_answer_seq_len
    resize = config.run.resize_vocabulary
    actor_config = load_config(folders.actor, ACTOR)
    check_vocabulary(tokenizer, actor_config, ACTOR, folders.actor, resize=resize)
    with naming(ACTOR):
        check_causal_lm(folders.actor)
    check_length(folders.actor, longest, LIMITS)
    if config.algorithm.router_loss_coef > 0 and "output_router_logits" not in actor_config.to_dict():
        raise UserError(f"--router_loss_coef: {folders.actor} is not a mixture of experts with a router loss")
    if folders.critic is not None:
        flag = config.critic_flag
        with naming(flag):
            check_sequence_classifier(folders.critic, new_head=config.critic_may_have_new_head)
        if folders.critic != folders.actor:
            check_vocabulary(tokenizer, load_config(folders.critic, flag), flag, folders.critic, True, resize)
            check_length(folders.critic, longest, LIMITS)
    if folders.reward is not None:
        _check_reward_model(config, folders.reward, tokenizer, longest)


def _check_reward_model(config: PPOConfig, folder: str, tokenizer: PreTrainedTokenizerBase, longest: int) -> None:
    flag = config.reward_flag
    with naming(flag):
        check_sequence_classifier(folder, new_head=False)
    model_config = load_config(folder, flag)
    if config.algorithm.normalize_rewards == "model":
        saved_statistics(model_config, folder)
    if config.rewards.process_reward is not None:
        saved_separator(model_config, folder)
    own = reward_tokenizer(config, folder, tokenizer)
    check_vocabulary(own or tokenizer, model_config, flag, folder, resize=config.run.resize_vocabulary)
    if own is not None:
        check_length(folder, reward_length(config, folder), "--reward_model_max_length")
        return
    if load_tokenizer(folder, flag).chat_template != tokenizer.chat_template:
        logger().warning(
            f"{flag} {folder}: its chat template differs from the actor's, but it reads the actor's token ids, "
            "rendered with the actor's template; for chat messages, train both with the same template (--chat_template)"
        )
    check_length(folder, longest, LIMITS)
    if config.rewards.reward_model_max_length is not None:
        raise UserError(
            f"--reward_model_max_length: {folder} has the actor's tokenizer and reads the actor's rows as they are; "
            f"omit the flag ({LIMITS} limit the rows)"
        )


def reward_tokenizer(
    config: PPOConfig, folder: str, tokenizer: PreTrainedTokenizerBase
) -> PreTrainedTokenizerBase | None:
    """The reward model's tokenizer if it differs from the actor's; else None."""
    own = load_tokenizer(folder, config.reward_flag)
    return None if own.get_vocab() == tokenizer.get_vocab() else own


def reward_length(config: PPOConfig, folder: str) -> int:
    """Longest row in tokens of a reward model with its own tokenizer.

    Raises:
        UserError: neither the flag nor the model's config names it.
    """
    text = load_config(folder, config.reward_flag).get_text_config().to_dict()
    length = config.rewards.reward_model_max_length or text.get("max_position_embeddings")
    if length is None:
        raise UserError(
            f"{config.reward_flag} {folder}: its config does not name max_position_embeddings; set "
            "--reward_model_max_length"
        )
    return int(length)
