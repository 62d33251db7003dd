"""An evaluation: checks, the responses of models to the same prompts, and their scores."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any

import torch
from datasets import Dataset

from dschat_ppo.algorithms.evaluation_statistics import wilson_interval, win_shares
from dschat_ppo.common import dist
from dschat_ppo.common.logging import logger
from dschat_ppo.config.data_flags import PromptColumn, StepData
from dschat_ppo.config.feature_needs import FurtherModel
from dschat_ppo.data.cache import token_key
from dschat_ppo.data.examples import Messages
from dschat_ppo.data.prepare import prepare
from dschat_ppo.data.prompt_contents import prompt_content, written_prompt
from dschat_ppo.errors import UserError, without_credentials
from dschat_ppo.features import hooks
from dschat_ppo.models.fast_layers import use_fast_layers
from dschat_ppo.models.loading import load_causal_lm, load_sequence_classifier, require_length
from dschat_ppo.models.wrapped_models import PolicyModel, ScalarModel
from dschat_ppo.planner.number_format import dtype_for_tool
from dschat_ppo.ppo.evaluation import (
    STREAM,
    EvaluatedPrompt,
    evaluated_prompts,
    summary,
    summary_by_data_set,
)
from dschat_ppo.ppo.rollouts import (
    RolloutTask,
    any_observes,
    described_tools,
    reward_sources_of,
    start_extensions,
)
from dschat_ppo.ppo.score import RewardRequests
from dschat_ppo.rewards.build_rewards import (
    CheckedFunction,
    check_columns,
    check_routes,
    check_sources,
    checked_services,
    further_models,
    further_routes,
    sources_with_models,
)
from dschat_ppo.rewards.reward_source import RewardSource
from dschat_ppo.rollout.generation_request import GenerationConfig
from dschat_ppo.run.run_models import PromptReader, check_prompt_readers, data_read_by_model
from dschat_ppo.tools.chat_model import CheckedModel, changes_of_tool, checked_models
from dschat_ppo.tools.evaluated_model import (
    LoadedReward,
    generation_configs,
    given_source,
    reward_mixture,
    rollouts_of,
)
from dschat_ppo.tools.evaluation_results import Evaluated, Result, Share
from dschat_ppo.tools.sampling_settings import EvaluationRequest

REWARD_FLAG = "--reward_model_name_or_path"
LIMITS = "--max_prompt_seq_len + --max_tokens"
PREFIX = "eval/"  # of the metrics of `summary`
UNSCORED = ("length_mean", "ended_share")  # metrics that need no reward


def evaluate_models(request: EvaluationRequest) -> Evaluated:
    """Carry out an evaluation. Everything is checked before a model is loaded. `NonFiniteError` if
    the log-probs of a model are not finite."""
    args = request.args
    for begin in hooks("evaluations.begin"):  # of features, before anything is computed
        begin(request.features)
    rewards = request.rewards
    functions: list[CheckedFunction] = []
    if rewards is not None:
        functions = check_sources(rewards)
        checked_services(request.features)  # fails here if one cannot be asked
    features = request.features
    models = checked_models(
        [("--model", name) for name in args.model], request.prompts, features=features
    )
    longest = args.max_prompt_seq_len + request.settings.max_tokens
    for model in models:
        require_length(model.folder, longest, LIMITS)
    reward_model: CheckedModel | None = None
    if rewards is not None and rewards.reward_model_name_or_path:
        name = rewards.reward_model_name_or_path
        [reward_model] = checked_models(
            [(REWARD_FLAG, name)], request.prompts, is_scorer=True, features=features
        )
    further = further_models(request.features)
    checked_further: list[CheckedModel] = []
    if further:
        checked_further = checked_models([(model.flag, model.name) for model in further], None)
    prompts, data_sets = _prompts(request, models)
    further_arguments = prompt_content(prompts[0][0]).arguments
    check_columns(functions, "--data_path", prompts[0]["row"], further_arguments)
    for check_rows in hooks("checks.check_rows"):
        check_rows(request.features, prompts[0]["row"])
    _check_prompt_routes(request, further, data_sets, prompts[0]["row"])
    folders = [model.folder for model in models]
    if reward_model is not None:
        folders.append(reward_model.folder)
    further_folders = {
        model.role: checked.folder for model, checked in zip(further, checked_further, strict=True)
    }
    folders += further_folders.values()
    dtype = dtype_for_tool(args.dtype, folders)

    scorer = None
    if reward_model is not None:
        _check_scorer(request, reward_model, models, prompts)
        classifier = load_sequence_classifier(
            reward_model.folder, dtype, None, False, changes_of_tool(features)
        )
        scorer = LoadedReward(reward_model, ScalarModel(classifier).to(dist.device()).eval())
    further_sources = _sources_of_features(request, further_folders, dtype)
    results: list[Result] = []
    for model, rows in zip(models, prompts, strict=True):
        results += _results_of(model, dtype, rows, data_sets, request, scorer, further_sources)
    if rewards is not None:
        _count_wins(results)
    asked = list[str | Messages]()
    for record, answered in zip(prompts[0], results[0].prompts, strict=True):
        asked.append(written_prompt(record, answered.prompt))
    return Evaluated(
        _flags_with_values(args), rewards is not None, results, asked, list(prompts[0]["row"])
    )


def _check_scorer(
    request: EvaluationRequest,
    scorer: CheckedModel,
    models: Sequence[CheckedModel],
    prompts: Sequence[Dataset],
) -> None:
    """Check that the reward model can read the prompts of each model."""
    sources: Sequence[str] = ()
    if request.rewards is not None:
        sources = request.rewards.reward_model_sources
    reader = PromptReader("reward", scorer.flag, scorer.folder, sources)
    for model, rows in zip(models, prompts, strict=True):
        check_prompt_readers(request.features, model.folder, [reader], [rows], model.tokenizer)


def _flags_with_values(args: argparse.Namespace) -> dict[str, str]:
    """The flags that have a value, as texts without credentials."""
    given_flags = {}
    for name, value in vars(args).items():
        if value not in (None, [], ""):
            given_flags[name] = without_credentials(str(value))
    return given_flags


def _sources_of_features(
    request: EvaluationRequest, folders: Mapping[str, str], dtype: str
) -> list[tuple[RewardSource, float]]:
    """Load the models of features, and make their reward sources. `folders`: role of a model -> its
    folder."""
    policies: dict[str, PolicyModel] = {}
    for role, folder in folders.items():
        policy = PolicyModel(load_causal_lm(folder, dtype, None))
        policies[role] = policy.to(dist.device()).eval()
    return sources_with_models(
        request.features,
        policies.__getitem__,
        folders,
        request.args.max_batch_tokens,
        request.settings.seed,
    )


def _check_prompt_routes(
    request: EvaluationRequest,
    further: Sequence[FurtherModel],
    data_sets: Sequence[str],
    rows: Sequence[str],
) -> None:
    """Check that the routes of the reward sources lead to prompts. `further`: models of features;
    `data_sets`: their names; `rows`: data rows as JSON."""
    if request.rewards is not None:
        are_all_rows = request.args.max_prompts == 0
        routes = further_routes(request.features, further)
        check_routes(request.rewards, data_sets, rows, are_all_rows, routes)


def _count_wins(results: Sequence[Result]) -> None:
    """Set the wins of each result against the first one with the same decoding. The scores are
    paired by prompt, and a tie counts half."""
    baselines: dict[str, Result] = {}
    for result in results:
        baseline = baselines.setdefault(result.decoding, result)
        if baseline is result:
            continue
        shares = []
        for scores, baseline_scores in zip(result.scores, baseline.scores, strict=True):
            finite = scores[~scores.isnan()]
            baseline_finite = baseline_scores[~baseline_scores.isnan()]
            if len(finite) and len(baseline_finite):
                wins = win_shares(finite.unsqueeze(0), baseline_finite.unsqueeze(0))
                shares.append(float(wins))
        if shares:
            share = sum(shares) / len(shares)
            result.wins = Share(share, *wilson_interval(share, len(shares)), len(shares))


def _prompts(
    request: EvaluationRequest, models: list[CheckedModel]
) -> tuple[list[Dataset], tuple[str, ...]]:
    """The same prompts as token rows for each model, and the names of their data sets. They are
    prepared and logged once for all models that read them alike. `UserError` if the models would
    get different prompts."""
    names: tuple[str, ...] = ()
    rows_by_tokenizer: dict[str, Dataset] = {}
    rows_of_models = []
    for model in models:
        step = _step_data(request, model)
        of_content = ""
        if step.content is not None:
            of_content = step.content.identity
        key = token_key(of_content, model.tokenizer)
        if key not in rows_by_tokenizer:
            if rows_by_tokenizer:
                logger().info(
                    f"{model.label}: its tokenizer or processor differs, so the prompts are read"
                    " again"
                )
            rows_by_tokenizer[key], names = _prepared_prompts(request, step, model)
        rows_of_models.append(rows_by_tokenizer[key])
    data_rows = list(rows_of_models[0]["row"])
    if any(list(rows["row"]) != data_rows for rows in rows_of_models[1:]):
        raise UserError(
            "--data_path: the models would get different prompts, because only some have a chat"
            " template, or because rows that are too long or bad are dropped for some only; set"
            " --chat_template or --apply_chat_template, raise --max_prompt_seq_len, or use"
            " --truncation left"
        )
    return rows_of_models, names


def _step_data(request: EvaluationRequest, model: CheckedModel) -> StepData:
    """What a model reads of the prompts."""
    limit = request.args.max_prompt_seq_len
    columns: list[PromptColumn] = []
    for columns_of_evaluation in hooks("step_data.columns_of_evaluation"):
        columns += columns_of_evaluation(request.features)
    step = StepData(
        "prompt",
        request.prompts,
        limit,
        tools=described_tools(request.features, model.tokenizer, limit),
        eval_prompt_columns=columns,
        whole_flag="--data_path",
    )
    return data_read_by_model(request.features, step, model.folder, model.tokenizer)


def _prepared_prompts(
    request: EvaluationRequest, step: StepData, model: CheckedModel
) -> tuple[Dataset, tuple[str, ...]]:
    """The prompts as token rows of a model, and the names of their data sets."""
    prepared = prepare(step, model.tokenizer)
    rows = prepared.eval
    if rows is None:
        raise UserError(
            f"--data_path: no row is within --max_prompt_seq_len {step.limit}; raise it, or use"
            " --truncation left"
        )
    count = min(request.args.max_prompts or len(rows), len(rows))
    return rows.select(range(count)), prepared.eval_sources


def _results_of(
    checked: CheckedModel,
    dtype: str,
    prompts: Dataset,
    data_sets: Sequence[str],
    request: EvaluationRequest,
    scorer: LoadedReward | None,
    further_sources: Sequence[tuple[RewardSource, float]],
) -> list[Result]:
    """Load a model and answer all prompts; one entry for each way of decoding. Responses depend on
    seed and prompt alone, not on batches; step 3 evaluates with the same seeds."""
    args = request.args
    source = given_source(request, checked, dtype, scorer)
    loaded: Any = load_causal_lm(checked.folder, dtype, None, changes_of_tool(request.features))
    model = loaded.to(dist.device()).eval()
    use_fast_layers(model)
    results = []
    with ExitStack() as at_end:
        extensions = start_extensions(
            request.features, checked.tokenizer, args.max_prompt_seq_len, None, at_end
        )
        configs = generation_configs(model, checked, request, extensions, source)
        for check_model in hooks("evaluations.check_model"):  # of features
            check_model(
                request.features,
                PolicyModel(model).eval(),
                next(iter(configs.values())),
                any_observes(extensions),
            )
        mixture = reward_mixture(
            request, checked, scorer, [*reward_sources_of(extensions), *further_sources]
        )
        at_end.enter_context(closing(mixture))
        reward_requests = RewardRequests(mixture, prompts, checked.tokenizer, extensions)
        sample = rollouts_of(model, checked, extensions, source)
        for decoding, config in configs.items():
            logger().info(
                f"{checked.label}: {decoding}, {len(prompts)} prompts, {config.samples} answer(s)"
                " to each"
            )
            rows = list[EvaluatedPrompt]()
            for first in range(0, len(prompts), args.batch_size):
                indices = list(range(first, min(first + args.batch_size, len(prompts))))
                rollout = sample(_task(prompts, indices, config, request.settings.seed))
                batch_request = reward_requests.request(rollout, indices, steps_done=0)
                scores = mixture(batch_request, rollout)
                if request.rewards is None:
                    scores = replace(scores, total=torch.full_like(scores.total, torch.nan))
                rows += evaluated_prompts(
                    reward_requests, indices, rollout, batch_request.texts, scores, data_sets
                )
            results.append(_result(checked, decoding, rows, request, reward_requests))
    return results


def _task(prompts: Dataset, indices: list[int], config: GenerationConfig, seed: int) -> RolloutTask:
    """Responses to prompts of neighbouring `indices`, by the seeds that step 3 evaluates with."""
    first = indices[0] * config.samples
    return RolloutTask(prompts, indices, config, seed, path=(STREAM, 0, 0), first=first, step=0)


def _result(
    checked: CheckedModel,
    decoding: str,
    rows: list[EvaluatedPrompt],
    request: EvaluationRequest,
    reward_requests: RewardRequests,
) -> Result:
    """The row of the table for a model and a way of decoding; takes the counts of failed scores and
    the metrics of the features since the last one."""
    failed_rows = reward_requests.count_failed_rows()
    failed_scores = failed_rows.faults + failed_rows.unscored
    if failed_scores:
        logger().warning(
            f"{checked.label}: {failed_scores} answers were not scored (--reward_default)"
        )
    is_scored = request.rewards is not None
    metrics = _metrics(rows, request.args.pass_score, is_scored)
    for extension in reward_requests.extensions:
        metrics |= extension.take_metrics()
    metrics |= reward_requests.mixture.take_metrics()
    means: dict[str, float] = {}  # of each reward source
    if is_scored:
        for name in reward_requests.mixture.names:
            source_scores = torch.tensor([row.scores_by_source[name] for row in rows])
            means[name] = float(source_scores.nanmean())
    return Result(checked.name, checked.label, decoding, metrics, means, failed_scores, rows)


def _metrics(rows: list[EvaluatedPrompt], pass_score: float, is_scored: bool) -> dict[str, float]:
    """Metrics of all rows and of each data set, without the prefix that they have in step 3."""
    metrics = {}
    all_metrics = summary(rows, pass_score) | summary_by_data_set(rows, pass_score)
    for prefixed, value in all_metrics.items():
        name = prefixed.removeprefix(PREFIX)
        if is_scored or name.split("/")[0] in UNSCORED:
            metrics[name] = value
    return metrics
