"""Step 3 before its models are loaded: checks of flags, reward sources and folders; prompts; the batch plan."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from dschat_ppo.checkpoint.run_identity import EVAL_ROWS, TEXT_BLOCKS, RunInputs
from dschat_ppo.common import dist
from dschat_ppo.common.logging import logger
from dschat_ppo.common.own_functions import own_files
from dschat_ppo.common.phases import announce
from dschat_ppo.config.batch_plan import PPOPlan, check_evaluation, plan_ppo
from dschat_ppo.config.schedule_flags import ppo_schedules
from dschat_ppo.config.steps import PPOConfig
from dschat_ppo.data.chat_templates import with_template_flags
from dschat_ppo.data.prepare import TokenRows, prepare
from dschat_ppo.data.sample_text import log_samples
from dschat_ppo.data.streaming import StreamedRows
from dschat_ppo.data.unsupervised import text_blocks
from dschat_ppo.engine.ds_config import check_zero_plus_plus, require_agreement
from dschat_ppo.engine.rlhf_engine import ModelFolders
from dschat_ppo.errors import UserError, counted
from dschat_ppo.models.model_folders import with_bases
from dschat_ppo.models.tokenizers import filler_id, load_tokenizer
from dschat_ppo.planner.plan_step import show_memory_plan
from dschat_ppo.ppo.check_models import ACTOR, REFERENCE, check_models, model_folders, report_lengths
from dschat_ppo.ppo.generate import check_stop_ids
from dschat_ppo.ppo.mini_dataset import TextBatches
from dschat_ppo.ppo.own_algorithms import check_own_functions
from dschat_ppo.rewards.build_rewards import check_routes, check_sandbox, check_sources
from dschat_ppo.rewards.function_reward import FunctionReward, function_files, parse_function
from dschat_ppo.session.begin_run import begin_run, end_dry_run, show_plan, warn_of_little_data
from dschat_ppo.session.session import Session, open_session


@dataclass(frozen=True)
class BegunPPO:
    """A run of step 3 before its models are loaded from `folders`."""

    device: torch.device
    output: Path
    folders: ModelFolders
    tokenizer: PreTrainedTokenizerBase
    rows: TokenRows
    plan: PPOPlan
    texts: TextBatches | None
    session: Session | None  # None: --validate_only
    started: float  # `time.perf_counter()` after the data are prepared


def begin_ppo(config: PPOConfig) -> BegunPPO:
    """Do everything that comes before the models are loaded. Collective. `StopRequested` if the run was asked to stop,
    or is already complete."""
    ppo, algorithm, validate_only = config.ppo, config.algorithm, config.validation.validate_only
    named = {ppo.actor_model_name_or_path, config.critic_folder, config.reward_folder, config.reference_folder}
    models = [name for name in named if name is not None]

    def check_functions() -> None:
        logger().info(
            f"step 3: --advantage_estimator {algorithm.advantage_estimator}, --policy_loss {algorithm.policy_loss}, "
            + (f"scores clipped to +- {config.score_clip:g}" if config.score_clip else "scores not clipped")
        )
        check_own_functions(config)
        check_sources(config.rewards)
        if config.validation.eval_reward_function:
            evaluation_reward(config).close()  # fails here if it cannot be used
            check_sandbox(
                config.rewards, [parse_function(config.validation.eval_reward_function, "--eval_reward_function")]
            )

    device, output = begin_run("ppo", config, config.run, models, validate_only, check_functions)
    require_agreement(config, dist.world_size())
    check_zero_plus_plus(config.memory, config.ppo_memory.enable_mixed_precision_lora, dist.world_size(), device.type)
    folders = model_folders(config)
    tokenizer = with_template_flags(load_tokenizer(folders.actor, ACTOR), config.data)
    check_models(config, folders, tokenizer)
    check_stop_ids(ppo.stop_token_ids, tokenizer)

    announce("prepare data")
    rows = prompt_rows(config, tokenizer)
    report_lengths(config, folders, tokenizer)
    plan = plan_ppo(
        ppo, len(rows.train), dist.world_size(), algorithm.critic_warmup_rollouts,
        config.memory.sequence_parallel_size,
        config.schedule.max_steps,
    )  # fmt: skip
    texts = plain_texts(config, plan, tokenizer, device)
    if not validate_only:
        show_batches(config, plan)
        show_memory_plan(config)
        is_trial = config.schedule.max_steps > 0 or ppo.enable_test_mode
        eval_rows = None if rows.eval is None or config.validation.eval_max_prompts else len(rows.eval)
        warn_of_little_data(None if is_trial else plan.total_updates, eval_rows)
    end_dry_run(config.run, config.safety.resume, None if validate_only else plan.ppo_steps)
    started = time.perf_counter()
    session = None if validate_only else open_session(
        "ppo", output, config, inputs_of(config, folders, rows, texts), derived_batch_sizes(config, plan),
        plan.ppo_steps,
    )  # fmt: skip
    return BegunPPO(device, output, folders, tokenizer, rows, plan, texts, session, started)


def prompt_rows(config: PPOConfig, tokenizer: PreTrainedTokenizerBase) -> TokenRows:
    """The prompts of training and evaluation. Collective."""
    rows = prepare(
        "prompt", tokenizer, config.data, config.ppo.max_prompt_seq_len, eval_paths=config.validation.eval_data_path
    )
    if config.validation.eval_data_path and rows.eval is None:
        raise UserError("--eval_data_path: no prompt is within --max_prompt_seq_len; raise it or use --truncation left")
    log_samples(tokenizer, rows.train, rows.sources, 3 if config.run.dry_run else 1)
    check_evaluation(config.validation, 0 if rows.eval is None else len(rows.eval))
    known = rows.train.first_chunk() if isinstance(rows.train, StreamedRows) else rows.train
    check_routes(config.rewards, rows.sources, known["row"], len(known) == len(rows.train))
    return rows


def show_batches(config: PPOConfig, plan: PPOPlan) -> None:
    """Log batch sizes, warm-up, and what the flags do to ratios."""
    ppo, schedule = config.ppo, config.schedule
    lines = [*plan.table(), *schedule.warmup_shown(plan.actor_updates)]
    schedules = ppo_schedules(ppo, config.ppo_schedule, config.algorithm.has_critic)
    totals = (plan.actor_updates, plan.total_updates)
    warmups = [
        (schedule.warmup_of(model, ppo.num_warmup_steps, total), total)
        for model, total in zip(schedules, totals, strict=False)  # there may be no critic
    ]
    show_plan("PPO: batches", lines, *dict.fromkeys(warmups))
    if plan.warmup_rollouts < config.algorithm.critic_warmup_rollouts:
        logger().info(
            f"note: --critic_warmup_rollouts is {plan.warmup_rollouts} in place of "
            f"{config.algorithm.critic_warmup_rollouts}, so that the last of {counted(plan.ppo_steps, 'PPO step')} "
            "trains the actor"
        )
    if ppo.old_logprobs == "rollout" and config.run.dtype != "fp32":
        logger().info(
            f"note: in {config.run.dtype} log-probs recorded while sampling differ by about 0.01 from those of the "
            "training forward, so ratios do not begin at 1 (--old_logprobs rollout)"
        )


def derived_batch_sizes(config: PPOConfig, plan: PPOPlan) -> dict[str, int]:
    """Batch sizes that the flags result in, for a checkpoint's manifest. Each round of dynamic sampling takes the same
    number of prompts on every rank. So the number of ranks decides how many prompts a round takes in all, and which
    prompts later steps see."""
    sizes = {"rows_per_update": plan.global_batch, "rows_per_step": plan.rollout_prompts}
    return sizes | ({"ranks": plan.world_size} if config.algorithm.dynamic_sampling else {})


def inputs_of(config: PPOConfig, folders: ModelFolders, rows: TokenRows, texts: TextBatches | None) -> RunInputs:
    """The inputs of step 3. Without --ref_model_name_or_path, the reference is loaded from the actor's folder."""
    evaluated_by = config.validation.eval_reward_function
    return RunInputs(
        rows.train,
        {EVAL_ROWS: rows.eval, TEXT_BLOCKS: None if texts is None else texts.rows},
        with_bases(
            [
                (ACTOR, folders.actor),
                (config.critic_flag, folders.critic),
                (config.reward_flag, folders.reward),
                (REFERENCE, folders.reference),
            ]
        ),
        [
            ("--deepspeed_config", config.run.deepspeed_config),
            *own_files(
                ("--advantage_estimator", config.algorithm.advantage_estimator),
                ("--policy_loss", config.algorithm.policy_loss),
            ),
            *function_files("--reward_function", config.rewards.reward_function),
            *function_files("--eval_reward_function", [evaluated_by] if evaluated_by else []),
        ],
    )


