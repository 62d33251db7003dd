"""Log-probs of a judge's verdicts, in packed forward passes of the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dschat_ppo.common import dist
from dschat_ppo.common.heartbeat import heartbeat
from dschat_ppo.data.batches import collate_prompts, right_padded
from dschat_ppo.models.micro_batches import RowPrompts, even_passes, share_prompts
from dschat_ppo.models.pass_observers import observed
from dschat_ppo.models.wrapped_models import response_logprobs
from dschat_ppo.types import FinishReason, Model, Rollout

_FILLER = 0  # masks mark the real tokens, so any id works


@dataclass(eq=False)
class LabelReader:
    """Reads the log-probs of labels after questions."""

    engine: Model  # around a `PolicyModel`, or the model itself
    label_ids: Sequence[list[int]]  # of the L labels, each with its final token
    batch_tokens: int  # most tokens of a forward pass
    # what was asked so far
    asked: int = 0
    tokens_in: int = 0
    tokens_out: int = 0
    unread: str = ""  # no reply is without a verdict
    written: list[str] = field(default_factory=list)  # it does not write

    def begin(self, step: int) -> None:
        """Nothing of a step is kept."""

    @torch.no_grad()
    def logprobs(self, questions: Sequence[Sequence[int]]) -> Tensor:
        """log p(label, end | question), (n, L) fp64 on the CPU, of n questions as token ids; each
        runs once for all of its labels. Collective: all ranks run equally many passes."""
        self.asked += len(questions)
        self.tokens_in += sum(map(len, questions))
        label_count = len(self.label_ids)
        most_questions = dist.all_reduce(torch.tensor(len(questions), device=dist.device()), "max")
        if int(most_questions) == 0:
            return torch.zeros(0, label_count, dtype=torch.float64)
        # a rank without a question runs one of a single token, because layers may be gathered
        run_questions = list(questions) or [(_FILLER,)]
        count = len(run_questions)
        question_of_row = torch.arange(count).repeat_interleave(label_count)
        label_of_row = torch.arange(label_count).repeat(count)
        question_tokens = torch.tensor([len(ids) for ids in run_questions])[question_of_row]
        label_tokens = torch.tensor([len(ids) for ids in self.label_ids])[label_of_row]
        prompts = None
        if share_prompts(self.engine):
            prompts = RowPrompts(question_of_row, question_tokens)
        sums = torch.zeros(count * label_count, dtype=torch.float64)
        self.engine.eval()
        lengths = (question_tokens + label_tokens).to(dist.device())
        for row_indices in even_passes(lengths, self.batch_tokens, prompts)[0]:
            heartbeat()
            host_indices = row_indices.cpu()
            rows = self._rows(
                [run_questions[index] for index in question_of_row[host_indices].tolist()],
                [self.label_ids[index] for index in label_of_row[host_indices].tolist()],
            )
            with observed(None):  # observers read the actor's passes
                outputs = response_logprobs(self.engine, rows, temperature=1.0)
            sums[host_indices] = outputs.logprobs.double().sum(dim=1).cpu()
        return sums.view(count, label_count)[: len(questions)]

    def _rows(self, questions: Sequence[Sequence[int]], labels: Sequence[list[int]]) -> Rollout:
        """Rows [question | label and end] on the device of the model."""
        device = self.engine.device
        token_rows = [{"prompt_ids": ids} for ids in questions]
        batch = collate_prompts(token_rows, range(len(token_rows)), _FILLER)
        response_ids, lengths = right_padded(labels, _FILLER)
        response_mask = torch.arange(response_ids.shape[1]) < lengths.unsqueeze(1)
        return Rollout(
            prompt_ids=batch.prompt_ids.to(device),
            prompt_mask=batch.prompt_mask.to(device),
            response_ids=response_ids.to(device),
            response_mask=response_mask.to(device),
            rollout_logprobs=torch.zeros(response_ids.shape, device=device),
            finish_reason=torch.full(
                (len(labels),), FinishReason.EOS, dtype=torch.int8, device=device
            ),
        )
