"""An evaluation: checks, the answers of models to the same prompts, their scores, and the results
as a table, as answers in text, and as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor

from dschat_ppo.algorithms.evaluation_statistics import wilson_interval, win_shares
from dschat_ppo.common import dist
from dschat_ppo.common.logging import logger
from dschat_ppo.common.paths import shown_path
from dschat_ppo.common.seeding import row_seeds
from dschat_ppo.config.data_flags import StepData
from dschat_ppo.data.batches import collate_prompts
from dschat_ppo.data.cache import token_key
from dschat_ppo.data.examples import MESSAGES, Messages
from dschat_ppo.data.prepare import prepare
from dschat_ppo.episodes.rollouts import EpisodeRollouts, described_tools
from dschat_ppo.episodes.shown_turns import heading
from dschat_ppo.errors import UserError, escaped, in_one_line, without_credentials
from dschat_ppo.models.fast_layers import use_fast_layers
from dschat_ppo.models.loading import load_causal_lm, load_sequence_classifier, require_length
from dschat_ppo.models.tokenizers import filler_id
from dschat_ppo.models.wrapped_models import ScalarModel
from dschat_ppo.monitor.writers import finite_or_null
from dschat_ppo.planner.number_format import dtype_for_tool
from dschat_ppo.ppo.evaluation import (
    CUT,
    STREAM,
    Answered,
    answered_rows,
    summary,
    summary_by_source,
)
from dschat_ppo.ppo.generation_settings import end_ids, greedily
from dschat_ppo.ppo.score import RewardRequests
from dschat_ppo.rewards.build_rewards import build_sources, check_columns, check_sources
from dschat_ppo.rewards.learned_reward import model_reward
from dschat_ppo.rewards.reward_source import RewardMixture
from dschat_ppo.rollout.continuous_batching import never
from dschat_ppo.rollout.generator import GenerationConfig, generate
from dschat_ppo.rollout.sampling import StoppingCriteria
from dschat_ppo.rollout.self_check import choose_engine
from dschat_ppo.tools.chat_model import CheckedModel, check_models
from dschat_ppo.tools.sampling_settings import Wanted
from dschat_ppo.types import to_device

REWARD_FLAG, LIMITS = "--reward_model_name_or_path", "--max_prompt_seq_len + --max_tokens"
PREFIX = "eval/"  # of the metrics of `summary`
UNSCORED = ("length_mean", "ended_share")  # metrics that need no reward


@dataclass(frozen=True)
class Share:
    """A share of `count` prompts, with its 95 % confidence interval."""

    share: float
    low: float
    high: float
    count: int


@dataclass
class Result:
    """The answers of one model with one way of decoding, a row of the table."""

    model: str  # as the user gave it
    label: str  # its short name
    decoding: str  # "greedy" or "sampled"
    metrics: dict[str, float]  # with several data sets also "NAME/DATA SET"
    scores_by_source: dict[str, float]  # mean of each reward source
    failed_scores: int  # answers whose reward function failed, or that no source scored
    prompts: list[Answered]  # one for each prompt; the scores are NaN if nothing scores them
    wins: Share | None = (
        # against the first model with the same decoding; None for that one, and without a reward
        None
    )

    @property
    def scores(self) -> Tensor:
        """(prompts, n) fp64."""
        return torch.tensor([row.scores for row in self.prompts], dtype=torch.float64)


@dataclass(frozen=True)
class Evaluated:
    """All results, in the form of the JSON file."""

    flags: dict[str, str]
    scored: bool  # there is a reward
    results: list[Result]
    asked: list[str | Messages]  # the prompts of the first model, in the order of its answers


def evaluate(wanted: Wanted) -> Evaluated:
    """Carry out an evaluation. Everything is checked before a model is loaded. `NonFiniteError` if
    the log-probs of a model are not finite."""
    words = wanted.words
    rewards = wanted.rewards
    functions = [] if rewards is None else check_sources(rewards)
    models = check_models([("--model", name) for name in words.model], wanted.prompts)
    longest = words.max_prompt_seq_len + wanted.settings.max_tokens
    for model in models:
        require_length(model.folder, longest, LIMITS)
    name = None if rewards is None else rewards.reward_model_name_or_path
    if name:
        reward = check_models([(REWARD_FLAG, name)], wanted.prompts, True)[0]
    else:
        reward = None
    prompts, names = _prompts(wanted, models)
    check_columns(functions, "--data_path", prompts[0]["row"])
    dtype = dtype_for_tool(words.dtype, [model.folder for model in (*models, reward) if model])

    scorer: ScalarModel | None = None
    if reward is not None:
        scorer = ScalarModel(load_sequence_classifier(reward.folder, dtype, None, new_head=False))
        scorer.to(dist.device()).eval()
    results: list[Result] = []
    for model, rows in zip(models, prompts, strict=True):
        results += _results_of(model, dtype, rows, names, wanted, reward, scorer)
    firsts = {result.decoding: result for result in reversed(results)}
    for result in results if rewards is not None else []:  # paired by prompt; a tie counts half
        if result is not firsts[result.decoding]:
            pairs = zip(result.scores, firsts[result.decoding].scores, strict=True)
            scored = [(ours[~ours.isnan()], theirs[~theirs.isnan()]) for ours, theirs in pairs]
            shares = [
                float(win_shares(ours.unsqueeze(0), theirs.unsqueeze(0)))
                for ours, theirs in scored
                if len(ours) and len(theirs)
            ]
            if shares:
                share = sum(shares) / len(shares)
                result.wins = Share(share, *wilson_interval(share, len(shares)), len(shares))
    flags = {
        name: without_credentials(str(value))
        for name, value in vars(words).items()
        if value not in (None, [], "")
    }
    asked = [
        json.loads(row).get(MESSAGES, answered.prompt)
        for row, answered in zip(prompts[0]["row"], results[0].prompts, strict=True)
    ]
    return Evaluated(flags, rewards is not None, results, asked)


def _prompts(wanted: Wanted, models: list[CheckedModel]) -> tuple[list[Dataset], tuple[str, ...]]:
    """The same prompts as token rows for each model, and the names of their data sets. They are
    prepared and logged once for all models whose tokenizers are equal. `UserError` if the models
    would get different prompts."""
    names, made = tuple[str, ...](), dict[str, Dataset]()  # rows by tokenizer
    keys = [token_key("", model.tokenizer) for model in models]
    for key, model in zip(keys, models, strict=True):
        if key in made:
            continue
        if made:
            logger().info(f"{model.label}: its tokenizer differs, so the prompts are read again")
        limit = wanted.words.max_prompt_seq_len
        step = StepData("prompt", wanted.prompts, limit, whole_flag="--data_path")
        tools = described_tools(wanted.environment, model.tokenizer, limit)
        prepared = prepare(replace(step, tools=tools), model.tokenizer)
        rows = prepared.eval
        names = prepared.eval_sources
        if rows is None:
            raise UserError(
                f"--data_path: no row is within --max_prompt_seq_len {limit}; raise it, or use"
                " --truncation left"
            )
        made[key] = rows.select(range(min(wanted.words.max_prompts or len(rows), len(rows))))
    found = [made[key] for key in keys]
    if any(list(rows["row"]) != list(found[0]["row"]) for rows in found[1:]):
        raise UserError(
            "--data_path: the models would get different prompts, because only some have a chat"
            " template, or because rows that are too long or bad are dropped for some only; set"
            " --chat_template or --apply_chat_template, raise --max_prompt_seq_len, or use"
            " --truncation left"
        )
    return found, names


def _results_of(  # noqa: PLR0915
    checked: CheckedModel,
    dtype: str,
    prompts: Dataset,
    names: Sequence[str],
    wanted: Wanted,
    reward: CheckedModel | None,
    scorer: ScalarModel | None,
) -> list[Result]:
    """Load a model and answer all prompts; one entry for each way of decoding. Answers depend on
    seed and prompt alone, not on batches; step 3 evaluates with the same seeds."""
    words = wanted.words
    settings = wanted.settings
    rewards = wanted.rewards
    loaded: Any = load_causal_lm(checked.folder, dtype, None)
    model = loaded.to(dist.device()).eval()
    use_fast_layers(model)
    stopping = StoppingCriteria(settings.max_tokens, end_ids(checked.tokenizer, model))
    try:
        sampled = choose_engine(
            model,
            GenerationConfig(settings.sampling, stopping, words.samples),
            has_turns=wanted.environment.is_used,
        )
    except RuntimeError as problem:
        raise UserError(f"{checked.flag} {checked.name}: {in_one_line(problem)}") from None
    learned = None
    if reward is not None and scorer is not None and rewards is not None:
        own = (
            None
            if checked.tokenizer.get_vocab() == reward.tokenizer.get_vocab()
            else reward.tokenizer
        )
        learned = model_reward(
            scorer,
            reward.folder,
            checked.tokenizer,
            own,
            rewards.process_reward,
            words.max_batch_tokens,
        )
    configs = {"greedy": replace(greedily(sampled), samples=1), "sampled": sampled}
    results = []
    with ExitStack() as at_end:
        episodes: EpisodeRollouts | None = None
        if wanted.environment.is_used:
            episodes = EpisodeRollouts(
                wanted.environment, checked.tokenizer, words.max_prompt_seq_len
            )
            at_end.enter_context(closing(episodes))
        others = [] if episodes is None else episodes.reward_sources
        if rewards:
            mixture = build_sources(rewards, learned, others)
        else:
            mixture = RewardMixture([])
        requests = RewardRequests(
            at_end.enter_context(closing(mixture)), prompts, checked.tokenizer, episodes
        )
        for decoding in configs if words.decoding == "both" else [words.decoding]:
            config = configs[decoding]
            every = list(range(len(prompts)))
            rows = list[Answered]()
            logger().info(
                f"{checked.label}: {decoding}, {len(every)} prompts, {config.samples} answer(s) to"
                " each"
            )
            for first in range(0, len(every), words.batch_size):
                indices = every[first : first + words.batch_size]
                path = (settings.seed, STREAM, 0, 0)
                turns = None
                own_config = config
                seeds = row_seeds(first * config.samples, len(indices) * config.samples, *path)
                if episodes is None:
                    batch = collate_prompts(prompts, indices, filler_id(checked.tokenizer))
                else:
                    of_prompts = row_seeds(first, len(indices), *path).tolist()
                    batch, turns = episodes.begin(
                        prompts, indices, config.samples, of_prompts, never
                    )
                    own_config = replace(config, samples=len(seeds) // len(batch.prompt_ids))
                batch = to_device(batch, dist.device())
                seeds = seeds.to(dist.device())
                rollout = generate(model, batch, seeds, own_config, turns=turns)
                if episodes is not None and turns is not None:
                    rollout = episodes.end(rollout, turns, cancelled=False, counts=True)
                request = requests.request(rollout, indices, 0)
                scores = mixture(request, rollout)
                if rewards is None:
                    scores = replace(scores, total=torch.full_like(scores.total, torch.nan))
                rows += answered_rows(requests, indices, rollout, request.texts, scores, names)
            metrics = summary(rows, words.pass_score) | summary_by_source(rows, words.pass_score)
            metrics = {name.removeprefix(PREFIX): value for name, value in metrics.items()}
            failed_rows = requests.count_failed_rows()
            failed = failed_rows.faults + failed_rows.unscored
            means = dict[str, float]()
            if rewards is None:
                metrics = {
                    name: value for name, value in metrics.items() if name.split("/")[0] in UNSCORED
                }
            else:
                scored = {
                    name: torch.tensor([row.scores_by_source[name] for row in rows])
                    for name in mixture.names
                }
                means = {name: float(of_source.nanmean()) for name, of_source in scored.items()}
            if failed:
                logger().warning(
                    f"{checked.label}: {failed} answers were not scored (--reward_default)"
                )
            metrics |= {} if episodes is None else episodes.take_metrics()
            results.append(
                Result(checked.name, checked.label, decoding, metrics, means, failed, rows)
            )
    return results


def number(value: float | None) -> str:
    """A metric with four significant digits; "" if there is none."""
    if value is None or math.isnan(value):
        return ""
    return f"{value:.4g}"


def table(found: Evaluated) -> list[str]:
    """Head and one line for each model and way of decoding; with several data sets further lines
    for these."""
    first = found.results[0]
    lines = list[list[str]]()
    names = dict.fromkeys(name for result in found.results for name in result.metrics)
    columns = [name for name in names if "/" not in name or name.startswith("episode/")]
    if len(first.scores_by_source) > 1:
        sources = list(first.scores_by_source)
    else:
        sources = []
    means = [f"reward/{name}_mean" for name in sources]
    if any(result.wins for result in found.results):
        compared = [f"wins against {first.label} [95 %]"]
    else:
        compared = []
    lines.append(
        ["model", "decoding", *columns, *(f"score of {name}" for name in sources), *compared]
    )
    for result in found.results:
        data_sets = dict.fromkeys(row.data_source for row in result.prompts)
        for label, ending in [
            (result.label, ""),
            *((f"  {name}", f"/{name}") for name in data_sets if name),
        ]:
            cells = [number(result.metrics.get(f"{name}{ending}")) for name in [*columns, *means]]
            wins = result.wins if not ending else None
            if wins is None:
                share = ""
            else:
                share = f"{100 * wins.share:.1f} % [{100 * wins.low:.1f}, {100 * wins.high:.1f}]"
            lines.append([label, result.decoding, *cells, *(share for _ in compared)])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]


def notes(found: Evaluated) -> list[str]:
    """What the numbers depend on, a sentence on each line, and the path of each model."""
    lines = []
    if found.scored:
        lines.append(
            f"pass: a score of at least {float(found.flags['pass_score']):g} (--pass_score)"
        )
    if any(result.decoding == "sampled" for result in found.results):
        lines.append(
            f"sampled: the answers, and so the numbers, depend on --seed ({found.flags['seed']})"
        )
    paths = {result.label: shown_path(result.model) for result in found.results}
    return lines + [f"{label}: {path}" for label, path in paths.items() if label != path]


def answer_lines(found: Evaluated, count: int) -> list[str]:
    """The first `count` prompts, each with the answers of all models; what a terminal would obey is
    escaped."""

    def indented(text: str) -> list[str]:
        return [f"    {line}" for line in escaped(text).split("\n")]

    lines = []
    for place, row in enumerate(found.results[0].prompts[:count]):
        lines += [f"prompt {place + 1}:", *indented(row.prompt)]
        for result in found.results:
            own = result.prompts[place]
            every_turns = own.turns or [[]] * len(own.answers)
            columns = zip(own.answers, own.scores, own.lengths, own.ended, every_turns, strict=True)
            for text, score, tokens, ended, turns in columns:
                parts = [f"score {number(score) or 'none'}"] * found.scored
                parts += [f"{tokens} tokens", *["cut at the length limit"] * (ended == CUT)]
                lines.append(f"  {result.label}, {result.decoding} ({', '.join(parts)}):")
                for turn in turns:
                    lines += [
                        f"    {heading(turn)}:",
                        *(f"  {line}" for line in indented(turn["text"])),
                    ]
                lines += [] if turns else indented(text)
        lines.append("")
    return lines


def training_rows(found: Evaluated, is_pair: bool) -> str:
    """JSON lines for SFT: each prompt with the best answer of the first model; or for step 2: each
    prompt with its best and its worst answer, if they differ. Of sampled answers, or of greedy ones
    if there are no others."""
    own = next(
        (result for result in found.results if result.decoding == "sampled"), found.results[0]
    )
    rows = list[dict[str, Any]]()
    for asked, answered in zip(found.asked, own.prompts, strict=True):
        answers = list(zip(answered.scores, answered.answers, answered.ended, strict=True))
        if found.scored:
            answers = [answer for answer in answers if not math.isnan(answer[0])]
        if not is_pair:
            answers = [answer for answer in answers if answer[2] != CUT]
        if not answers:
            continue
        (best, chosen, end), (worst, rejected, _) = (
            pick(answers, key=lambda one: one[0]) for pick in (max, min)
        )
        if is_pair:
            rows += (
                [{"prompt": asked, "chosen": chosen, "rejected": rejected}]
                if best > worst and end != CUT
                else []
            )
            continue
        row = {"prompt": asked, "response": chosen}
        if not isinstance(asked, str):
            row = {"messages": [*asked, {"role": "assistant", "content": chosen}]}
        rows.append(row | ({"score": best} if found.scored else {}))
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def json_of(found: Evaluated) -> str:
    shown = asdict(found)
    del shown["asked"]  # `prompts` has them as text
    return json.dumps(finite_or_null(shown), indent=1)