def plain_texts(
    config: PPOConfig, plan: PPOPlan, tokenizer: PreTrainedTokenizerBase, device: torch.device
) -> TextBatches | None:
    """Plain text for the PTX loss, in blocks as long as the longest row; None if the flags name none."""
    ppo = config.ppo
    if ppo.unsupervised_dataset_name is None:
        return None
    length = ppo.max_prompt_seq_len + ppo.max_answer_seq_len
    blocks: Dataset = text_blocks(
        ppo.unsupervised_dataset_name, ppo.unsupervised_dataset_config_name, tokenizer, length, config.data
    )
    micro_batch = max(1, min(plan.micro_batch, plan.micro_batch_tokens // length))
    return TextBatches(blocks, plan.global_batch, micro_batch, config.run.seed, filler_id(tokenizer), device)


def evaluation_reward(config: PPOConfig) -> FunctionReward:
    """The function of `--eval_reward_function`, which has no weight and no route."""
    rewards, text = config.rewards, config.validation.eval_reward_function or ""
    spec = parse_function(text, "--eval_reward_function")
    if spec.weight != 1 or spec.sources:
        raise UserError(f"{spec.flag} {text}: it alone scores the evaluation, so it takes no weight and no route")
    return FunctionReward(spec, rewards.reward_workers, rewards.reward_timeout, rewards.reward_default)
