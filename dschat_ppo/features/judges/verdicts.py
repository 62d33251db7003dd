"""What a judge is asked about each response, and the score that its verdicts make."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from dschat_ppo.errors import UserError
from dschat_ppo.features.judges.compare import preference, rivals_of
from dschat_ppo.features.judges.prompts import Judged, JudgePrompts, Question, is_blank
from dschat_ppo.features.judges.rubric import criteria_of
from dschat_ppo.features.judges.spec import PAIRS, REFERENCE
from dschat_ppo.rewards.remote_reward import label_of

Logprobs = Sequence[float]  # of the labels


@dataclass(frozen=True)
class Verdict:
    """One part of a score: of a question, of a pair in both orders, or known unasked."""

    questions: tuple[Question, ...] = ()
    known: float = math.nan  # its value, if there are no questions
    weight: float = 1.0
    name: str = ""  # under which its value is logged; "": it is not


def verdict_value(
    verdict: Verdict, logprobs: Mapping[Question, Logprobs], values: Sequence[float]
) -> float:
    """From 0 to 1; NaN if a log-prob is not finite. `values`: of the labels."""
    if not verdict.questions:
        return verdict.known
    read = [logprobs[question] for question in verdict.questions]
    if not all(math.isfinite(logprob) for row in read for logprob in row):
        return math.nan
    if len(read) == 2:
        return preference(read[0], read[1])
    shares = torch.tensor(read[0], dtype=torch.float64).softmax(dim=0)
    return float(shares @ torch.tensor(values, dtype=torch.float64))


def score_of(verdicts: Sequence[Verdict], values: Sequence[float]) -> float:
    """The sum of weights times values over the sum of the positive weights."""
    total = sum(verdict.weight * value for verdict, value in zip(verdicts, values, strict=True))
    return total / sum(max(0.0, verdict.weight) for verdict in verdicts)


class Asking:
    """What a judge is asked. `seed`: of the run, for the rings of pairs."""

    def __init__(self, prompts: JudgePrompts, seed: int):
        self.prompts = prompts
        self.spec = prompts.spec
        self.seed = seed

    def verdicts(
        self, judged: Mapping[int, Judged], step: int
    ) -> tuple[dict[int, list[Verdict]], dict[int, str]]:
        """(row -> the verdicts that make its score, row -> why it can have none). `judged`: the
        responses by row."""
        verdicts = dict[int, list[Verdict]]()
        causes = dict[int, str]()
        for rows in _groups(judged):
            for row in rows:
                group = [judged[index] for index in rows]
                try:
                    verdicts[row] = self._of(judged[row], group, rows.index(row), step)
                except UserError as problem:
                    causes[row] = str(problem)
        return verdicts, causes

    def _of(self, judged: Judged, group: Sequence[Judged], index: int, step: int) -> list[Verdict]:
        """The verdicts on the response at `index` of its group."""
        answer = self.prompts.answer(judged)
        if self.spec.compare == PAIRS:
            texts = [self.prompts.answer(response) for response in group]
            if len(texts) < 2:
                raise UserError("there is no other response to its prompt to compare it with")
            most = self.spec.rivals or len(texts)
            rivals = rivals_of(texts, most, f"{self.seed} {step}")[index]
            return [self._of_pair(judged, answer, texts[rival]) for rival in rivals]
        if self.spec.compare == REFERENCE:
            reference = label_of(judged.row)
            if reference is None:
                raise UserError("its row has no right answer to compare it with")
            return [self._of_pair(judged, answer, str(reference))]
        if is_blank(answer):
            return [Verdict(known=0.0)]
        if not self.spec.rubric:
            return [Verdict((self.prompts.question(judged),))]
        criteria = criteria_of(judged.row.get(self.spec.rubric), self.spec.rubric)
        verdicts = []
        for criterion in criteria:
            question = self.prompts.question(judged, criterion.text)
            verdicts.append(Verdict((question,), weight=criterion.weight, name=criterion.name))
        return verdicts

    def _of_pair(self, judged: Judged, answer: str, rival: str) -> Verdict:
        """Whether an answer is better than its rival."""
        if answer == rival or (is_blank(answer) and is_blank(rival)):
            return Verdict(known=0.5)
        if is_blank(answer) or is_blank(rival):
            return Verdict(known=float(is_blank(rival)))
        in_order = self.prompts.question(judged, answers=[answer, rival])
        reversed_order = self.prompts.question(judged, answers=[rival, answer])
        return Verdict((in_order, reversed_order))


def _groups(judged: Mapping[int, Judged]) -> list[list[int]]:
    """Rows of the responses to each prompt."""
    groups = dict[int, list[int]]()
    for row, each in judged.items():
        groups.setdefault(each.group, []).append(row)
    return list(groups.values())
