"""A judge as a reward source."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import torch
from torch import Tensor

from dschat_ppo.common import dist
from dschat_ppo.common.logging import print_line
from dschat_ppo.features.judges.columns import JUDGE_TEXTS
from dschat_ppo.features.judges.compare import flips
from dschat_ppo.features.judges.prompts import Judged, Question
from dschat_ppo.features.judges.sample_remarks import written_column
from dschat_ppo.features.judges.spec import TEXT
from dschat_ppo.features.judges.verdicts import (
    Asking,
    Logprobs,
    Verdict,
    score_of,
    verdict_value,
)
from dschat_ppo.rewards.call_forms import clean_name
from dschat_ppo.rewards.reward_source import CallCounts, RewardRequest, is_routed_to
from dschat_ppo.types import Rollout


@dataclass
class Tally:
    """What a judge did on this rank since its metrics were taken."""

    responses: int = 0  # on its route
    unscored: int = 0  # of them
    questions: int = 0  # about them
    asked: int = 0  # of them: the others were asked before
    tokens_in: int = 0  # of those asked
    tokens_out: int = 0  # of replies that were written
    pairs: int = 0  # that were asked in both orders
    flipped: int = 0  # of them: the same place won in both
    seconds: float = 0.0


class JudgeReader(Protocol):
    """Asks a judge. The numbers are those since it was made."""

    asked: int  # questions
    tokens_in: int
    tokens_out: int
    unread: str  # the beginning of the first reply without a verdict
    written: list[str]  # what it wrote to each question of the last call; [] if it does not write

    def begin(self, step: int) -> None:
        """The questions of a call in PPO step `step` follow."""

    def logprobs(self, questions: Sequence[Any]) -> Tensor:
        """Log-probs of the labels, (n, L) fp64, NaN where a reply has no verdict."""


class JudgeReward:
    """Scores responses by the verdicts of a judge, from 0 to 1, or below by faults of a rubric."""

    kind = "the template of the judge"

    def __init__(self, asking: Asking, reader: JudgeReader):
        self.spec = asking.spec
        self.asking = asking
        self.reader = reader
        self.counts = CallCounts()
        self.failed = torch.zeros(0, dtype=torch.bool)  # (B,) of the last call
        # name of a criterion -> (B,) fp64 of the last call; NaN in rows without it
        self.numbers = dict[str, Tensor]()
        self.columns = dict[str, Tensor]()  # of the last call: what the judge wrote
        self._tally = Tally()
        # Those of the PPO step `_step`. Those of earlier steps are not kept: a resumed run would
        # not have them, and would run the same question beside others, with other rounding.
        self._logprobs = dict[Question, Logprobs]()
        self._written = dict[Question, str]()
        self._step = -1

    @property
    def name(self) -> str:
        """The last part of the model's name; of an address without one the host."""
        name = Path(self.spec.model).name
        if self.spec.is_address:
            name = self.spec.served_model.rpartition("/")[2] or urlsplit(self.spec.model).netloc
        return clean_name(name)

    @property
    def scores_elsewhere(self) -> bool:
        """Whether it is at an address, so that a call is not collective."""
        return self.spec.is_address

    def __call__(self, request: RewardRequest, rollout: Rollout) -> Tensor:
        """(B,) fp32 on the CPU; NaN where the route names other data sources, or the judge `failed`
        to score the response. Collective."""
        started = time.perf_counter()
        if request.step != self._step:
            self._forget()
            self._step = request.step
        self.reader.begin(request.step)
        # a response that failed is no rival of others, and gets no verdict
        has_failed = [False] * len(request)
        if "failed" in rollout.extra:
            has_failed = rollout.extra["failed"].tolist()
        judged = {
            index: Judged(request.prompts[index], row, request.texts[index], request.groups[index])
            for index, row in enumerate(request.rows)
            if is_routed_to(self.spec.sources, row) and not has_failed[index]
        }
        verdicts, causes = self.asking.verdicts(judged, request.step)
        self._ask(list(verdicts.values()))
        scores = torch.full((len(request),), math.nan)
        self.numbers = {}
        for row, verdicts_of_row in verdicts.items():
            values = [
                verdict_value(each, self._logprobs, self.spec.values) for each in verdicts_of_row
            ]
            score = score_of(verdicts_of_row, values)
            if math.isnan(score):
                causes[row] = "it gave no verdict"
                if self.reader.unread:
                    causes[row] += f": {self.reader.unread}"
                continue
            scores[row] = score
            for verdict, value in zip(verdicts_of_row, values, strict=True):
                if verdict.name:
                    no_numbers = torch.full((len(request),), math.nan, dtype=torch.float64)
                    name = clean_name(verdict.name)
                    self.numbers.setdefault(name, no_numbers)[row] = value
        if self.spec.reads == TEXT:
            self.columns = {JUDGE_TEXTS: written_column(self._texts(verdicts, len(request)))}
        self._count(list(judged), causes, len(request))
        self.failed |= torch.tensor(has_failed)
        self._tally.seconds += time.perf_counter() - started
        return scores

    def _ask(self, verdicts_of_rows: Sequence[Sequence[Verdict]]) -> None:
        """Ask what was not asked before in this PPO step. Collective."""
        verdicts = [verdict for verdicts in verdicts_of_rows for verdict in verdicts]
        questions = [question for verdict in verdicts for question in verdict.questions]
        new = [question for question in dict.fromkeys(questions) if question not in self._logprobs]
        reader = self.reader
        asked_before = (reader.asked, reader.tokens_in, reader.tokens_out)
        logprobs = reader.logprobs(new)  # (n, L)
        self._logprobs.update(zip(new, logprobs.tolist(), strict=True))
        if reader.written:
            self._written.update(zip(new, reader.written, strict=True))
        self._tally.questions += len(questions)
        self._tally.asked += reader.asked - asked_before[0]
        self._tally.tokens_in += reader.tokens_in - asked_before[1]
        self._tally.tokens_out += reader.tokens_out - asked_before[2]
        for verdict in verdicts:
            if len(verdict.questions) == 2:
                first, second = verdict.questions
                self._tally.pairs += 1
                self._tally.flipped += flips(self._logprobs[first], self._logprobs[second])

    def _texts(self, verdicts: Mapping[int, Sequence[Verdict]], size: int) -> list[str]:
        """What the judge wrote to the last question about each of `size` responses."""
        texts = [""] * size
        for row, verdicts_of_row in verdicts.items():
            for verdict in verdicts_of_row:
                for question in verdict.questions:
                    texts[row] = self._written.get(question, "")
        return texts

    def _forget(self) -> None:
        """Forget what was asked."""
        self._logprobs.clear()
        self._written.clear()

    def _count(self, rows: Sequence[int], causes: Mapping[int, str], size: int) -> None:
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
        {} if it scored nothing. What was asked is forgotten. Collective."""
        self._forget()
        tallies = [Tally(*values) for values in dist.gather_objects(astuple(self._tally))]
        self._tally = Tally()
        responses = sum(tally.responses for tally in tallies)
        if responses == 0:
            return {}
        questions = sum(tally.questions for tally in tallies)
        asked = sum(tally.asked for tally in tallies)
        pairs = sum(tally.pairs for tally in tallies)
        metrics = {
            f"judge/{name}/unscored_share": sum(tally.unscored for tally in tallies) / responses,
            f"judge/{name}/cached_share": (questions - asked) / max(1, questions),
            f"judge/{name}/asked": float(asked),
            f"judge/{name}/tokens_in": float(sum(tally.tokens_in for tally in tallies)),
            f"judge/{name}/tokens_out": float(sum(tally.tokens_out for tally in tallies)),
            f"judge/{name}/seconds": max(tally.seconds for tally in tallies),
        }
        if pairs:
            flipped = sum(tally.flipped for tally in tallies)
            metrics[f"judge/{name}/flip_share"] = flipped / pairs
        return metrics

    def close(self) -> None:
        """A judge has no processes to end."""
