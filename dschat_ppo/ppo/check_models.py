"""Checks of the model folders of step 3: vocabularies, kinds and lengths, before any weight is read."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedTokenizerBase

from dschat_ppo.common import dist
from dschat_ppo.common.logging import logger
from dschat_ppo.config.ppo_flags import PPOFlags
from dschat_ppo.config.steps import PPOConfig
from dschat_ppo.engine.rlhf_engine import ModelFolders, actor_adapter, critic_adapter
from dschat_ppo.engine.tensor_parallel import check_tensor_parallel, reason_not_to_divide
from dschat_ppo.errors import UserError
from dschat_ppo.models.loading import (
    check_causal_lm,
    check_sequence_classifier,
    check_vocabulary,
    load_config,
    report_length,
    require_length,
)
from dschat_ppo.models.long_sequences import check_long_sequences
from dschat_ppo.models.model_folders import base_folder, is_adapter_folder, model_folder
from dschat_ppo.models.router import router_top_k
from dschat_ppo.models.tokenizers import read_tokenizer
from dschat_ppo.rewards.learned_reward import saved_separator, saved_statistics
from dschat_ppo.session.begin_run import naming

ACTOR = "--actor_model_name_or_path"
REFERENCE = "--ref_model_name_or_path"
LIMITS = "--max_prompt_seq_len + --max_answer_seq_len"


def model_folders(config: PPOConfig) -> ModelFolders:
    """Local folders of the models; hub names are downloaded."""
    critic, reward, reference = config.critic_folder, config.reward_folder, config.ppo_schedule.ref_model_name_or_path
    actor = model_folder(config.ppo.actor_model_name_or_path, ACTOR)
    other = None if reference is None else model_folder(reference, REFERENCE)
    return ModelFolders(
        actor,
        None if critic is None else model_folder(critic, config.critic_flag),
        None if reward is None else model_folder(reward, config.reward_flag),
        None if other is None or Path(other).resolve() == Path(actor).resolve() else other,
    )


def check_models(config: PPOConfig, folders: ModelFolders, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that the folders hold models that their roles can use. An error names the flag and the folder."""
    longest = config.ppo.max_prompt_seq_len + config.ppo.max_answer_seq_len
    resize = config.run.resize_vocabulary
    actor_config = load_config(folders.actor, ACTOR)
    check_vocabulary(tokenizer, actor_config, ACTOR, folders.actor, resize=resize)
    with naming(ACTOR):
        check_causal_lm(folders.actor, actor_adapter(config))
    require_length(folders.actor, longest, LIMITS)
    check_long_sequences(config.memory, ACTOR, folders.actor, scalar=False, dropout=config.ppo.actor_dropout or 0.0)
    if config.algorithm.router_loss_coef > 0:
        router_top_k(actor_config, f"{ACTOR} {folders.actor}")
    if folders.reference is not None:
        _check_reference(config, folders.reference, tokenizer, actor_config, longest)
    _check_division(config, actor_config)
    if folders.critic is not None:
        flag = config.critic_flag
        with naming(flag):
            check_sequence_classifier(folders.critic, config.critic_may_have_new_head, critic_adapter(config))
        if folders.critic != folders.actor:
            check_vocabulary(tokenizer, load_config(folders.critic, flag), flag, folders.critic, True, resize)
            require_length(folders.critic, longest, LIMITS)
        dropout = config.ppo.critic_dropout or 0.0
        check_long_sequences(config.memory, flag, folders.critic, scalar=True, dropout=dropout)
    if folders.reward is not None:
        _check_reward_model(config, folders.reward, tokenizer, longest)
    if config.lora.share_base:
        check_shared_base(config, folders)


def report_lengths(config: PPOConfig, folders: ModelFolders, tokenizer: PreTrainedTokenizerBase) -> None:
    """Log one line if rows may go beyond the positions of a model; after the data, whose errors come first."""
    ppo = config.ppo
    readers = {folders.actor, folders.reference, folders.critic}
    if folders.reward is not None and reward_tokenizer(config, folders.reward, tokenizer) is None:
        readers.add(folders.reward)
    is_default = (ppo.max_prompt_seq_len, ppo.max_answer_seq_len) == (
        PPOFlags.max_prompt_seq_len,
        PPOFlags.max_answer_seq_len,
    )
    longest = ppo.max_prompt_seq_len + ppo.max_answer_seq_len
    report_length(sorted(filter(None, readers)), longest, LIMITS, is_default)


def _check_division(config: PPOConfig, actor: PretrainedConfig) -> None:
    """Check `--inference_tp_size`, and say so if the actor's layers will not be divided."""
    size, lora_dim = config.ppo_memory.inference_tp_size, config.lora.actor_lora_dim
    check_tensor_parallel(actor, size, dist.world_size(), lora_dim)
    reason = reason_not_to_divide(actor, lora_dim)
    if size > 1 and reason is not None:
        instead = "generation gathers one layer at a time, as with --unpin_actor_parameters"
        if config.ppo.actor_zero_stage != 3:
            instead = "each rank generates with the whole model; use --actor_zero_stage 3 to gather one layer at a time"
        logger().info(f"note: --inference_tp_size {size}: {reason}; {instead}")


