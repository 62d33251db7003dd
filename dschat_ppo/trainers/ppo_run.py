"""Step 3 from its flags to its outputs: checks, data, engines, training, saving."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from dschat_ppo.common import dist
from dschat_ppo.common.logging import logger
from dschat_ppo.common.phases import announce
from dschat_ppo.config.batch_plan import PPOPlan, plan_ppo
from dschat_ppo.config.steps import PPOConfig
from dschat_ppo.data.prepare import prepare
from dschat_ppo.data.unsupervised import text_blocks
from dschat_ppo.engine.ds_config import read_overlay
from dschat_ppo.engine.rlhf_engine import ModelFolders, RLHFEngine
from dschat_ppo.experience.maker import ExperienceMaker
from dschat_ppo.models.loading import (
    check_causal_lm,
    check_length,
    check_sequence_classifier,
    check_vocabulary,
    filler_id,
    load_config,
    load_tokenizer,
    model_folder,
)
from dschat_ppo.models.saving import save_model
from dschat_ppo.monitor.writers import MetricsWriter, write_result
from dschat_ppo.rewards.build import build_sources, check_sources
from dschat_ppo.rewards.mixture import RewardMixture
from dschat_ppo.trainers.judge import Judge
from dschat_ppo.trainers.ppo import PPOTrainer
from dschat_ppo.trainers.ptx import TextBatches
from dschat_ppo.trainers.rollouts import check_stop_ids
from dschat_ppo.trainers.setup import begin, naming, open_outputs, show_plan, tensorboard_folder
from dschat_ppo.trainers.validation import Validation

ACTOR, CRITIC, REWARD = "--actor_model_name_or_path", "--critic_model_name_or_path", "--reward_model_name_or_path"


def train_ppo(config: PPOConfig) -> dict[str, Any]:
    """Run step 3; returns the contents of `result.json`."""
    ppo = config.ppo
    models = {ppo.actor_model_name_or_path, config.critic_folder, config.reward_folder} - {None}
    device, output = begin("ppo", config, config.run, [str(name) for name in models])
    read_overlay(config.run.deepspeed_config)
    check_sources(config.rewards)
    folders = _model_folders(config)
    tokenizer = load_tokenizer(folders.actor, ACTOR)
    _check_models(config, folders, tokenizer)
    check_stop_ids(ppo.stop_token_ids, tokenizer)
    announce("prepare data")
    rows = prepare(
        "prompt", tokenizer, config.data, ppo.max_prompt_seq_len, eval_paths=config.validation.eval_data_path
    )
    plan = plan_ppo(ppo, len(rows.train), dist.world_size(), config.algorithm.critic_warmup_rollouts)
    texts = _texts(config, plan, tokenizer, device)
    show_plan("PPO: batches", plan.table(), ppo.num_warmup_steps, plan.actor_updates)
    _say_notes(config)
    started = time.perf_counter()
    announce("load models")
    open_outputs(output, config, config.run)
    engines = RLHFEngine(config, plan, folders)
    rewards = build_sources(config.rewards, learned_reward(config, engines, tokenizer, plan.micro_batch_tokens))
    trainer = PPOTrainer(config, plan, engines, rows.train, tokenizer, rewards, device, texts)
    if rows.eval is not None:
        trainer.validation = _validation(config, trainer, rows.eval, tokenizer, output)
    with MetricsWriter(output, tensorboard_folder(config.run)) as writer:
        result: dict[str, Any] = dict(trainer.run(writer))
    announce("save models")
    save_models(engines, tokenizer, output)
    result |= {
        "ppo_steps": plan.ppo_steps,
        "optimizer_steps": plan.total_updates,
        "world_size": dist.world_size(),
    }
    result["seconds"] = round(time.perf_counter() - started, 2)
    write_result(output, result)
    logger().info(f"PPO: saved to {output}/actor" + (f" and {output}/critic" if engines.critic else ""))
    return result


def _model_folders(config: PPOConfig) -> ModelFolders:
    """Local folders, fetched from the hub where names are given."""

    def folder(name: str | None, flag: str) -> str | None:
        return None if name is None else model_folder(name, flag)

    actor = model_folder(config.ppo.actor_model_name_or_path, ACTOR)
    return ModelFolders(actor, folder(config.critic_folder, CRITIC), folder(config.reward_folder, REWARD))


def _check_models(config: PPOConfig, folders: ModelFolders, tokenizer: PreTrainedTokenizerBase) -> None:
    """Vocabularies, kinds and lengths, before any weight is read."""
    longest = config.ppo.max_prompt_seq_len + config.ppo.max_answer_seq_len
    check_vocabulary(tokenizer, load_config(folders.actor, ACTOR), ACTOR, folders.actor)
    with naming(ACTOR):
        check_causal_lm(folders.actor)
    others = {CRITIC: folders.critic, REWARD: folders.reward}
    for flag, folder in others.items():
        if folder is not None and folder != folders.actor:
            check_vocabulary(tokenizer, load_config(folder, flag), flag, folder, other=True)
            with naming(flag):
                check_sequence_classifier(folder, new_head=flag == CRITIC and config.critic_may_have_new_head)
    for used in {folders.actor, folders.critic, folders.reward} - {None}:
        check_length(str(used), longest, "--max_prompt_seq_len + --max_answer_seq_len")


def _texts(
    config: PPOConfig, plan: PPOPlan, tokenizer: PreTrainedTokenizerBase, device: torch.device
) -> TextBatches | None:
    """Plain text for the PTX loss, in blocks as long as the longest row."""
    ppo = config.ppo
    if ppo.unsupervised_dataset_name is None:
        return None
    length = ppo.max_prompt_seq_len + ppo.max_answer_seq_len
    blocks: Dataset = text_blocks(
        ppo.unsupervised_dataset_name, ppo.unsupervised_dataset_config_name, tokenizer, length, config.data
    )
    return TextBatches(blocks, plan.global_batch, plan.micro_batch, config.run.seed, filler_id(tokenizer), device)


def _validation(
    config: PPOConfig, trainer: PPOTrainer, rows: Dataset, tokenizer: PreTrainedTokenizerBase, output: Path
) -> Validation:
    """Evaluation over the held-out prompts."""
    flags, engines, training = config.validation, trainer.engines, trainer.collector
    rows = rows.select(range(min(flags.eval_max_prompts or len(rows), len(rows))))
    mixture = training.judge.mixture
    if flags.eval_reward_function:
        mixture = RewardMixture([(function_source(flags.eval_reward_function, config.rewards), 1.0)])
    maker = None
    if engines.reference is not None:
        maker = ExperienceMaker(engines.actor, engines.reference, None, training.maker.how)

    def keep() -> None:
        save_models(engines, tokenizer, output / "best")

    return Validation(flags, training.rollouts, Judge(mixture, rows, tokenizer), maker, output, keep)


def _say_notes(config: PPOConfig) -> None:
    if config.ppo.old_logprobs == "rollout" and config.run.dtype != "fp32":
        logger().info(
            f"note: in {config.run.dtype} log-probs recorded while sampling differ by about 0.01 from those of the "
            "training forward, so ratios do not begin at 1 (--old_logprobs rollout)"
        )


def save_models(engines: RLHFEngine, tokenizer: PreTrainedTokenizerBase, output: Path) -> None:
    """Write the actor, and the critic if there is one, as Hugging Face folders. Collective."""
    save_model(engines.actor, tokenizer, output / "actor")
    if engines.critic is not None:
        save_model(engines.critic, tokenizer, output / "critic")
