"""Evaluation in step 3: answers to held-out prompts, their scores, and the best models so far."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset

from dschat_ppo.algorithms.evaluation_statistics import pass_at_k
from dschat_ppo.algorithms.kl import kl_k1
from dschat_ppo.common import dist
from dschat_ppo.common.atomic_files import make_folder, write_file
from dschat_ppo.config.ppo_flags import EvaluationFlags
from dschat_ppo.data.batches import PADDING_ROW, optimizer_steps
from dschat_ppo.episodes.shown_turns import turns_of
from dschat_ppo.errors import StorageError
from dschat_ppo.monitor.writers import finite_or_null
from dschat_ppo.ppo.generation_settings import greedily
from dschat_ppo.ppo.rollout_sampler import RolloutSampler
from dschat_ppo.ppo.score import ForwardPasses, RewardRequests
from dschat_ppo.rewards.call_forms import ResponseText
from dschat_ppo.rewards.reward_source import Scores
from dschat_ppo.rewards.rules import last_boxed
from dschat_ppo.run.output_folder import BEST, best_is_lost
from dschat_ppo.types import FinishReason, Rollout

CUT = FinishReason.LENGTH.name.lower()
STREAM = 5  # separates the seeds of the evaluation's answers from those of training


@dataclass(frozen=True)
class Answered:
    """One held-out prompt with its n answers."""

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
    # see `Scores`; NaN where an answer has none
    numbers: dict[str, list[float]] = field(default_factory=dict)
    data_source: str | None = None  # name of the prompt's data set; None if there is only one
    # `turns_of` the answers; [] if none has several
    turns: list[list[dict[str, Any]]] = field(default_factory=list)
    # the last message of each answer without thoughts and calls; [] if these are the answers
    finals: list[str] = field(default_factory=list)


def final_answer(text: str) -> str:
    """The part of an answer that a majority vote compares: the last boxed expression, else the text
    after `####`, else the last line."""
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed.strip()
    lines = text.rsplit("####", 1)[-1].strip().splitlines()
    return lines[-1].strip() if lines else ""


def majority_passes(row: Answered, pass_score: float) -> bool | None:
    """Whether the most frequent final answer among those with a score passes; of equally frequent
    ones the first counts. None if no answer has a score."""
    scored = [number for number, score in enumerate(row.scores) if not math.isnan(score)]
    if not scored:
        return None
    texts = row.finals or row.answers
    finals = [final_answer(texts[number]) for number in scored]
    most_frequent = Counter(finals).most_common(1)[0][0]
    return row.scores[scored[finals.index(most_frequent)]] >= pass_score


def summary(rows: list[Answered], pass_score: float) -> dict[str, float]:
    """Metrics over all prompts (at least one), each with n answers; `pass@k` for powers of two up
    to n answers, `majority@n` where n is above 1. An answer passes with a score of `pass_score` or
    more. Answers without a score count in lengths and in `unscored_share` alone: a prompt with
    fewer than k scored answers is not in `pass@k`.

    With several reward sources also `reward/NAME_mean`, the mean score of a source over the answers
    that it scores, and `reward/NAME_share`, their share, if it is below 1.
    """
    scores = torch.tensor([row.scores for row in rows], dtype=torch.float64)  # (prompts, n)
    lengths = torch.tensor([row.lengths for row in rows], dtype=torch.float64)
    samples = scores.shape[1]
    unscored = scores.isnan()  # (prompts, n)
    metrics = {
        "eval/score": float(scores[~unscored].mean()),
        "eval/unscored_share": float(unscored.double().mean()),
        "eval/length_mean": float(lengths.mean()),
        "eval/ended_share": sum(reason != CUT for row in rows for reason in row.ended)
        / scores.numel(),
    }
    passed = [own[~own.isnan()] >= pass_score for own in scores]  # of each prompt: (scored,) bool
    for k in (2**power for power in range(samples.bit_length())):
        shares = [pass_at_k(own.unsqueeze(0), k) for own in passed if len(own) >= k]
        if shares:
            metrics[f"eval/pass@{k}"] = float(torch.cat(shares).mean())
    if samples > 1:
        votes = [majority_passes(row, pass_score) for row in rows]
        counted = [vote for vote in votes if vote is not None]
        if counted:
            metrics[f"eval/majority@{samples}"] = sum(counted) / len(counted)
    if rows[0].kl is not None:
        total = sum(value for row in rows for value in row.kl or [])
        metrics["eval/kl_ref_k1"] = total / max(1.0, float(lengths.sum()))
    if len(rows[0].scores_by_source) > 1:
        for name in rows[0].scores_by_source:
            known = [
                value
                for row in rows
                for value in row.scores_by_source[name]
                if not math.isnan(value)
            ]
            if known:
                metrics[f"eval/reward/{name}_mean"] = math.fsum(known) / len(known)
            if len(known) < scores.numel():
                metrics[f"eval/reward/{name}_share"] = len(known) / scores.numel()
    for name in sorted({name for row in rows for name in row.numbers}):
        known = [
            value for row in rows for value in row.numbers.get(name, []) if not math.isnan(value)
        ]
        if known:
            metrics[f"eval/{name}"] = math.fsum(known) / len(known)
    return metrics


def summary_by_source(rows: list[Answered], pass_score: float) -> dict[str, float]:
    """`summary` of each data set, with `/NAME` after each name; {} if there is only one data
    set."""
    names = sorted({row.data_source for row in rows if row.data_source is not None})
    return {
        f"{metric}/{name}": value
        for name in names
        for metric, value in summary(
            [row for row in rows if row.data_source == name], pass_score
        ).items()
    }


def answered_rows(
    requests: RewardRequests,
    indices: Sequence[int],
    rollout: Rollout,
    responses: Sequence[ResponseText],
    scores: Scores,
    data_sources: Sequence[str],
    kl: list[float] | None = None,
) -> list[Answered]:
    """One record for each of the prompts at `indices`, whose column `source` numbers the
    `data_sources`. `rollout` has the n answers to a prompt one after another; `kl` is that of each
    answer, see `Answered`."""
    samples = len(rollout.response_ids) // len(indices)
    prompts = requests.shown_prompts(rollout, len(indices))
    answers = [response.spoken for response in responses]
    finals = [response.final for response in responses]
    names: list[str | None] = [None] * len(indices)
    if len(data_sources) > 1:
        names = [data_sources[number] for number in requests.prompts[indices]["source"]]
    lengths = rollout.response_mask.sum(dim=1).tolist()
    totals = scores.total.tolist()
    ended = [FinishReason(reason).name.lower() for reason in rollout.finish_reason.tolist()]
    by_source = dict(zip(requests.mixture.names, scores.by_source.T.tolist(), strict=True))
    turns = turns_of(requests.tokenizer, rollout)
    # a prompt's answers
    parts = [slice(start, start + samples) for start in range(0, len(totals), samples)]
    return [
        Answered(
            index,
            prompt,
            answers[own],
            totals[own],
            lengths[own],
            ended[own],
            None if kl is None else kl[own],
            {source: values[own] for source, values in by_source.items()},
            {key: values[own].tolist() for key, values in scores.numbers.items()},
            name,
            turns[own] if any(turns[own]) else [],
            finals[own] if finals[own] != answers[own] else [],
        )
        for index, prompt, own, name in zip(indices, prompts, parts, names, strict=True)
    ]


def shown_metrics(metrics: Mapping[str, float]) -> str:
    """The metrics of an evaluation in one line, for the log."""
    return "  ".join(
        f"{name.removeprefix('eval/')} {value:.4g}"
        for name, value in metrics.items()
        if name.count("/") == 1
        or name.startswith("eval/score/")  # of one data set: the score only
        or (name.startswith("eval/reward/") and name.count("/") == 2)
    )


@dataclass(eq=False)
class Evaluation:
    """Answers the held-out prompts and remembers the best evaluation."""

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

    def __post_init__(self) -> None:
        if self.flags.eval_greedy:
            config = greedily(self.sampler.config)
        else:
            config = self.sampler.config
        self.config = replace(config, samples=self.flags.eval_samples)

    def close(self) -> None:
        """End the processes of the reward functions."""
        self.requests.mixture.close()

    def is_due(self, step: int, last_step: int) -> bool:
        """Whether to evaluate after PPO step `step` (0: before the first)."""
        every = self.flags.eval_interval
        return step in (0, last_step) or (every > 0 and step % every == 0)

    def run(self, step: int) -> dict[str, float]:
        """Answer all prompts, write the answers, and save models that are trained and the best so
        far. Collective."""
        mine: list[Answered] = []
        prompts = self.requests.prompts
        size = self.flags.eval_batch_size
        for [indices] in optimizer_steps(
            range(len(prompts)), size, 1, dist.world_size(), dist.rank()
        ):
            real = [index != PADDING_ROW for index in indices]
            answered = self._answer(prompts, [max(index, 0) for index in indices], step)
            mine += [row for row, counts in zip(answered, real, strict=True) if counts]
        rows = sorted(
            (row for part in dist.gather_objects(mine) for row in part), key=lambda row: row.index
        )
        faults = self.requests.count_failed_rows().faults
        score = self.flags.eval_pass_score
        metrics = summary(rows, score) | summary_by_source(rows, score)
        metrics["eval/function_faults"] = float(faults)
        problem = dist.broadcast_object(self._write(rows, step) if dist.is_main() else None)
        if problem:
            raise StorageError(problem)
        mean = metrics["eval/score"]
        if math.isfinite(mean) and (self.best is None or mean > self.best[0]):
            self.best = (mean, step)
            if step > 0 and self.flags.save_best:
                self.save_best()
        return metrics

    def require_best_models(self, before: Mapping[str, float]) -> None:
        """Forget the best evaluation of a resumed run if its models are not there, so that the best
        ones from here on are kept; `before`, the metrics before training, is to be beaten.
        Collective."""
        if self.best is None or self.best[1] == 0 or not self.flags.save_best:
            return
        if best_is_lost(self.folder / BEST, self.best[1]):
            score = before.get("eval/score", math.nan)
            self.best = (score, 0) if math.isfinite(score) else None

    def _answer(self, prompts: Dataset, indices: list[int], step: int) -> list[Answered]:
        """Answers to some prompts, with their scores; each list entry is one prompt."""
        samples = self.config.samples
        first = indices[0] * samples  # answers depend neither on batches nor on ranks
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
            # one sum per answer
            kl = kl_k1(scored.old_logprobs, scored.ref_logprobs).sum(dim=1).tolist()
        return answered_rows(
            self.requests, indices, rollout, request.texts, scores, self.data_sources, kl
        )

    def _write(self, rows: list[Answered], step: int) -> str | None:
        """Write the answers; returns why they cannot be written, so that all ranks stop, or
        None."""
        path = self.folder / "eval" / f"step_{step:06d}.jsonl"
        try:
            make_folder(path.parent)
            write_file(path, "".join(f"{json_line(row)}\n" for row in rows).encode())
        except OSError as problem:
            return f"{path}: the answers of the evaluation cannot be written ({problem.strerror})"
        return None


def json_line(row: Answered) -> str:
    """One line of JSON, without what only some rows have where it is empty. NaN and infinity become
    null, as in metrics.jsonl."""
    sometimes = ("data_source", "numbers", "turns", "finals")
    line = {name: value for name, value in asdict(row).items() if value or name not in sometimes}
    return json.dumps(finite_or_null(line), allow_nan=False)
