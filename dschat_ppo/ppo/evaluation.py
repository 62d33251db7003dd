"""Evaluation in step 3: responses to held-out prompts, their scores, and the best models so far."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor

from dschat_ppo.algorithms.evaluation_statistics import pass_at_k
from dschat_ppo.algorithms.kl import kl_k1
from dschat_ppo.common import dist
from dschat_ppo.common.atomic_files import make_folder, write_file
from dschat_ppo.config.ppo_flags import EvaluationFlags
from dschat_ppo.config.supervised_flags import BestMetric
from dschat_ppo.data.batches import PADDING_ROW, optimizer_steps
from dschat_ppo.data.prompt_contents import prompt_content
from dschat_ppo.errors import StorageError
from dschat_ppo.monitor.early_stop import EarlyStop
from dschat_ppo.monitor.writers import finite_or_null
from dschat_ppo.ppo.generation_settings import greedily
from dschat_ppo.ppo.response_texts import shown_sections
from dschat_ppo.ppo.rollout_sampler import RolloutSampler
from dschat_ppo.ppo.score import ForwardPasses, RewardRequests
from dschat_ppo.rewards.call_forms import ResponseText
from dschat_ppo.rewards.reward_source import Scores
from dschat_ppo.rewards.rules import last_boxed
from dschat_ppo.run.output_folder import BEST, best_is_lost
from dschat_ppo.types import FinishReason, Rollout

CUT = FinishReason.LENGTH.name.lower()
HIGHEST_SCORE = BestMetric("eval/score", higher=True)
STREAM = 5  # separates the seeds of the evaluation's responses from those of training


@dataclass(frozen=True)
class EvaluatedPrompt:
    """One held-out prompt with its n answers; a line of the file of an evaluation."""

    index: int  # row number of the prompt
    prompt: str  # without special tokens
    answers: list[str]
    scores: list[float]
    lengths: list[int]  # in tokens
    # "eos", "stop" (a stop token or stop string) or "length" (the limit cut the answer)
    ended: list[str]
    kl: list[float] | None  # sum over the tokens of each answer; None without a reference
    # NaN where the source does not score
    scores_by_source: dict[str, list[float]] = field(default_factory=dict)
    # "SOURCE/NAME" -> other numbers that reward functions returned; NaN where an answer has none
    numbers: dict[str, list[float]] = field(default_factory=dict)
    data_source: str | None = None  # name of the prompt's data set; None if there is only one
    # `shown_sections` of the answers; [] if none has any
    turns: list[list[dict[str, Any]]] = field(default_factory=list)
    # the last message of each answer without thoughts and calls; [] if these are the answers
    finals: list[str] = field(default_factory=list)
    # what the prompt holds besides text (`PromptContent.record`)
    content: dict[str, Any] = field(default_factory=dict)


def final_answer(text: str) -> str:
    """The part of an answer that a majority vote compares: the last boxed expression, else the text
    after `####`, else the last line."""
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed.strip()
    lines = text.rsplit("####", 1)[-1].strip().splitlines()
    if not lines:
        return ""
    return lines[-1].strip()


def majority_passes(row: EvaluatedPrompt, pass_score: float) -> bool | None:
    """Whether the most frequent final answer among those with a score passes; of equally frequent
    ones the first counts. None if no answer has a score."""
    votes = Counter[str]()
    first_scores: dict[str, float] = {}  # final answer -> score of the first one
    for text, score in zip(row.finals or row.answers, row.scores, strict=True):
        if not math.isnan(score):
            final = final_answer(text)
            votes[final] += 1
            first_scores.setdefault(final, score)
    if not votes:
        return None
    [(most_frequent, _)] = votes.most_common(1)
    return first_scores[most_frequent] >= pass_score


def summary(rows: list[EvaluatedPrompt], pass_score: float) -> dict[str, float]:
    """Metrics over all prompts (at least one), each with n answers; `pass@k` for powers of two up
    to n answers, `majority@n` where n is above 1. An answer passes with a score of `pass_score` or
    more. Answers without a score count in lengths and in `unscored_share` alone: a prompt with
    fewer than k scored answers is not in `pass@k`.

    With several reward sources also `reward/NAME_mean`, the mean score of a source over the answers
    that it scores, and `reward/NAME_share`, their share, if it is below 1.
    """
    scores = torch.tensor([row.scores for row in rows], dtype=torch.float64)  # (prompts, n)
    lengths = torch.tensor([row.lengths for row in rows], dtype=torch.float64)
    unscored = scores.isnan()  # (prompts, n)
    ended = sum(reason != CUT for row in rows for reason in row.ended)
    metrics = {
        "eval/score": float(scores[~unscored].mean()),
        "eval/unscored_share": float(unscored.double().mean()),
        "eval/length_mean": float(lengths.mean()),
        "eval/ended_share": ended / scores.numel(),
    }
    metrics |= _pass_shares(rows, scores, pass_score)
    if rows[0].kl is not None:
        total = sum(value for row in rows for value in row.kl or [])
        metrics["eval/kl_ref_k1"] = total / max(1.0, float(lengths.sum()))
    sources = list(rows[0].scores_by_source)
    if len(sources) > 1:
        for name in sources:
            known = _without_nan(score for row in rows for score in row.scores_by_source[name])
            if known:
                metrics[f"eval/reward/{name}_mean"] = math.fsum(known) / len(known)
            if len(known) < scores.numel():
                metrics[f"eval/reward/{name}_share"] = len(known) / scores.numel()
    for name in sorted({name for row in rows for name in row.numbers}):
        known = _without_nan(value for row in rows for value in row.numbers.get(name, []))
        if known:
            metrics[f"eval/{name}"] = math.fsum(known) / len(known)
    return metrics


def _pass_shares(
    rows: list[EvaluatedPrompt], scores: Tensor, pass_score: float
) -> dict[str, float]:
    """`pass@k` and `majority@n`, as in `summary`; `scores` (prompts, n) are those of `rows`."""
    samples = scores.shape[1]
    passed = []  # for each prompt (scored answers,) bool
    for prompt_scores in scores:
        passed.append(prompt_scores[~prompt_scores.isnan()] >= pass_score)
    metrics = {}
    for power in range(samples.bit_length()):
        k = 2**power
        shares = [pass_at_k(scored.unsqueeze(0), k) for scored in passed if len(scored) >= k]
        if shares:
            metrics[f"eval/pass@{k}"] = float(torch.cat(shares).mean())
    if samples > 1:
        votes = [majority_passes(row, pass_score) for row in rows]
        counted = [vote for vote in votes if vote is not None]
        if counted:
            metrics[f"eval/majority@{samples}"] = sum(counted) / len(counted)
    return metrics


def _without_nan(values: Iterable[float]) -> list[float]:
    return [value for value in values if not math.isnan(value)]


def summary_by_data_set(rows: list[EvaluatedPrompt], pass_score: float) -> dict[str, float]:
    """`summary` of each data set, with `/NAME` after each name; {} if there is only one data
    set."""
    metrics = {}
    for name in sorted({row.data_source for row in rows if row.data_source is not None}):
        rows_of_set = [row for row in rows if row.data_source == name]
        for metric, value in summary(rows_of_set, pass_score).items():
            metrics[f"{metric}/{name}"] = value
    return metrics


def evaluated_prompts(
    requests: RewardRequests,
    indices: Sequence[int],
    rollout: Rollout,
    responses: Sequence[ResponseText],
    scores: Scores,
    data_sources: Sequence[str],
    kl: list[float] | None = None,
) -> list[EvaluatedPrompt]:
    """One record for each of the prompts at `indices`.

    Args:
        requests: holds the prompts, whose column `source` numbers the `data_sources`.
        indices: row numbers of the prompts.
        rollout: the n responses to a prompt one after another.
        responses: the text of each response.
        scores: of each response.
        data_sources: names of the data sets.
        kl: of each response, see `EvaluatedPrompt`.
    """
    samples = len(rollout.response_ids) // len(indices)
    prompts = requests.readable_prompts(rollout, indices)
    answers = [response.spoken for response in responses]
    finals = [response.final for response in responses]
    names: list[str | None] = [None] * len(indices)
    if len(data_sources) > 1:
        names = [data_sources[source] for source in requests.prompts[indices]["source"]]
    lengths = rollout.response_mask.sum(dim=1).tolist()
    totals = scores.total.tolist()
    ended = [FinishReason(reason).name.lower() for reason in rollout.finish_reason.tolist()]
    by_source = dict(zip(requests.mixture.names, scores.by_source.T.tolist(), strict=True))
    sections = shown_sections(requests.tokenizer, rollout)
    evaluated = []
    for position, index in enumerate(indices):
        of_prompt = slice(position * samples, (position + 1) * samples)  # its rows of the rollout
        has_sections = any(sections[of_prompt])
        has_finals = finals[of_prompt] != answers[of_prompt]
        evaluated.append(
            EvaluatedPrompt(
                index=index,
                prompt=prompts[position],
                answers=answers[of_prompt],
                scores=totals[of_prompt],
                lengths=lengths[of_prompt],
                ended=ended[of_prompt],
                kl=None if kl is None else kl[of_prompt],
                scores_by_source={name: column[of_prompt] for name, column in by_source.items()},
                numbers={
                    name: column[of_prompt].tolist() for name, column in scores.numbers.items()
                },
                data_source=names[position],
                turns=sections[of_prompt] if has_sections else [],
                finals=finals[of_prompt] if has_finals else [],
                content=dict(prompt_content(requests.prompts[index]).record),
            )
        )
    return evaluated


def shown_metrics(metrics: Mapping[str, float]) -> str:
    """The metrics of an evaluation in one line, for the log; of a single data set its score
    only."""
    texts = []
    for name, value in metrics.items():
        is_of_all_data_sets = name.count("/") == 1
        is_score_of_data_set = name.startswith("eval/score/")
        is_of_reward_source = name.startswith("eval/reward/") and name.count("/") == 2
        if is_of_all_data_sets or is_score_of_data_set or is_of_reward_source:
            texts.append(f"{name.removeprefix('eval/')} {value:.4g}")
    return "  ".join(texts)


@dataclass(eq=False)
class Evaluation:
    """Evaluates the actor on the held-out prompts, and remembers the best evaluation."""

    flags: EvaluationFlags
    sampler: RolloutSampler
    requests: RewardRequests
    # log-probs under actor and reference; None where there is no reference
    passes: ForwardPasses | None
    folder: Path
    save_best: Callable[[], None]  # saves the models of the best evaluation; collective
    # names of the data sets, which the column `source` of the prompts numbers
    data_sources: Sequence[str] = ()
    best: tuple[float, int] | None = None  # (score, PPO step)
    # `--early_stop_patience`, by the same score
    early_stop: EarlyStop = field(default_factory=partial(EarlyStop, metric=HIGHEST_SCORE))

    def __post_init__(self) -> None:
        config = self.sampler.config
        if self.flags.eval_greedy:
            config = greedily(config)
        self.config = replace(config, samples=self.flags.eval_samples)

    def close(self) -> None:
        """End the processes of the reward functions."""
        self.requests.mixture.close()

    def is_due(self, step: int, last_step: int) -> bool:
        """Whether to evaluate after PPO step `step` (0: before the first)."""
        every = self.flags.eval_interval
        return step in (0, last_step) or (every > 0 and step % every == 0)

    def run(self, step: int) -> dict[str, float]:
        """Sample responses to all prompts, write them, and save models that are trained and the
        best so far; returns the metrics. `step`: finished PPO steps; at 0 no model is saved.
        Collective. `StorageError` if the responses cannot be written."""
        prompts = self.requests.prompts
        batches = optimizer_steps(
            range(len(prompts)), self.flags.eval_batch_size, 1, dist.world_size(), dist.rank()
        )
        rank_rows: list[EvaluatedPrompt] = []
        for [indices] in batches:
            # padding runs the first prompt again, so that all ranks have as many
            evaluated = self._evaluated(prompts, [max(index, 0) for index in indices], step)
            for index, row in zip(indices, evaluated, strict=True):
                if index != PADDING_ROW:
                    rank_rows.append(row)
        rows = [row for rows_of_rank in dist.gather_objects(rank_rows) for row in rows_of_rank]
        rows.sort(key=lambda row: row.index)
        faults = self.requests.count_failed_rows().faults
        pass_score = self.flags.eval_pass_score
        metrics = summary(rows, pass_score) | summary_by_data_set(rows, pass_score)
        metrics["eval/function_faults"] = float(faults)
        for name, value in self.requests.mixture.take_metrics().items():
            metrics[f"eval/{name}"] = value
        problem = None
        if dist.is_main():
            problem = self._write(rows, step)
        problem = dist.broadcast_object(problem)
        if problem:
            raise StorageError(problem)
        mean = metrics["eval/score"]
        if math.isfinite(mean) and (self.best is None or mean > self.best[0]):
            self.best = (mean, step)
            if step > 0 and self.flags.save_best:
                self.save_best()
        self.early_stop.consider(metrics, step)
        return metrics

    def require_best_models(self, before: Mapping[str, float]) -> None:
        """Forget the best evaluation of a resumed run if its models are not there, so that the best
        ones from here on are kept; `before`, the metrics before training, is to be beaten.
        Collective."""
        if self.best is None or self.best[1] == 0 or not self.flags.save_best:
            return
        if best_is_lost(self.folder / BEST, self.best[1]):
            self.best = None
            score = before.get("eval/score", math.nan)
            if math.isfinite(score):
                self.best = (score, 0)

    def _evaluated(self, prompts: Dataset, indices: list[int], step: int) -> list[EvaluatedPrompt]:
        """The prompts at `indices` with responses and their scores. `step`: finished PPO steps, for
        rewards and features; the seeds do not depend on it. Collective."""
        samples = self.config.samples
        first = indices[0] * samples  # so that responses depend neither on batches nor on ranks
        rollout = self.sampler.sample(
            indices,
            STREAM,
            0,
            0,
            purpose="evaluation",
            prompts=prompts,
            config=self.config,
            first=first,
            step=step,
        )
        request = self.requests.request(rollout, indices, step)
        scores = self.requests.mixture(request, rollout)
        kl = None
        if self.passes is not None:
            groups = torch.arange(len(indices), device=scores.total.device).repeat_interleave(
                samples
            )
            scored = self.passes(rollout, groups)
            assert scored.old_logprobs is not None and scored.ref_logprobs is not None
            # one sum per response
            kl = kl_k1(scored.old_logprobs, scored.ref_logprobs).sum(dim=1).tolist()
        return evaluated_prompts(
            self.requests, indices, rollout, request.texts, scores, self.data_sources, kl
        )

    def _write(self, rows: list[EvaluatedPrompt], step: int) -> str | None:
        """Write the responses; returns why they cannot be written, so that all ranks stop, or
        None."""
        path = self.folder / "eval" / f"step_{step:06d}.jsonl"
        try:
            make_folder(path.parent)
            write_file(path, "".join(f"{json_line(row)}\n" for row in rows).encode())
        except OSError as problem:
            return f"{path}: the answers of the evaluation cannot be written ({problem.strerror})"
        return None


def json_line(row: EvaluatedPrompt) -> str:
    """One line of JSON, without the fields that only some rows have where they are empty. NaN and
    infinity become null, as in metrics.jsonl."""
    line = asdict(row)
    for name in ("data_source", "numbers", "turns", "finals", "content"):
        if not line[name]:
            del line[name]
    return json.dumps(finite_or_null(line), allow_nan=False)
