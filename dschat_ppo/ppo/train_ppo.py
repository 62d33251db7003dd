"""Step 3 from its flags to its outputs: checks, data, engines, training, saving."""

from __future__ import annotations

import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from dschat_ppo.checkpoint.run_identity import EVAL_ROWS, TEXT_BLOCKS, RunInputs
from dschat_ppo.common import dist
from dschat_ppo.common.atomic_files import PARTIAL, replace_folder
from dschat_ppo.common.logging import logger
from dschat_ppo.common.phases import announce
from dschat_ppo.config.batch_plan import PPOPlan, check_evaluation, plan_ppo
from dschat_ppo.config.steps import PPOConfig
from dschat_ppo.data.prepare import TokenRows, prepare
from dschat_ppo.data.templates import answer_ends
from dschat_ppo.data.unsupervised import text_blocks
from dschat_ppo.engine.ds_config import read_overlay
from dschat_ppo.engine.rlhf_engine import ModelFolders, RLHFEngine
from dschat_ppo.errors import StorageError, UserError
from dschat_ppo.models.finite_weights import require_finite_weights
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
from dschat_ppo.monitor.writers import write_result
from dschat_ppo.ppo.evaluate import Evaluation
from dschat_ppo.ppo.generate import check_stop_ids
from dschat_ppo.ppo.loop import PPOTrainer
from dschat_ppo.ppo.plain_text import TextBatches
from dschat_ppo.ppo.reward_scorer import RewardScorer
from dschat_ppo.ppo.score import ModelScorer
from dschat_ppo.rewards.build_rewards import build_sources, check_sources
from dschat_ppo.rewards.function_reward import FunctionReward, function_files, parse_function
from dschat_ppo.rewards.learned_reward import (
    STATISTICS,
    ModelReward,
    RetokenizedModelReward,
    StandardisedReward,
    saved_statistics,
)
from dschat_ppo.rewards.reward_mixture import RewardMixture
from dschat_ppo.rewards.reward_source import RewardSource
from dschat_ppo.session.begin_run import begin, naming, show_plan
from dschat_ppo.session.session import open_session

ACTOR = "--actor_model_name_or_path"
LIMITS = "--max_prompt_seq_len + --max_answer_seq_len"


def train_ppo(config: PPOConfig) -> dict[str, Any]:
    """Run step 3; returns the contents of `result.json`."""
    ppo = config.ppo
    models = {ppo.actor_model_name_or_path, config.critic_folder, config.reward_folder} - {None}
    device, output = begin("ppo", config, config.run, [str(name) for name in models])
    read_overlay(config.run.deepspeed_config)
    check_sources(config.rewards)
    if config.validation.eval_reward_function:
        _true_score(config).close()  # whether it can be used, before models are loaded
    folders = _model_folders(config)
    tokenizer = load_tokenizer(folders.actor, ACTOR)
    _check_models(config, folders, tokenizer)
    check_stop_ids(ppo.stop_token_ids, tokenizer)
    announce("prepare data")
    rows = prepare(
        "prompt", tokenizer, config.data, ppo.max_prompt_seq_len, eval_paths=config.validation.eval_data_path
    )
    if config.validation.eval_data_path and rows.eval is None:
        raise UserError("--eval_data_path: no prompt is within --max_prompt_seq_len; raise it, or --truncation left")
    check_evaluation(config.validation, 0 if rows.eval is None else len(rows.eval))
    plan = plan_ppo(ppo, len(rows.train), dist.world_size(), config.algorithm.critic_warmup_rollouts)
    texts = plain_texts(config, plan, tokenizer, device)
    show_plan("PPO: batches", plan.table(), ppo.num_warmup_steps, plan.actor_updates)
    _say_notes(config)
    started = time.perf_counter()
    session = open_session(
        "ppo", output, config, inputs_of(config, folders, rows, texts), derived_batch_sizes(config, plan)
    )
    announce("load models")
    engines = RLHFEngine(config, plan, folders)
    rewards = build_sources(config.rewards, learned_reward(config, engines, tokenizer, plan.micro_batch_tokens))
    with ExitStack() as open_until_the_end:
        open_until_the_end.enter_context(closing(rewards))
        trainer = PPOTrainer(config, plan, engines, rows.train, tokenizer, rewards, device, texts)
        if rows.eval is not None:
            trainer.validation = _validation(config, trainer, rows.eval, tokenizer, output)
            open_until_the_end.enter_context(closing(trainer.validation))
        announce("train")
        result: dict[str, Any] = dict(session.train(trainer, trainer.run))
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
    return ModelFolders(
        actor, folder(config.critic_folder, config.critic_flag), folder(config.reward_folder, config.reward_flag)
    )


