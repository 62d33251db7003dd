"""The sequences that are being generated, as buffers on the model's device."""

from __future__ import annotations

import torch
from torch import Tensor

from dschat_ppo.rollout.sampling import SamplingParameters, row_uniforms
from dschat_ppo.rollout.stopping_criteria import StoppingCriteria
from dschat_ppo.types import FinishReason, PromptBatch, Rollout, repeat_rows

UNFINISHED = -1


class SequenceBuffers:
    """Buffers of all A answers (B prompts x G samples), and one spare row for lanes that stand idle.

    `sequence` (A+1, W) int64 holds prompt and answer from column 0; `prompt_length` and `limit` are (A+1,) int64;
    `length` (A+1,) int64 is the number of tokens of a finished answer; `reason` (A+1,) int8 is `UNFINISHED` or a
    `FinishReason`; `logprobs` and `uniforms` are (A+1, `room`); `seen` is (A+1, V) bool or None; `ends` and `eos` are
    (V,) bool, the tokens that end an answer.
    """

    def __init__(
        self, prompts: PromptBatch, seeds: Tensor, samples: int, sampling: SamplingParameters,
        stopping: StoppingCriteria, vocabulary: int, slack: int, limits: Tensor | None = None,
    ):  # fmt: skip
        device = prompts.prompt_ids.device
        self.prompts = repeat_rows(prompts, samples)
        self.stopping = stopping
        self.count = self.prompts.prompt_ids.shape[0]
        self.room = stopping.max_new_tokens + slack
        longest = prompts.prompt_ids.shape[1]
        self.width = longest + self.room + 1
        self.prompt_length = torch.ones(self.count + 1, dtype=torch.int64, device=device)
        self.prompt_length[:-1] = self.prompts.prompt_mask.sum(dim=1)
        self.limit = torch.full_like(self.prompt_length, stopping.max_new_tokens)
        if limits is not None:
            self.limit[:-1] = limits
        self.sequence = torch.zeros(self.count + 1, self.width, dtype=torch.int64, device=device)
        start = longest - self.prompt_length[:-1].unsqueeze(1)
        columns = (torch.arange(longest, device=device) + start).clamp_max(longest - 1)
        self.sequence[:-1, :longest] = self.prompts.prompt_ids.gather(1, columns)
        self.uniforms = torch.zeros(self.count + 1, self.room, device=device)
        self.uniforms[:-1] = row_uniforms(seeds, self.room)
        self.logprobs = torch.zeros(self.count + 1, self.room, device=device)
        self.length = torch.zeros(self.count + 1, dtype=torch.int64, device=device)
        self.reason = torch.full((self.count + 1,), UNFINISHED, dtype=torch.int8, device=device)
        self.ends = torch.zeros(vocabulary, dtype=torch.bool, device=device)
        self.ends[list(stopping.ids)] = True
        self.eos = torch.zeros_like(self.ends)
        self.eos[list(stopping.eos_ids)] = True
        self._not_by_itself = torch.tensor([UNFINISHED, FinishReason.LENGTH], dtype=torch.int8, device=device)
        self.seen: Tensor | None = None
        if sampling.repetition_penalty != 1:
            self.seen = torch.zeros(self.count + 1, vocabulary, dtype=torch.bool, device=device)
            self._see_prompts(torch.arange(self.count, device=device))

    def _see_prompts(self, answers: Tensor) -> None:
        """Mark the tokens of the prompts, and no others, as seen in some answers."""
        if self.seen is not None:
            for number in answers.tolist():
                self.seen[number] = False
                self.seen[number, self.prompts.prompt_ids[number][self.prompts.prompt_mask[number]]] = True

    def forbidden(self, count: Tensor) -> Tensor | None:
        """(n, V) bool, the ends that must not come yet in answers of `count` (n,) tokens; None without a minimum."""
        if not self.stopping.min_new_tokens or not self.stopping.ids:
            return None
        return (count < self.stopping.min_new_tokens).unsqueeze(1) & self.ends

    def put(self, answer: Tensor, count: Tensor, tokens: Tensor, logprobs: Tensor) -> Tensor:
        """Append one token to each of n answers and note which are finished by it.

        Args:
            answer: (n,) int64, rows of the buffers.
            count: (n,) int64, tokens that each has so far.
            tokens: (n,) int64. logprobs: (n,) fp32.

        Returns:
            (n,) bool, True where the answer is finished now.
        """
        place = self.prompt_length[answer] + count
        self.sequence.view(-1).index_copy_(0, answer * self.width + place, tokens)
        self.logprobs.view(-1).index_copy_(0, answer * self.room + count, logprobs)
        if self.seen is not None:
            self.seen[answer, tokens] = True
        ended = self.ends[tokens]
        finished = ended | (count + 1 >= self.limit[answer])
        reason = torch.where(self.eos[tokens], FinishReason.EOS, FinishReason.STOP)
        reason = torch.where(ended, reason, FinishReason.LENGTH).to(torch.int8)
        new = finished & (self.reason[answer] == UNFINISHED)
        self.reason[answer] = torch.where(new, reason, self.reason[answer])
        self.length[answer] = torch.where(new, count + 1, self.length[answer])
        return finished

    def stopped_by_text(self, answer: Tensor, count: Tensor, working: Tensor) -> Tensor:
        """Finish the answers whose text holds a stop string now; an EOS or stop token that came with it has precedence.

        Args:
            answer: (n,) int64. count: (n,) int64, tokens that each has. working: (n,) bool, which of them to look at.

        Returns:
            (n,) bool, True where a stop string is found.
        """
        reach = min(self.stopping.reach, self.room)
        first = self.prompt_length[answer] + count - reach
        columns = first.unsqueeze(1) + torch.arange(reach, device=answer.device)
        last = self.sequence[answer].gather(1, columns.clamp_min(0)).tolist()
        tails = [ids[max(0, reach - n) :] for ids, n in zip(last, count.tolist(), strict=True)]
        found = torch.tensor(self.stopping.found_in_text(tails), device=answer.device) & working
        new = found & torch.isin(self.reason[answer], self._not_by_itself)
        self.reason[answer] = torch.where(new, FinishReason.STOP, self.reason[answer]).to(torch.int8)
        self.length[answer] = torch.where(new, count, self.length[answer])
        return found

    def restart(self, answers: list[int]) -> None:
        """Forget what was generated for some answers."""
        self.reason[answers] = UNFINISHED
        self._see_prompts(torch.tensor(answers))

    def rollout(self) -> Rollout:
        """The finished answers, as long as the longest one."""
        length = self.length[:-1]
        place = torch.arange(int(length.max()), device=length.device)
        mask = place < length.unsqueeze(1)
        columns = (self.prompt_length[:-1].unsqueeze(1) + place).clamp_max(self.width - 1)
        ids = self.sequence[:-1].gather(1, columns)
        return Rollout(
            prompt_ids=self.prompts.prompt_ids,
            prompt_mask=self.prompts.prompt_mask,
            response_ids=torch.where(mask, ids, 0),
            response_mask=mask,
            rollout_logprobs=torch.where(mask, self.logprobs[:-1, : mask.shape[1]], 0.0),
            finish_reason=self.reason[:-1],
        )
