"""Step 3 from its flags to its outputs: checks, data, engines, training, saving."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from dschat_ppo.checkpoint.resumable import Checkpointer
from dschat_ppo.checkpoint.run_identity import EVAL_ROWS, TEXT_BLOCKS, RunInputs
from dschat_ppo.common import dist
from dschat_ppo.common.logging import logger
from dschat_ppo.common.phases import announce
from dschat_ppo.config.batch_plan import PPOPlan, check_evaluation, plan_ppo
from dschat_ppo.config.on_policy import OldLogprobs
from dschat_ppo.config.schedule_flags import ppo_schedules
from dschat_ppo.config.steps import PPOConfig
from dschat_ppo.data.chat_templates import with_template_flags
from dschat_ppo.data.prepare import TokenRows, prepare
from dschat_ppo.data.sample_text import log_samples
from dschat_ppo.data.streaming import StreamedRows
from dschat_ppo.data.templates import answer_ends
from dschat_ppo.data.unsupervised import text_blocks
from dschat_ppo.engine.ds_config import check_zero_plus_plus, read_overlay
from dschat_ppo.engine.rlhf_engine import ModelFolders, RLHFEngine
from dschat_ppo.errors import UserError
from dschat_ppo.html_report.write_report import report_run
from dschat_ppo.models.loading import load_config
from dschat_ppo.models.model_folders import model_folder, with_bases
from dschat_ppo.models.saving import require_finite_weights, save_model
from dschat_ppo.models.tokenizers import filler_id, load_tokenizer
from dschat_ppo.monitor.health import HealthWatch
from dschat_ppo.monitor.health_ppo_rules import PPO_RULES
from dschat_ppo.monitor.step_line import CRITIC_COLUMN, PPO_COLUMNS
from dschat_ppo.monitor.writers import MetricsWriter, write_result
from dschat_ppo.ppo.check_models import (
    ACTOR,
    REFERENCE,
    check_models,
    model_folders,
    reward_length,
    reward_tokenizer,
)
from dschat_ppo.ppo.evaluation import Evaluation, shown_metrics
from dschat_ppo.ppo.generate import check_stop_ids
from dschat_ppo.ppo.loop import run
from dschat_ppo.ppo.plain_text import TextBatches
from dschat_ppo.ppo.report import PPOReport
from dschat_ppo.ppo.resumable_ppo import ResumablePPO
from dschat_ppo.ppo.samples import Samples
from dschat_ppo.ppo.score import ModelScorer, RewardScorer
from dschat_ppo.ppo.state import PPOComponents
from dschat_ppo.rewards.build_rewards import build_sources, check_routes, check_sources
from dschat_ppo.rewards.function_reward import FunctionReward, function_files, parse_function
from dschat_ppo.rewards.learned_reward import (
    SEPARATOR,
    STATISTICS,
    ModelReward,
    RetokenizedModelReward,
    StandardisedReward,
    StepScoring,
    saved_separator,
    saved_statistics,
)
from dschat_ppo.rewards.reward_mixture import RewardMixture
from dschat_ppo.rewards.reward_source import RewardSource
from dschat_ppo.session.begin_run import begin_run, show_plan
from dschat_ppo.session.kept_models import KeptModels
from dschat_ppo.session.session import open_session
from dschat_ppo.session.start_and_end import changes_of, show_end, show_models
from dschat_ppo.session.validation import write_validation


def train_ppo(config: PPOConfig) -> dict[str, Any]:
    """Run step 3; returns the contents of `result.json`."""
    ppo = config.ppo
    named = {ppo.actor_model_name_or_path, config.critic_folder, config.reward_folder, config.reference_folder}
    models, validate_only = [name for name in named if name is not None], config.validation.validate_only
    device, output = begin_run("ppo", config, config.run, models, validate_only)
    algorithm = config.algorithm
    logger().info(
        f"step 3: --advantage_estimator {algorithm.advantage_estimator}, --policy_loss {algorithm.policy_loss}"
    )
    read_overlay(config.run.deepspeed_config)
    check_zero_plus_plus(config.memory, config.ppo_memory.enable_mixed_precision_lora, dist.world_size(), device.type)
    check_sources(config.rewards)
    if config.validation.eval_reward_function:
        evaluation_reward(config).close()  # fails here if it cannot be used, before models are loaded
    folders = model_folders(config)
    tokenizer = with_template_flags(load_tokenizer(folders.actor, ACTOR), config.data)
    check_models(config, folders, tokenizer)
    check_stop_ids(ppo.stop_token_ids, tokenizer)

    announce("prepare data")
    rows = prompt_rows(config, tokenizer)
    warmup_rollouts, max_steps = config.algorithm.critic_warmup_rollouts, config.schedule.max_steps
    plan = plan_ppo(ppo, len(rows.train), dist.world_size(), warmup_rollouts, dist.sequence_ranks(), max_steps)
    texts = plain_texts(config, plan, tokenizer, device)
    if not validate_only:
        show_batches(config, plan)
    started = time.perf_counter()
    session = None if validate_only else open_session(
        "ppo", output, config, inputs_of(config, folders, rows, texts), derived_batch_sizes(config, plan),
        plan.ppo_steps,
    )  # fmt: skip

    announce("load models")
    engines = RLHFEngine(config, plan, replace(folders, critic=None) if validate_only else folders)
    with ExitStack() as at_end:
        learned = learned_reward(config, engines, tokenizer, plan.micro_batch_tokens)
        rewards = at_end.enter_context(closing(build_sources(config.rewards, learned)))
        components = PPOComponents(config, plan, engines, rows.train, tokenizer, rewards, device, texts, rows.sources)
        show_roles(config, components, folders, output)
        evaluation, health = None, HealthWatch(PPO_RULES, config.health)
        kept = KeptModels(
            output, config.export.save_hf_steps, config.validation.save_best,
            lambda folder: save_models(engines, tokenizer, folder),
        )  # fmt: skip
        if rows.eval is not None:
            held_out = evaluation_of(config, components, rows.eval, rows.eval_sources, tokenizer, kept)
            evaluation = at_end.enter_context(closing(held_out))
        if session is None:
            assert evaluation is not None  # --validate_only needs --eval_data_path
            announce("evaluate")
            engines.eval()
            found = evaluation.run(0)
            logger().info(f"evaluation: {shown_metrics(found)}")
            return write_validation(output, found, time.perf_counter() - started)

        every, count = ppo.sample_interval, ppo.samples_per_step
        samples = Samples(output, every, count, tokenizer, rewards.names, rows.sources)

        def train(writer: MetricsWriter, checkpointer: Checkpointer) -> dict[str, Any]:
            samples.lines.begin()
            health.begin(output)
            report = PPOReport(components, evaluation, health, writer, kept, samples)
            with report.bar:
                report.evaluate_before_training()
                run(components, report, checkpointer, session.trace)
            return report.result()

        announce("train")
        result = session.train(ResumablePPO(components, evaluation, health, [samples.lines]), train)

    announce("save models")
    save_models(engines, tokenizer, output)
    result |= {"ppo_steps": plan.ppo_steps, "optimizer_steps": plan.total_updates, "world_size": dist.world_size()}
    result["seconds"] = round(time.perf_counter() - started, 2)
    write_result(output, result)
    if dist.is_main():
        report_run(output)
    show_result(result, output, folders.actor)
    return result


def show_roles(config: PPOConfig, ppo: PPOComponents, folders: ModelFolders, output: Path) -> None:
    """Log the models, the generation engine and the output folder."""
    engines, reference = ppo.engines, folders.reference or folders.actor
    roles = {
        "actor": (engines.actor, folders.actor), "reference": (engines.reference, reference),
        "critic": (engines.critic, folders.critic), "reward model": (engines.reward, folders.reward),
    }  # fmt: skip
    rollout = ("rollout", ppo.collection.generator.engine_text)
    show_models(roles, config.run.dtype, output, [rollout])


def show_result(result: dict[str, Any], output: Path, start: str) -> None:
    """Log what the run has reached; `start` is the folder of the actor before training."""
    shown = [column for column in PPO_COLUMNS if column is not CRITIC_COLUMN]  # its last value alone says little
    names = {column.metric: column.label for column in shown} | {"eval/score": "held-out score"}
    saved = [output / role for role in ("actor", "critic", "actor_ema") if (output / role).is_dir()]
    chat = ["python", "-m", "dschat_ppo.tools.chat", "--model", str(output / "actor"), "--compare", start]
    steps = f"{result['ppo_steps']} PPO steps, {result['optimizer_steps']} updates"
    show_end("PPO", steps, result["seconds"], changes_of(result, names), saved, chat)


def prompt_rows(config: PPOConfig, tokenizer: PreTrainedTokenizerBase) -> TokenRows:
    """The prompts of training and evaluation. Collective.

    Raises:
        UserError: a data set cannot be used, or does not fit the flags of evaluation and rewards.
    """
    rows = prepare(
        "prompt", tokenizer, config.data, config.ppo.max_prompt_seq_len, eval_paths=config.validation.eval_data_path
    )
    if config.validation.eval_data_path and rows.eval is None:
        raise UserError("--eval_data_path: no prompt is within --max_prompt_seq_len; raise it, or --truncation left")
    log_samples(tokenizer, rows.train, rows.sources)
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
    if ppo.old_logprobs == "rollout" and config.run.dtype != "fp32":
        logger().info(
            f"note: in {config.run.dtype} log-probs recorded while sampling differ by about 0.01 from those of the "
            "training forward, so ratios do not begin at 1 (--old_logprobs rollout)"
        )


def derived_batch_sizes(config: PPOConfig, plan: PPOPlan) -> dict[str, int]:
    """Batch sizes that the flags result in, for a checkpoint's manifest.

    Each round of dynamic sampling takes the same number of prompts on every rank. So the number of ranks decides how
    many prompts a round takes in all, and which prompts later steps see.
    """
    sizes = {"rows_per_update": plan.global_batch, "rows_per_step": plan.rollout_prompts}
    return sizes | ({"ranks": plan.world_size} if config.algorithm.dynamic_sampling else {})


def inputs_of(config: PPOConfig, folders: ModelFolders, rows: TokenRows, texts: TextBatches | None) -> RunInputs:
    """The inputs of step 3. Without a folder of its own, the reference is loaded from the actor's."""
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