def check_shared_base(config: PPOConfig, folders: ModelFolders) -> None:
    """Check that all models can be adapters over the actor's base (`--share_base`)."""
    actor_base = Path(base_folder(folders.actor, ACTOR)).resolve()
    for flag, folder in ((config.reward_flag, folders.reward), (config.critic_flag, folders.critic)):
        if folder is None:
            continue
        base = Path(base_folder(folder, flag)).resolve()
        if base != actor_base:
            raise UserError(
                f"--share_base: the base of {flag} {folder} is {base}, but that of {ACTOR} {folders.actor} is "
                f"{actor_base}; train both as adapters over one base, or omit --share_base"
            )
    if folders.reward is not None and not is_adapter_folder(folders.reward):
        raise UserError(
            f"--share_base: {config.reward_flag} {folders.reward} is a whole model; train it as an adapter over the "
            "actor's base (step 2 with --lora_dim and --only_optimize_lora), or omit --share_base"
        )


def _check_reference(
    config: PPOConfig, folder: str, tokenizer: PreTrainedTokenizerBase, actor: PretrainedConfig, longest: int
) -> None:
    """Check a reference that is another model than the actor: it reads the actor's token ids."""
    model_config = load_config(folder, REFERENCE)
    if read_tokenizer(folder, REFERENCE).get_vocab() != tokenizer.get_vocab():
        raise UserError(
            f"{REFERENCE} {folder}: its tokenizer differs from the actor's, so it would score other text; "
            "use a model with the same tokenizer"
        )
    check_vocabulary(tokenizer, model_config, REFERENCE, folder, resize=config.run.resize_vocabulary)
    with naming(REFERENCE):
        check_causal_lm(folder)
    require_length(folder, longest, LIMITS)
    check_long_sequences(config.memory, REFERENCE, folder, scalar=False)
    least = len(tokenizer) if config.run.resize_vocabulary else 0
    sizes = [max(each.get_text_config().vocab_size, least) for each in (model_config, actor)]
    if sizes[0] != sizes[1] and "full" in (config.algorithm.kl_estimator, config.algorithm.kl_loss_estimator):
        raise UserError(
            f"{REFERENCE} {folder}: has {sizes[0]} rows in its vocabulary and the actor {sizes[1]}, but the KL "
            "estimator 'full' compares all of them; use a reference of the same size or another estimator"
        )
    if config.ppo_schedule.ref_sync_interval > 0:
        shapes = [_shapes(each, size).items() for each, size in zip((model_config, actor), sizes, strict=True)]
        differing = sorted(name for name, _ in shapes[0] ^ shapes[1])
        if differing:
            raise UserError(
                f"--ref_sync_interval: {REFERENCE} {folder} and the actor have different parameters ({differing[0]}), "
                "so one cannot move towards the other; omit one of the two flags"
            )


def _shapes(config: PretrainedConfig, vocab_size: int) -> dict[str, torch.Size]:
    """Name -> shape of the parameters of a causal language model, without its weights."""
    config = copy.deepcopy(config)
    config.get_text_config().vocab_size = vocab_size
    with torch.device("meta"):
        return {name: weight.shape for name, weight in AutoModelForCausalLM.from_config(config).named_parameters()}


def _check_reward_model(config: PPOConfig, folder: str, tokenizer: PreTrainedTokenizerBase, longest: int) -> None:
    flag = config.reward_flag
    with naming(flag):
        check_sequence_classifier(folder, new_head=False)
    check_long_sequences(config.memory, flag, folder, scalar=True)
    model_config = load_config(folder, flag)
    if config.algorithm.normalize_rewards == "model":
        saved_statistics(model_config, folder)
    if config.rewards.process_reward is not None:
        saved_separator(model_config, folder)
    own = reward_tokenizer(config, folder, tokenizer)
    check_vocabulary(own or tokenizer, model_config, flag, folder, resize=config.run.resize_vocabulary)
    if own is not None:
        return
    if read_tokenizer(folder, flag).chat_template != tokenizer.chat_template:
        logger().warning(
            f"{flag} {folder}: its chat template differs from the actor's, but it reads the actor's token ids, "
            "rendered with the actor's template; for chat messages, train both with the same template (--chat_template)"
        )
    require_length(folder, longest, LIMITS)


def reward_tokenizer(
    config: PPOConfig, folder: str, tokenizer: PreTrainedTokenizerBase
) -> PreTrainedTokenizerBase | None:
    """The reward model's tokenizer if it differs from the actor's; else None."""
    own = read_tokenizer(folder, config.reward_flag)
    return None if own.get_vocab() == tokenizer.get_vocab() else own
