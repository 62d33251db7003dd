"""Evaluation during step 3: answers to held-out prompts, their scores, and the best models so far."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor

from dschat_ppo.algorithms.kl import kl_k1
from dschat_ppo.algorithms.pass_at_k import pass_at_k
from dschat_ppo.common import dist
from dschat_ppo.common.atomic_files import make_folder, write_file
from dschat_ppo.config.evaluation_flags import ValidationFlags
from dschat_ppo.data.sampler import PADDING_ROW, optimizer_steps
from dschat_ppo.errors import StorageError
from dschat_ppo.ppo.generate import Rollouts, greedily
from dschat_ppo.ppo.reward_scorer import RewardScorer
from dschat_ppo.ppo.score import ModelScorer
from dschat_ppo.rewards.rules import last_boxed

STREAM = 5  # separates the seeds of these answers from those of training


@dataclass(frozen=True)
class Answered:
    """One held-out prompt with its answers; `kl` are sums over the tokens of each answer (None without a reference)."""

    index: int
    prompt: str
    answers: list[str]
    scores: list[float]
    lengths: list[int]
    ended: list[bool]
    kl: list[float] | None


def final_answer(text: str) -> str:
    """What answers are counted by for the majority: the last boxed expression, else what stands after `####`, else the
    last line."""
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed.strip()
    lines = text.rsplit("####", 1)[-1].strip().splitlines()
    return lines[-1].strip() if lines else ""


def _json_line(row: Answered) -> str:
    """JSON knows no NaN and no infinity: null stands for them, as in metrics.jsonl."""

    def strict(values: list[float]) -> list[float | None]:
        return [value if math.isfinite(value) else None for value in values]

    return json.dumps(asdict(row) | {"scores": strict(row.scores), "kl": row.kl and strict(row.kl)})


def summary(rows: list[Answered], pass_score: float) -> dict[str, float]:
    """Metrics over all prompts; `pass@k` for powers of two up to n answers, `majority@n` where n is above 1.

    Args:
        rows: at least one; as many answers to each prompt.
        pass_score: an answer passes from this score on.
    """
    scores = torch.tensor([row.scores for row in rows], dtype=torch.float64)
    lengths = torch.tensor([row.lengths for row in rows], dtype=torch.float64)
    passed, samples = scores >= pass_score, scores.shape[1]
    metrics = {
        "eval/score": float(scores.mean()),
        "eval/length_mean": float(lengths.mean()),
        "eval/ended_share": float(torch.tensor([row.ended for row in rows], dtype=torch.float64).mean()),
    }
    for k in (2**power for power in range(samples.bit_length())):
        metrics[f"eval/pass@{k}"] = float(pass_at_k(passed, k).mean())
    if samples > 1:
        metrics[f"eval/majority@{samples}"] = sum(_majority_passes(row, pass_score) for row in rows) / len(rows)
    if rows[0].kl is not None:
        total = sum(value for row in rows for value in row.kl or [])
        metrics["eval/kl_ref_k1"] = total / max(1.0, float(lengths.sum()))
    return metrics


def _majority_passes(row: Answered, pass_score: float) -> bool:
    """Whether the answer that most samples agree on passes; of equally frequent ones the first counts."""
    finals = [final_answer(answer) for answer in row.answers]
    winner = Counter(finals).most_common(1)[0][0]
    return row.scores[finals.index(winner)] >= pass_score


class Evaluation:
    """Answers the held-out prompts and remembers the best evaluation.

    Args:
        flags: of validation.
        rollouts: where answers come from.
        judge: where scores come from, over the held-out prompts.
        maker: scores log-probs under actor and reference; None where there is no reference.
        folder: of the outputs.
        keep: saves the models where they are the best so far; collective.
    """

    def __init__(
        self, flags: ValidationFlags, rollouts: Rollouts, judge: RewardScorer, maker: ModelScorer | None, folder: Path,
        keep: Callable[[], None],
    ):  # fmt: skip
        self.flags = flags
        self.rollouts = rollouts
        self.judge = judge
        self.maker = maker
        self.folder = folder
        self.keep = keep
        how = greedily(rollouts.how) if flags.eval_greedy else rollouts.how
        self.how = replace(how, samples=flags.eval_samples)
        self.best: tuple[float, int] | None = None

    @property
    def prompts(self) -> Dataset:
        """Token rows of the held-out prompts."""
        return self.judge.prompts

    def close(self) -> None:
        """End the processes of the reward functions."""
        self.judge.mixture.close()

    def due(self, step: int, last_step: int) -> bool:
        """Whether to evaluate after PPO step `step` (0: before the first)."""
        every = self.flags.eval_interval
        return step in (0, last_step) or (every > 0 and step % every == 0)

    def run(self, step: int) -> dict[str, float]:
        """Metrics; writes the answers, and keeps the models if they are trained and the best so far. Collective."""
        rows = self._answer_all()
        faults = self.judge.count_failed_rows()
        metrics = summary(rows, self.flags.eval_pass_score)
        metrics["eval/function_faults"] = float(faults)
        problem = dist.broadcast_object(self._write(rows, step) if dist.is_main() else None)
        if problem:
            raise StorageError(problem)
        score = metrics["eval/score"]
        if math.isfinite(score) and (self.best is None or score > self.best[0]):
            self.best = (score, step)
            if step > 0 and self.flags.save_best:
                self.keep()
        return metrics

    def _write(self, rows: list[Answered], step: int) -> str | None:
        """Why the answers cannot be written, so that all ranks can stop alike; None: they are."""
        path = self.folder / "eval" / f"step_{step:06d}.jsonl"
        try:
            make_folder(path.parent)
            write_file(path, "".join(f"{_json_line(row)}\n" for row in rows).encode())
        except OSError as problem:
            return f"{path}: the answers of the evaluation cannot be written ({problem.strerror})"
        return None

    def _answer_all(self) -> list[Answered]:
        """The held-out prompts of all ranks, in order."""
        mine: list[Answered] = []
        size, ranks = self.flags.eval_batch_size, dist.world_size()
        for [indices] in optimizer_steps(range(len(self.prompts)), size, 1, ranks, dist.rank()):
            mine += self._answer([max(index, 0) for index in indices], [i != PADDING_ROW for i in indices])
        return sorted((row for part in dist.gather_objects(mine) for row in part), key=lambda row: row.index)

    def _answer(self, indices: list[int], real: list[bool]) -> list[Answered]:
        first = indices[0] * self.how.samples  # so that answers depend neither on batches nor on ranks
        rollout = self.rollouts.answer(self.prompts, indices, self.how, first, self.rollouts.seed, STREAM, 0, 0)
        request = self.judge.request(rollout, indices)
        found = self.judge.score(request, rollout)
        kl = None
        if self.maker is not None:
            groups = torch.zeros(len(found.scores), dtype=torch.int64, device=found.scores.device)
            scored = self.maker.make(rollout, found.by_source, found.scores, groups)
            assert scored.ref_logprobs is not None
            kl = kl_k1(scored.old_logprobs, scored.ref_logprobs).sum(dim=1)

        def per_prompt(values: Any) -> list[list[Any]]:
            flat = values.tolist() if isinstance(values, Tensor) else list(values)
            return [flat[start : start + self.how.samples] for start in range(0, len(flat), self.how.samples)]

        columns = zip(
            indices, per_prompt(request.prompts), per_prompt(request.responses), per_prompt(found.scores),
            per_prompt(rollout.response_mask.sum(dim=1)), per_prompt(rollout.ended),
            per_prompt(kl) if kl is not None else [None] * len(indices), strict=True,
        )  # fmt: skip
        rows = [Answered(index, prompts[0], *others) for index, prompts, *others in columns]
        return [row for row, counts in zip(rows, real, strict=True) if counts]
