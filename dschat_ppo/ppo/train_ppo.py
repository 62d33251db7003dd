"""Step 3 from its flags to its outputs: models and engines, rewards, training, saving."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from dschat_ppo.common import dist
from dschat_ppo.common.logging import logger
from dschat_ppo.common.paths import SAMPLES
from dschat_ppo.common.phases import announce
from dschat_ppo.config.on_policy import OldLogprobs
from dschat_ppo.config.ppo_config import PPOConfig
from dschat_ppo.data.templates import answer_ends
from dschat_ppo.engine.rlhf_engine import ModelFolders, RLHFEngine
from dschat_ppo.episodes.rollouts import EpisodeRollouts
from dschat_ppo.errors import counted
from dschat_ppo.models.model_folders import model_folder
from dschat_ppo.models.saving import (
    SavedForm,
    require_finite_weights,
    save_model,
    saved_dtype,
)
from dschat_ppo.monitor.health import HealthWatch
from dschat_ppo.monitor.step_line import PPO_COLUMNS
from dschat_ppo.monitor.writers import JsonLines, write_result
from dschat_ppo.ppo.begin_ppo import begin_ppo, evaluation_reward, reward_tokenizer
from dschat_ppo.ppo.evaluation import Evaluation, shown_metrics
from dschat_ppo.ppo.loop import run
from dschat_ppo.ppo.samples import Samples
from dschat_ppo.ppo.score import RewardRequests
from dschat_ppo.ppo.state import PPOComponents, ResumablePPO
from dschat_ppo.ppo.step_report import PPOReport
from dschat_ppo.rewards.build_rewards import build_sources
from dschat_ppo.rewards.learned_reward import SEPARATOR, STATISTICS, ModelReward, model_reward
from dschat_ppo.rewards.reward_source import RewardMixture
from dschat_ppo.run.model_card import model_card
from dschat_ppo.run.output_folder import KeptModels, remove_checkpoints
from dschat_ppo.run.start_and_end import (
    changes_of,
    show_end,
    show_models,
    tool_command,
    write_validation,
)

# answers in samples.jsonl: of the first prompts, the one with the highest and the lowest score
SAMPLES_PER_STEP = 8


def train_ppo(config: PPOConfig) -> dict[str, Any]:
    """Run step 3; returns the contents of `result.json`."""
    begun = begin_ppo(config)
    output, rows, plan, tokenizer, session = (
        begun.output,
        begun.rows,
        begun.plan,
        begun.tokenizer,
        begun.session,
    )

    announce("load models")
    folders = begun.folders if session is not None else replace(begun.folders, critic=None)
    engines = RLHFEngine(config, plan, folders)
    forms = saved_forms(config, engines, tokenizer)
    with ExitStack() as at_end:
        learned = learned_reward(config, engines, tokenizer, plan.micro_batch_tokens)
        episodes, flags = None, config.environment
        if flags.is_used:
            journal = None if session is None else output  # an evaluation alone is not resumed
            episodes = EpisodeRollouts(flags, tokenizer, config.ppo.max_prompt_seq_len, journal)
            at_end.enter_context(closing(episodes))
        others = [] if episodes is None else episodes.reward_sources
        rewards = at_end.enter_context(closing(build_sources(config.rewards, learned, others)))
        components = PPOComponents(
            config, plan, rows, tokenizer, engines, rewards, begun.texts, episodes
        )
        show_roles(config, components, begun.folders, output)
        evaluation, health = None, HealthWatch(config.health)
        kept = KeptModels(
            output,
            config.safety.save_hf_steps,
            config.validation.save_best,
            lambda folder: save_models(engines, forms, tokenizer, folder),
        )
        if rows.eval is not None:
            held_out = evaluation_of(
                config, components, rows.eval, rows.eval_sources, tokenizer, kept
            )
            evaluation = at_end.enter_context(closing(held_out))
        if session is None:
            assert evaluation is not None  # --validate_only needs --eval_data_path
            announce("evaluate")
            engines.eval()
            found = evaluation.run(0)
            logger().info(f"evaluation: {shown_metrics(found)}")
            return write_validation(output, found, time.perf_counter() - begun.started)

        lines = JsonLines(output / SAMPLES)
        samples = Samples(
            lines,
            config.ppo.sample_interval,
            SAMPLES_PER_STEP,
            tokenizer,
            rewards.names,
            rows.sources,
        )
        announce("train")
        resumable = ResumablePPO(components, evaluation, health, [lines])
        with session.training(resumable) as (writer, checkpointer):
            lines.begin()
            health.begin(output)
            report = PPOReport(components, evaluation, health, writer, kept, samples)
            with report.bar:
                report.evaluate_before_training()
                run(components, report, checkpointer, session.trace)
        result = report.result()

    announce("save models")
    save_models(engines, forms, tokenizer, output)
    result |= {
        "ppo_steps": plan.ppo_steps,
        "optimizer_steps": plan.total_updates,
        "world_size": dist.world_size(),
    }
    result["seconds"] = round(time.perf_counter() - begun.started, 2)
    write_result(output, result)
    if dist.is_main() and not config.safety.keep_final_checkpoint:
        remove_checkpoints(output)
    show_result(result, output, begun.folders.actor, session.checkpoint is not None)
    return result


def show_roles(config: PPOConfig, ppo: PPOComponents, folders: ModelFolders, output: Path) -> None:
    """Log the models, the generation engine and the output folder."""
    engines, reference = ppo.engines, folders.reference or folders.actor
    roles = {
        "actor": (engines.actor, folders.actor),
        "reference": (engines.reference, reference),
        "critic": (engines.critic, folders.critic),
        "reward model": (engines.reward, folders.reward),
        **dict(
            zip(
                config.teacher.models,
                zip(engines.teachers, folders.teachers, strict=True),
                strict=True,
            )
        ),
    }
    rollout = ("rollout", ppo.collection.sampler.engine_text)
    show_models(roles, config.run.dtype, output, [rollout], trains=not config.validate_only)


def saved_forms(
    config: PPOConfig, engines: RLHFEngine, tokenizer: PreTrainedTokenizerBase
) -> dict[str, SavedForm]:
    """How the models that train are written, by role. Made before training, because it reads the
    folders from which they start."""
    ends = answer_ends(tokenizer)
    return {
        role: SavedForm(
            ends,
            engines.saves_merged,
            partial(model_card, config, role),
            saved_dtype(engine.module, config.run.save_dtype),
        )
        for role, engine in engines.trained.items()
    }


def save_models(
    engines: RLHFEngine,
    forms: Mapping[str, SavedForm],
    tokenizer: PreTrainedTokenizerBase,
    output: Path,
) -> None:
    """Write the actor, its moving average and the critic, where they exist, as Hugging Face
    folders; nothing if a weight is not finite (`NonFiniteError`). Collective."""
    for role, engine in engines.trained.items():
        require_finite_weights(role, engine)
    save_model(engines.actor, tokenizer, output / "actor", form=forms["actor"])
    if engines.actor_average is not None:
        average = engines.actor_average.gathered()
        place = output / "actor_ema"
        save_model(engines.actor, tokenizer, place, weights=average, form=forms["actor"])
    if engines.critic is not None:
        # A critic that started from a reward model does not keep what describes that model's
        # scores.
        described = dict.fromkeys((*STATISTICS, SEPARATOR))
        save_model(engines.critic, tokenizer, output / "critic", described, form=forms["critic"])


def show_result(result: dict[str, Any], output: Path, start: str, resumed: bool) -> None:
    """Log what the run has reached. `result` is that of `result.json`, `start` the actor's folder
    before training."""
    names = {column.metric: column.label for column in PPO_COLUMNS} | {
        "eval/score": "held-out score"
    }
    del names["value/explained_variance"]  # whose last value alone says little
    saved = [output / role for role in ("actor", "critic", "actor_ema") if (output / role).is_dir()]
    chat = tool_command("chat", ["--model", str(output / "actor"), "--compare", start])
    steps = (
        f"{counted(result['ppo_steps'], 'PPO step')},"
        f" {counted(result['optimizer_steps'], 'update')}"
    )
    show_end("PPO", steps, result["seconds"], changes_of(result, names), saved, chat, resumed)


def learned_reward(
    config: PPOConfig, engines: RLHFEngine, tokenizer: PreTrainedTokenizerBase, batch_tokens: int
) -> ModelReward | None:
    """The reward model as a reward source, or None if there is none."""
    if engines.reward is None:
        return None
    flag, name = config.models["reward"]
    folder = model_folder(name, flag)
    own = reward_tokenizer(config, folder, tokenizer)
    if own is not None:
        logger().info("the reward model has its own tokenizer: answers are tokenised again for it")
    standardise = config.algorithm.normalize_rewards == "model"
    return model_reward(
        engines.reward,
        folder,
        tokenizer,
        own,
        config.rewards.process_reward,
        batch_tokens,
        standardise,
    )


def evaluation_of(
    config: PPOConfig,
    ppo: PPOComponents,
    rows: Dataset,
    data_sources: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    kept: KeptModels,
) -> Evaluation:
    """Evaluation over the held-out prompts, whose column `source` numbers the `data_sources`."""
    flags, collection = config.validation, ppo.collection
    rows = rows.select(range(min(flags.eval_max_prompts or len(rows), len(rows))))
    mixture = collection.requests.mixture
    if flags.eval_reward_function:
        mixture = RewardMixture([(evaluation_reward(config), 1.0)], config.rewards.default_score)
    scorer = None
    if collection.passes.reference is not None:
        old_logprobs: OldLogprobs = "recompute" if config.recompute_old_logprobs else "rollout"
        scorer = replace(collection.passes, critic=None, teachers=None, old_logprobs=old_logprobs)

    requests = RewardRequests(mixture, rows, tokenizer, collection.sampler.episodes)
    return Evaluation(
        flags, collection.sampler, requests, scorer, kept.output, kept.save_best, data_sources
    )