def learned_reward(
    config: PPOConfig, engines: RLHFEngine, tokenizer: PreTrainedTokenizerBase, batch_tokens: int
) -> RewardSource | None:
    """The reward model as a reward source, or None if there is none."""
    if engines.reward is None or config.reward_folder is None:
        return None
    folder = model_folder(config.reward_folder, config.reward_flag)
    own = reward_tokenizer(config, folder, tokenizer)
    steps, how = None, config.rewards.process_reward
    if how is not None:
        separator = saved_separator(load_config(folder, config.reward_flag), config.reward_folder)
        steps = StepScoring(own or tokenizer, separator, how)
    source: RewardSource = ModelReward(engines.reward, batch_tokens, steps)
    if own is not None:
        length = reward_length(config, folder)
        logger().info(
            f"the reward model has its own tokenizer: answers are tokenised again for it, up to {length} tokens"
        )
        source = RetokenizedModelReward(engines.reward, own, length, dist.device(), batch_tokens, steps)
    if config.algorithm.normalize_rewards == "model":
        statistics = saved_statistics(load_config(folder, config.reward_flag), config.reward_folder)
        source = StandardisedReward(source, *statistics)
    return source


def evaluation_reward(config: PPOConfig) -> FunctionReward:
    """The function of `--eval_reward_function`.

    Raises:
        UserError: it cannot be used, or it has a weight or a route.
    """
    rewards, text = config.rewards, config.validation.eval_reward_function or ""
    spec = parse_function(text, "--eval_reward_function")
    if spec.weight != 1 or spec.sources:
        raise UserError(f"{spec.flag} {text}: it alone scores the evaluation, so it takes no weight and no route")
    return FunctionReward(spec, rewards.reward_workers, rewards.reward_timeout, rewards.reward_default)


