"""Step 3 from its flags to its outputs: models and engines, rewards, training, saving."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from dschat_ppo.common import dist
from dschat_ppo.common.logging import logger
from dschat_ppo.common.paths import PPO_ROLES, SAMPLES
from dschat_ppo.common.phases import announce
from dschat_ppo.config.on_policy import OldLogprobs
from dschat_ppo.config.ppo_config import PPOConfig
from dschat_ppo.data.templates import answer_ends
from dschat_ppo.engine.rlhf_engine import ModelFolders, RLHFEngine
from dschat_ppo.errors import counted
from dschat_ppo.models.given_embeddings import GivenSource, given_sources_of
from dschat_ppo.models.model_folders import model_folder
from dschat_ppo.models.saving import (
    SavedForm,
    parts_beside,
    require_finite_weights,
    save_model,
    saved_dtype,
    saves_whole_model,
)
from dschat_ppo.monitor.early_stop import EarlyStop
from dschat_ppo.monitor.health import HealthWatch
from dschat_ppo.monitor.step_line import PPO_COLUMNS
from dschat_ppo.monitor.writers import JsonLines, write_result
from dschat_ppo.planner.step_time import ppo_time
from dschat_ppo.ppo.begin_ppo import BegunPPO, begin_ppo, evaluation_reward, reward_tokenizer
from dschat_ppo.ppo.components import PPOComponents, PPOData
from dschat_ppo.ppo.evaluation import HIGHEST_SCORE, Evaluation, shown_metrics
from dschat_ppo.ppo.loop import run
from dschat_ppo.ppo.measure_ppo import measure_ppo
from dschat_ppo.ppo.resumable import ResumablePPO
from dschat_ppo.ppo.rollouts import reward_sources_of, start_extensions
from dschat_ppo.ppo.samples import SAMPLES_PER_STEP, Samples
from dschat_ppo.ppo.score import RewardRequests
from dschat_ppo.ppo.step_report import PPOReport
from dschat_ppo.rewards.build_rewards import build_sources, sources_with_models
from dschat_ppo.rewards.learned_reward import ModelReward, model_reward, saved_entries
from dschat_ppo.rewards.reward_source import RewardMixture, RewardSource
from dschat_ppo.run.model_card import model_card
from dschat_ppo.run.output_folder import KeptModels, remove_checkpoints
from dschat_ppo.run.run_models import further_readers
from dschat_ppo.run.session import Session, end_measured_run
from dschat_ppo.run.start_and_end import (
    changes_of,
    show_end,
    show_models,
    tool_command,
    write_validation,
)


def train_ppo(config: PPOConfig) -> dict[str, Any]:
    """Run step 3; returns the contents of `result.json`."""
    begun = begin_ppo(config)
    output = begun.output
    tokenizer = begun.data.tokenizer

    announce("load models")
    folders = begun.folders
    if config.validate_only:  # an evaluation alone needs no critic
        folders = replace(folders, critic=None)
    engines = RLHFEngine(
        config, begun.plan, folders, given_sources(config, folders, begun.data.tokenizer)
    )
    forms = saved_forms(config, engines, tokenizer)
    with ExitStack() as at_end:
        components = build_components(config, begun, engines, at_end)
        if config.run.measure:
            announce("measure")
            greedy_too = config.algorithm.advantage_estimator == "remax"
            time_of_step = ppo_time(measure_ppo(components), begun.plan, greedy_too)
            end_measured_run(config.run, str(time_of_step))
        show_roles(config, components, begun.folders, output)
        kept_models = KeptModels(
            output,
            config.safety.save_hf_steps,
            config.validation.save_best,
            lambda folder: save_models(components, forms, tokenizer, folder),
        )
        evaluation = build_evaluation(
            config,
            components,
            begun.data,
            kept_models,
            further_sources(config, begun, engines, trains=False),
        )
        if evaluation is not None:
            at_end.enter_context(closing(evaluation))
        if begun.session is None:
            assert evaluation is not None  # --validate_only needs --eval_data_path
            announce("evaluate")
            engines.eval()
            metrics = evaluation.run(0)
            logger().info(f"evaluation: {shown_metrics(metrics)}")
            return write_validation(output, metrics, time.perf_counter() - begun.started)

        announce("train")
        report = train_policy(config, begun, begun.session, components, evaluation, kept_models)
        result = report.result()

    announce("save models")
    save_models(components, forms, tokenizer, output)
    result["world_size"] = dist.world_size()
    result["seconds"] = round(time.perf_counter() - begun.started, 2)
    write_result(output, result)
    if dist.is_main() and not config.safety.keep_final_checkpoint:
        remove_checkpoints(output)
    show_result(result, output, begun.folders.actor, begun.session.checkpoint is not None)
    return result


def given_sources(
    config: PPOConfig, folders: ModelFolders, tokenizer: PreTrainedTokenizerBase
) -> Mapping[str, GivenSource]:
    """`given_sources_of` of the models in these folders."""
    folders_of_roles = {"actor": folders.actor}
    if config.has_reference:
        folders_of_roles["reference"] = folders.reference or folders.actor
    if folders.critic is not None:
        folders_of_roles["critic"] = folders.critic
    if folders.reward is not None:
        folders_of_roles["reward"] = folders.reward
    for reader in further_readers(config, folders.further):
        folders_of_roles[reader.role] = reader.folder
    return given_sources_of(config, folders_of_roles, config.run.dtype, tokenizer, dist.device())


def build_components(
    config: PPOConfig, begun: BegunPPO, engines: RLHFEngine, at_end: ExitStack
) -> PPOComponents:
    """The components of step 3 over the models in `engines` and the data in `begun`, with rewards
    and extensions of features that this starts, and that `at_end` closes. Collective."""
    tokenizer = begun.data.tokenizer
    learned = learned_reward(config, engines, tokenizer, begun.plan.micro_batch_tokens)
    resumable_output = None
    if begun.session is not None:  # an evaluation alone is not resumed
        resumable_output = begun.output
    extensions = start_extensions(
        config, tokenizer, config.ppo.max_prompt_seq_len, resumable_output, at_end
    )
    rewards = build_sources(
        config.rewards,
        learned,
        [*reward_sources_of(extensions), *further_sources(config, begun, engines, trains=True)],
    )
    at_end.enter_context(closing(rewards))
    return PPOComponents(config, begun.plan, begun.data, engines, rewards, extensions)


def further_sources(
    config: PPOConfig, begun: BegunPPO, engines: RLHFEngine, trains: bool
) -> list[tuple[RewardSource, float]]:
    """`sources_with_models` of this run."""
    resumable_output = None
    if begun.session is not None:  # an evaluation alone is not resumed
        resumable_output = begun.output
    return sources_with_models(
        config,
        engines.frozen,
        begun.folders.further,
        begun.plan.micro_batch_tokens,
        config.run.seed,
        trains,
        resumable_output,
    )


def train_policy(
    config: PPOConfig,
    begun: BegunPPO,
    session: Session,
    components: PPOComponents,
    evaluation: Evaluation | None,
    kept_models: KeptModels,
) -> PPOReport:
    """Run the PPO steps that are left, with metrics, samples and checkpoints; returns what reports
    them. Collective.

    Args:
        config: the flags.
        begun: the run before its models were loaded.
        session: restores the components from the run's checkpoint, if it has one.
        components: what trains.
        evaluation: scores held-out prompts, before training too; None: there are none.
        kept_models: saves models during training.
    """
    health = HealthWatch(config.health)
    lines = JsonLines(begun.output / SAMPLES)
    samples = Samples(
        lines,
        config.ppo.sample_interval,
        SAMPLES_PER_STEP,
        begun.data.tokenizer,
        components.collection.requests.mixture.names,
        begun.data.rows.sources,
        components.collection.sampler.given_source,
    )
    resumable = ResumablePPO(components, evaluation, health, [lines])
    with session.training(resumable) as (writer, checkpointer):
        lines.begin()
        health.begin(begun.output)
        for record in components.token_records:
            record.begin(components.state.steps + 1)
        report = PPOReport(components, evaluation, health, writer, kept_models, samples)
        with report.bar:
            report.evaluate_before_training()
            run(components, report, checkpointer, session.trace)
    return report


def show_roles(config: PPOConfig, ppo: PPOComponents, folders: ModelFolders, output: Path) -> None:
    """Log the models, the generation engine and the output folder."""
    engines = ppo.engines
    reference = folders.reference or folders.actor
    roles = {
        "actor": (engines.actor, folders.actor),
        "reference": (engines.reference, reference),
        "critic": (engines.critic, folders.critic),
        "reward model": (engines.reward, folders.reward),
    }
    for role, engine in engines.further.items():
        roles[role] = (engine, folders.further[role])
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
            saves_whole_model(config, f"{role}_"),
            partial(model_card, config, role),
            saved_dtype(engine.module, config.run.save_dtype),
            parts_beside(config),
        )
        for role, engine in engines.trained.items()
    }


def save_models(
    ppo: PPOComponents,
    forms: Mapping[str, SavedForm],
    tokenizer: PreTrainedTokenizerBase,
    output: Path,
) -> None:
    """Write the actor, what follows it and the critic, where they exist, as Hugging Face folders;
    nothing if a weight is not finite (`NonFiniteError`). Collective."""
    engines = ppo.engines
    for role, engine in engines.trained.items():
        require_finite_weights(role, engine)
    save_model(engines.actor, tokenizer, output / "actor", form=forms["actor"])
    for follower in ppo.followers:
        if follower.saved is not None:
            model, gathered = follower.saved
            folder = output / model.role
            save_model(engines.actor, tokenizer, folder, weights=gathered(), form=forms["actor"])
    if engines.critic is not None:
        # A critic that started from a reward model does not keep what describes that model's
        # scores; None removes an entry.
        removed_entries = dict.fromkeys(saved_entries())
        save_model(
            engines.critic, tokenizer, output / "critic", removed_entries, form=forms["critic"]
        )


def show_result(result: dict[str, Any], output: Path, start: str, resumed: bool) -> None:
    """Log what the run has reached. `result` is that of `result.json`, `start` the actor's folder
    before training."""
    labels = {column.metric: column.label for column in PPO_COLUMNS}
    labels["eval/score"] = "held-out score"
    del labels["value/explained_variance"]  # whose last value alone says little
    folders = [output / role for role in PPO_ROLES]
    saved_folders = [folder for folder in folders if folder.is_dir()]
    chat = tool_command("chat", ["--model", str(output / "actor"), "--compare", start])
    ppo_steps = counted(result["ppo_steps"], "PPO step")
    updates = counted(result["optimizer_steps"], "update")
    show_end(
        title="PPO",
        steps=f"{ppo_steps}, {updates}",
        seconds=result["seconds"],
        changes=changes_of(result, labels),
        saved=saved_folders,
        command=chat,
        resumed=resumed,
    )


def learned_reward(
    config: PPOConfig, engines: RLHFEngine, tokenizer: PreTrainedTokenizerBase, batch_tokens: int
) -> ModelReward | None:
    """The reward model as a reward source, or None if there is none. `tokenizer` is the actor's;
    `batch_tokens`: most tokens of a forward pass of the reward model."""
    if engines.reward is None:
        return None
    flag, name = config.models["reward"]
    folder = model_folder(name, flag)
    reward_model_tokenizer = reward_tokenizer(config, folder, tokenizer)
    if reward_model_tokenizer is not None:
        logger().info("the reward model has its own tokenizer: answers are tokenised again for it")
    standardise = config.algorithm.normalize_rewards == "model"
    return model_reward(
        engines.reward,
        folder,
        tokenizer,
        reward_model_tokenizer,
        config,
        batch_tokens,
        standardise,
    )


def build_evaluation(
    config: PPOConfig,
    ppo: PPOComponents,
    data: PPOData,
    kept_models: KeptModels,
    sources: Sequence[tuple[RewardSource, float]] = (),
) -> Evaluation | None:
    """The evaluation of the actor of `ppo` on the held-out prompts of `data`, which has the best
    models saved by `kept_models`; None if there are no prompts. `sources`: of features, which
    score in place of the training reward."""
    if data.rows.eval is None:
        return None
    flags = config.validation
    collection = ppo.collection
    count = len(data.rows.eval)
    if flags.eval_max_prompts:
        count = min(flags.eval_max_prompts, count)
    prompts = data.rows.eval.select(range(count))
    mixture = collection.requests.mixture
    if flags.eval_reward_function:
        mixture = RewardMixture([(evaluation_reward(config), 1.0)], config.rewards.default_score)
    elif sources:
        mixture = RewardMixture(sources, config.rewards.default_score)
    requests = RewardRequests(mixture, prompts, data.tokenizer, collection.sampler.extensions)
    passes = None
    if collection.passes.reference is not None:
        old_logprobs: OldLogprobs = "rollout"
        if config.recompute_old_logprobs:
            old_logprobs = "recompute"
        passes = replace(collection.passes, critic=None, further=(), old_logprobs=old_logprobs)
    return Evaluation(
        flags=flags,
        sampler=collection.sampler,
        requests=requests,
        passes=passes,
        folder=kept_models.output,
        save_best=kept_models.save_best,
        data_sources=data.rows.eval_sources,
        early_stop=EarlyStop(
            config.schedule.early_stop_patience, config.schedule.early_stop_min_delta, HIGHEST_SCORE
        ),
    )