def derived_batch_sizes(config: PPOConfig, plan: PPOPlan) -> dict[str, int]:
    """What the flags amount to, for a checkpoint's manifest.

    With dynamic sampling a round takes as many prompts on each rank. So the number of ranks decides how many a round
    takes in all, hence which prompts the later steps see.
    """
    amounts = {"rows_per_update": plan.global_batch, "rows_per_step": plan.rollout_prompts}
    return amounts | ({"ranks": plan.world_size} if config.algorithm.dynamic_sampling else {})


def inputs_of(config: PPOConfig, folders: ModelFolders, rows: TokenRows, texts: TextBatches | None) -> RunInputs:
    """What step 3 reads. The actor's folder is the reference's too."""
    scored_by = config.validation.eval_reward_function
    return RunInputs(
        rows.train,
        {EVAL_ROWS: rows.eval, TEXT_BLOCKS: None if texts is None else texts.rows},
        [(ACTOR, folders.actor), (config.critic_flag, folders.critic), (config.reward_flag, folders.reward)],
        [
            ("--deepspeed_config", config.run.deepspeed_config),
            *function_files("--reward_function", config.rewards.reward_function),
            *function_files("--eval_reward_function", [scored_by] if scored_by else []),
        ],
    )


def _check_models(config: PPOConfig, folders: ModelFolders, tokenizer: PreTrainedTokenizerBase) -> None:
    """Vocabularies, kinds and lengths, before any weight is read."""
    longest = config.ppo.max_prompt_seq_len + config.ppo.max_answer_seq_len
    resize = config.run.resize_vocabulary
    check_vocabulary(tokenizer, load_config(folders.actor, ACTOR), ACTOR, folders.actor, resize=resize)
    with naming(ACTOR):
        check_causal_lm(folders.actor)
    if (
        config.algorithm.router_loss_coef > 0
        and "output_router_logits" not in load_config(folders.actor, ACTOR).to_dict()
    ):
        raise UserError(f"--router_loss_coef: {folders.actor} is no mixture of experts that can give its router's loss")
    if folders.critic is not None:
        flag = config.critic_flag
        _check_classifier(flag, folders.critic, config.critic_may_have_new_head)
        if folders.critic != folders.actor:
            check_vocabulary(tokenizer, load_config(folders.critic, flag), flag, folders.critic, True, resize)
    if folders.reward is not None:
        flag = config.reward_flag
        _check_classifier(flag, folders.reward, new_head=False)
        reward_config = load_config(folders.reward, flag)
        if config.algorithm.normalize_rewards == "model":
            saved_statistics(reward_config, folders.reward)
        own = _reward_tokenizer(config, folders.reward, tokenizer)
        check_vocabulary(own or tokenizer, reward_config, flag, folders.reward, resize=resize)
        if own is None:
            check_length(folders.reward, longest, LIMITS)
            if config.rewards.reward_model_max_length is not None:
                raise UserError(
                    f"--reward_model_max_length: {folders.reward} has the actor's tokenizer and reads the actor's rows "
                    f"as they are; leave it out ({LIMITS} limit them)"
                )
        else:
            check_length(folders.reward, _foreign_length(config, folders.reward), "--reward_model_max_length")
    for folder in {folders.actor, folders.critic} - {None}:
        check_length(str(folder), longest, LIMITS)


def _check_classifier(flag: str, folder: str, new_head: bool) -> None:
    with naming(flag):
        check_sequence_classifier(folder, new_head=new_head)


def _reward_tokenizer(
    config: PPOConfig, folder: str, tokenizer: PreTrainedTokenizerBase
) -> PreTrainedTokenizerBase | None:
    """The reward model's tokenizer where it differs from the actor's; else None."""
    own = load_tokenizer(folder, config.reward_flag)
    return None if own.get_vocab() == tokenizer.get_vocab() else own


def _foreign_length(config: PPOConfig, folder: str) -> int:
    """Most tokens of a row of a reward model with a tokenizer of its own."""
    text = load_config(folder, config.reward_flag).get_text_config().to_dict()
    length = config.rewards.reward_model_max_length or text.get("max_position_embeddings")
    if length is None:
        raise UserError(f"{config.reward_flag} {folder}: its config does not say how many positions it knows; give "
                        "--reward_model_max_length")  # fmt: skip
    return int(length)