def evaluation_of(
    config: PPOConfig, ppo: PPOComponents, rows: Dataset, data_sources: Sequence[str],
    tokenizer: PreTrainedTokenizerBase, kept: KeptModels,
) -> Evaluation:  # fmt: skip
    """Evaluation over the held-out prompts, whose column `source` numbers the `data_sources`."""
    flags, engines, collection = config.validation, ppo.engines, ppo.collection
    rows = rows.select(range(min(flags.eval_max_prompts or len(rows), len(rows))))
    mixture = collection.reward_scorer.mixture
    if flags.eval_reward_function:
        mixture = RewardMixture([(evaluation_reward(config), 1.0)], config.rewards.reward_default)
    scorer = None
    if engines.reference is not None:
        old_logprobs: OldLogprobs = "recompute" if config.recompute_old_logprobs else "rollout"
        scoring = replace(collection.model_scorer.scoring, old_logprobs=old_logprobs)
        scorer = ModelScorer(engines.actor, engines.reference, None, scoring)

    reward_scorer = RewardScorer(mixture, rows, tokenizer)
    return Evaluation(flags, collection.generator, reward_scorer, scorer, kept.output, kept.save_best, data_sources)


def save_models(engines: RLHFEngine, tokenizer: PreTrainedTokenizerBase, output: Path) -> None:
    """Write the actor, its moving average and the critic, where they exist, as Hugging Face folders. Collective.

    Raises:
        NonFiniteError: a weight of one of them is not finite; nothing is written.
    """
    for role, engine in engines.trained.items():
        require_finite_weights(role, engine)
    ends, merge = answer_ends(tokenizer), engines.saves_merged
    save_model(engines.actor, tokenizer, output / "actor", ends=ends, merge=merge)
    if engines.actor_average is not None:
        average = engines.actor_average.gathered()
        save_model(engines.actor, tokenizer, output / "actor_ema", weights=average, ends=ends, merge=merge)
    if engines.critic is not None:
        # A critic that started from a reward model does not keep what describes that model's scores.
        described = dict.fromkeys((*STATISTICS, SEPARATOR))
        save_model(engines.critic, tokenizer, output / "critic", described, ends=ends, merge=merge)
