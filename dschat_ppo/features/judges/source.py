"""A judge as a reward source."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

import torch
from torch import Tensor

from dschat_ppo.common import dist
from dschat_ppo.common.logging import print_line
from dschat_ppo.errors import UserError
from dschat_ppo.features.judges.labels import LabelReader
from dschat_ppo.features.judges.prompts import Judged, JudgePrompts
from dschat_ppo.features.judges.spec import JudgeSpec
from dschat_ppo.rewards.call_forms import clean_name
from dschat_ppo.rewards.reward_source import CallCounts, RewardRequest, is_routed_to
from dschat_ppo.types import Rollout

Question = tuple[int, ...]  # token ids


@dataclass
class Tally:
    """What a judge did on this rank since its metrics were taken."""

    responses: int = 0  # on its route
    unscored: int = 0  # of them
    questions: int = 0  # about them
    asked: int = 0  # of them: the others were asked before in this PPO step
    tokens_in: int = 0  # of those asked
    seconds: float = 0.0


class JudgeReward:
    """Scores responses by the expected value of a judge's verdict: its labels stand evenly between
    0 and 1, each with its probability among them. A response without a letter or a digit has the
    lowest score, unasked."""

    def __init__(self, spec: JudgeSpec, prompts: JudgePrompts, reader: LabelReader):
        self.spec = spec
        self.prompts = prompts
        self.reader = reader
        self.counts = CallCounts()
        self.failed = torch.zeros(0, dtype=torch.bool)  # (B,) of the last call
        self.numbers = dict[str, Tensor]()
        self._tally = Tally()
        # Scores of the PPO step `_step`. Those of earlier steps are not kept: a resumed run would
        # not have them, and would score the same question beside others, with other rounding.
        self._scores = dict[Question, float]()
        self._step = -1

    @property
    def name(self) -> str:
        """The last part of the model's name."""
        return clean_name(Path(self.spec.model).name)

    def __call__(self, request: RewardRequest, rollout: Rollout) -> Tensor:
        """(B,) fp32 on the CPU; NaN where the route names other data sources, or the judge `failed`
        to score the response. Collective."""
        started = time.perf_counter()
        if request.step != self._step:
            self._scores.clear()
            self._step = request.step
        scores = torch.full((len(request),), math.nan)
        questions = dict[int, Question]()  # by row
        causes = dict[int, str]()  # row -> why it has no score
        rows = [
            index for index, row in enumerate(request.rows) if is_routed_to(self.spec.sources, row)
        ]
        for row in rows:
            judged = Judged(request.prompts[row], request.rows[row], request.texts[row])
            if self.prompts.is_blank(judged):
                scores[row] = 0.0
                continue
            try:
                questions[row] = tuple(self.prompts.ids(judged))
            except UserError as problem:
                causes[row] = str(problem)
        new = [ids for ids in dict.fromkeys(questions.values()) if ids not in self._scores]
        self._scores.update(zip(new, self._expected_values(new), strict=True))
        for row, ids in questions.items():
            if math.isfinite(self._scores[ids]):
                scores[row] = self._scores[ids]
            else:
                causes[row] = "the log-probs of its verdicts are not finite"
        self._count(rows, causes, len(request))
        self._tally.questions += len(questions)
        self._tally.asked += len(new)
        self._tally.tokens_in += sum(map(len, new))
        self._tally.seconds += time.perf_counter() - started
        return scores

    def _expected_values(self, questions: Sequence[Question]) -> list[float]:
        """The expected value of the verdict on each question. Collective."""
        logprobs = self.reader.logprobs([list(ids) for ids in questions])  # (n, L)
        values = torch.tensor(self.spec.values, dtype=torch.float64)  # (L,)
        return (logprobs.softmax(dim=1) @ values).tolist()

    def _count(self, rows: Sequence[int], causes: dict[int, str], size: int) -> None:
        """Count the rows on its route, and those without a score. `size`: of the request."""
        self.failed = torch.zeros(size, dtype=torch.bool)
        self.failed[list(causes)] = True
        first = next(iter(causes.values()), None)
        if first is not None:
            print_line(
                f"warning: rank {dist.rank()}: {self.spec}: no score for {len(causes)} of"
                f" {len(rows)} answers; the first cause: {first} (what it costs: --reward_default)"
            )
        self.counts = self.counts.plus(len(rows), len(causes), first)
        self._tally.responses += len(rows)
        self._tally.unscored += len(causes)

    def take_metrics(self, name: str) -> dict[str, float]:
        """Metrics over all ranks since the last call, under the `name` of the source in the run;
        {} if it scored nothing. Collective."""
        tallies = [Tally(*values) for values in dist.gather_objects(astuple(self._tally))]
        self._tally = Tally()
        responses = sum(tally.responses for tally in tallies)
        if responses == 0:
            return {}
        questions = sum(tally.questions for tally in tallies)
        asked = sum(tally.asked for tally in tallies)
        return {
            f"judge/{name}/unscored_share": sum(tally.unscored for tally in tallies) / responses,
            f"judge/{name}/cached_share": (questions - asked) / max(1, questions),
            f"judge/{name}/asked": float(asked),
            f"judge/{name}/tokens_in": float(sum(tally.tokens_in for tally in tallies)),
            f"judge/{name}/seconds": max(tally.seconds for tally in tallies),
        }

    def close(self) -> None:
        """A judge has no processes to end."""