def learned_reward(
    config: PPOConfig, engines: RLHFEngine, tokenizer: PreTrainedTokenizerBase, batch_tokens: int
) -> RewardSource | None:
    """The reward model as a source of reward, or None where there is none."""
    if engines.reward is None or config.reward_folder is None:
        return None
    folder = model_folder(config.reward_folder, config.reward_flag)
    model_config = load_config(folder, config.reward_flag)
    own = _reward_tokenizer(config, folder, tokenizer)
    source: RewardSource = ModelReward(engines.reward, batch_tokens)
    if own is not None:
        length = _foreign_length(config, folder)
        logger().info(f"the reward model has a tokenizer of its own: answers are encoded anew, up to {length} tokens")
        source = RetokenizedModelReward(engines.reward, own, length, dist.device(), batch_tokens)
    if config.algorithm.normalize_rewards == "model":
        source = StandardisedReward(source, *saved_statistics(model_config, config.reward_folder))
    return source


def plain_texts(
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
    rows = max(1, min(plan.micro_batch, plan.micro_batch_tokens // length))
    return TextBatches(blocks, plan.global_batch, rows, config.run.seed, filler_id(tokenizer), device)


def _validation(
    config: PPOConfig, trainer: PPOTrainer, rows: Dataset, tokenizer: PreTrainedTokenizerBase, output: Path
) -> Evaluation:
    """Evaluation over the held-out prompts."""
    flags, engines, training = config.validation, trainer.engines, trainer.collector
    rows = rows.select(range(min(flags.eval_max_prompts or len(rows), len(rows))))
    mixture = training.judge.mixture
    if flags.eval_reward_function:
        mixture = RewardMixture([(_true_score(config), 1.0)])
    maker = None
    if engines.reference is not None:
        maker = ModelScorer(engines.actor, engines.reference, None, training.maker.how)

    def keep() -> None:
        best = output / "best"
        save_models(engines, tokenizer, output / f"best{PARTIAL}")
        problem = dist.broadcast_object(_take_place(best) if dist.is_main() else None)
        if problem is not None:
            raise StorageError(problem)

    return Evaluation(flags, training.rollouts, RewardScorer(mixture, rows, tokenizer), maker, output, keep)


def _take_place(best: Path) -> str | None:
    """The best models so far take the place of those before; why they cannot, or None."""
    try:
        replace_folder(best, best.with_name(f"{best.name}{PARTIAL}"))
    except OSError as problem:
        return f"{best}: cannot be written ({problem.strerror})"
    return None


def _true_score(config: PPOConfig) -> FunctionReward:
    """The function of `--eval_reward_function`."""
    rewards = config.rewards
    text = config.validation.eval_reward_function or ""
    spec = parse_function(text, "--eval_reward_function")
    if spec.weight != 1:
        raise UserError(f"{spec.flag} {text}: it is the only score of an evaluation, so it takes no weight")
    return FunctionReward(spec, rewards.reward_workers, rewards.reward_timeout, rewards.reward_default)


def _say_notes(config: PPOConfig) -> None:
    if config.ppo.old_logprobs == "rollout" and config.run.dtype != "fp32":
        logger().info(
            f"note: in {config.run.dtype} log-probs recorded while sampling differ by about 0.01 from those of the "
            "training forward, so ratios do not begin at 1 (--old_logprobs rollout)"
        )


def save_models(engines: RLHFEngine, tokenizer: PreTrainedTokenizerBase, output: Path) -> None:
    """Write the actor, its moving average and the critic, if there are, as Hugging Face folders. Collective.

    Raises:
        NonFiniteError: a weight of one of them is not finite; nothing is written.
    """
    for role, engine in engines.trained.items():
        require_finite_weights(role, engine)
    ends = answer_ends(tokenizer)
    save_model(engines.actor, tokenizer, output / "actor", ends=ends)
    if engines.actor_average is not None:
        save_model(engines.actor, tokenizer, output / "actor_ema", weights=engines.actor_average.gathered(), ends=ends)
    if engines.critic is not None:
        # the spread of the reward model's scores, which it may have started from, is none of its values'
        save_model(engines.critic, tokenizer, output / "critic", dict.fromkeys(STATISTICS), ends=ends)
