"""An evaluation from its flags to its results: checks, prompts, answers, comparison, pairs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset

from dschat_ppo.common.logging import logger
from dschat_ppo.common.paths import short_names
from dschat_ppo.data.cache import stream_key
from dschat_ppo.data.chat_templates import with_template_flags
from dschat_ppo.data.prepare import prepare_whole
from dschat_ppo.errors import UserError, without_credentials
from dschat_ppo.models.loading import (
    check_sequence_classifier,
    check_vocabulary,
    load_config,
    report_length,
    require_length,
)
from dschat_ppo.models.model_folders import model_folder
from dschat_ppo.models.tokenizers import load_tokenizer
from dschat_ppo.ppo.evaluation import summary, summary_by_source
from dschat_ppo.rewards.build_rewards import check_sources
from dschat_ppo.tools.chat_model import CheckedModel, check_models
from dschat_ppo.tools.evaluate_flags import PAIR_TOKENS, PROMPT_TOKENS, Wanted
from dschat_ppo.tools.evaluate_models import (
    REWARD_FLAG,
    Answers,
    Plan,
    RewardModel,
    Share,
    accuracies,
    answers_of,
    score_pairs,
    win_rate,
)
from dschat_ppo.tools.sampling_settings import SamplingSettings

LIMITS = "--max_prompt_seq_len + --max_tokens"
PREFIX = "eval/"  # of the metrics of `summary`
UNSCORED = ("length_mean", "ended_share")  # metrics that need no reward


@dataclass(frozen=True)
class Result:
    """One row of the table.

    Attributes:
        answers: of a model with one way of decoding.
        metrics: name -> value; with several data sets also "NAME/DATA SET".
        by_source: mean score of each reward source.
        wins: against the first model with the same decoding; None for that one, and without a reward.
    """

    answers: Answers
    metrics: dict[str, float]
    by_source: dict[str, float]
    wins: Share | None


@dataclass(frozen=True)
class Evaluated:
    """All results.

    Attributes:
        flags: name -> value, as text.
        scored: whether there is a reward.
        results: of the prompts; empty without models.
        accuracies: of the reward model, see `accuracies`; empty without pairs.
        pairs: of each pair the data set and both scores.
    """

    flags: dict[str, str]
    scored: bool
    results: list[Result]
    accuracies: dict[str, Share]
    pairs: list[tuple[str, float, float]]


def evaluate(wanted: Wanted) -> Evaluated:
    """Carry out an evaluation. Everything is checked before a model is loaded.

    Raises:
        UserError: flags, models or data cannot be used.
        NonFiniteError: the log-probs of a model are not finite.
    """
    words, rewards = wanted.words, wanted.rewards
    if rewards is not None:
        check_sources(rewards)
    models = check_models([("--model", name) for name in words.model], wanted.prompts) if wanted.prompts else []
    longest = words.max_prompt_seq_len + wanted.settings.max_tokens
    for model in models:
        require_length(model.folder, longest, LIMITS)
    reward = _checked_reward(wanted)
    prompts, names = _prompts(wanted, models)
    pairs: Dataset | None = None
    pair_names: tuple[str, ...] = ()
    if wanted.pairs and reward:
        require_length(reward.folder, words.max_seq_len, "--max_seq_len")
        pairs, pair_names = prepare_whole("preference", reward.tokenizer, wanted.pairs, words.max_seq_len, "--pairs")
        report_length([reward.folder], words.max_seq_len, "--max_seq_len", words.max_seq_len == PAIR_TOKENS)
    is_default = longest == PROMPT_TOKENS + SamplingSettings.max_tokens
    report_length([model.folder for model in models], longest, LIMITS, is_default)

    reward_model = None
    if reward is not None and rewards is not None:
        reward_model = RewardModel.load(reward.folder, reward.tokenizer, words.dtype, rewards, words.max_batch_tokens)
    decodings = ("greedy", "sampled") if words.decoding == "both" else (words.decoding,)
    plan = Plan(decodings, words.samples, words.batch_size, wanted.settings, words.dtype)
    answers = [
        found
        for model, rows in zip(models, prompts, strict=True)
        for found in answers_of(model, rows, names, plan, rewards, reward_model)
    ]
    measured: dict[str, Share] = {}
    scored_pairs: list[tuple[str, float, float]] = []
    if pairs is not None and reward_model is not None:
        scores = score_pairs(reward_model, pairs)
        measured = accuracies(scores, pairs["source"], pair_names)
        sides = zip(pairs["source"], scores.tolist(), strict=True)
        scored_pairs = [(pair_names[number], chosen, rejected) for number, (chosen, rejected) in sides]
    flags = {
        name: without_credentials(str(value)) for name, value in vars(words).items() if value not in (None, [], "")
    }
    results = [_result(found, answers, rewards is not None, words.pass_score) for found in answers]
    return Evaluated(flags, rewards is not None, results, measured, scored_pairs)


def _checked_reward(wanted: Wanted) -> CheckedModel | None:
    """The reward model before it is loaded."""
    if wanted.rewards is None or wanted.rewards.reward_model_name_or_path is None:
        return None
    name = wanted.rewards.reward_model_name_or_path
    folder = model_folder(name, REWARD_FLAG)
    tokenizer = load_tokenizer(folder, REWARD_FLAG)
    data = wanted.pairs or wanted.prompts
    if data is not None:
        tokenizer = with_template_flags(tokenizer, data)
    check_vocabulary(tokenizer, load_config(folder, REWARD_FLAG), REWARD_FLAG, folder)
    check_sequence_classifier(folder, new_head=False)
    return CheckedModel(name, short_names([Path(name)])[0], REWARD_FLAG, folder, tokenizer)


def _prompts(wanted: Wanted, models: list[CheckedModel]) -> tuple[list[Dataset], tuple[str, ...]]:
    """The same prompts as token rows for each model, and the names of their data sets.

    They are prepared, and the log shows them, once for all models whose tokenizers are equal.

    Raises:
        UserError: the models would get different prompts.
    """
    found: list[Dataset] = []
    names: tuple[str, ...] = ()
    made: dict[str, Dataset] = {}  # by tokenizer
    for model in models:
        assert wanted.prompts is not None
        key, limit = stream_key("", model.tokenizer), wanted.words.max_prompt_seq_len
        if key not in made:
            if made:
                logger().info(f"{model.label}: its tokenizer differs, so the prompts are read again")
            rows, names = prepare_whole("prompt", model.tokenizer, wanted.prompts, limit, "--data_path")
            made[key] = rows.select(range(min(wanted.words.max_prompts or len(rows), len(rows))))
        found.append(made[key])
    if any(_questions(rows) != _questions(found[0]) for rows in found[1:]):
        raise UserError(
            "--data_path: the models would get different prompts, because only some have a chat template, "
            "or because rows that are too long or bad are dropped for some only; set --chat_template or "
            "--apply_chat_template, raise --max_prompt_seq_len, or use --truncation left"
        )
    return found, names


def _questions(rows: Dataset) -> list[Any]:
    return list(rows["row"])


def _result(found: Answers, answers: list[Answers], scored: bool, pass_score: float) -> Result:
    """The metrics of some answers, compared with the first of the same decoding."""
    metrics = summary(found.rows, pass_score) | summary_by_source(found.rows, pass_score)
    metrics = {name.removeprefix(PREFIX): value for name, value in metrics.items()}
    if not scored:
        kept = {name: value for name, value in metrics.items() if name.split("/")[0] in UNSCORED}
        return Result(found, kept, {}, None)
    first = next(other for other in answers if other.decoding == found.decoding)
    if found.failed:
        logger().warning(f"{found.label}: {found.failed} answers have the default score (--reward_default)")
    means = found.by_source.nanmean(dim=0).tolist()
    return Result(
        found, metrics, dict(zip(found.sources, means, strict=True)), None if first is found else win_rate(found, first)
    )  # fmt: skip
