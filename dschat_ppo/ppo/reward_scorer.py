"""Scores of answers: text and data rows for the reward sources."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dschat_ppo.rewards.mixture import RewardMixture
from dschat_ppo.rewards.reward_request import RewardRequest
from dschat_ppo.types import FinishReason, Rollout


@dataclass(frozen=True)
class Scores:
    """Scores of B answers, on the device of the rollout."""

    total: Tensor  # (B,) fp32, the weighted sum of the sources
    by_source: Tensor  # (B, K) fp32, unweighted
    baselines: Tensor | None = None  # (B,) fp32, the score of the greedy answer to the same prompt (ReMax)


def texts_of(tokenizer: PreTrainedTokenizerBase, ids: Tensor, mask: Tensor, skip_special_tokens: bool) -> list[str]:
    """The real tokens of each row, `ids` and `mask` (B, T), as text."""
    rows = [row[real].tolist() for row, real in zip(ids, mask, strict=True)]
    return list(tokenizer.batch_decode(rows, skip_special_tokens=skip_special_tokens))


class RewardScorer:
    """Asks the reward sources for the scores of a rollout.

    Args:
        mixture: the sources with their weights.
        prompts: token rows of the prompts, with the data row of each as JSON.
        tokenizer: of the actor.
    """

    def __init__(self, mixture: RewardMixture, prompts: Dataset, tokenizer: PreTrainedTokenizerBase):
        self.mixture = mixture
        self.prompts = prompts
        self.tokenizer = tokenizer
        self._has_counted = False

    def request(self, rollout: Rollout, indices: list[int]) -> RewardRequest:
        """What the sources receive.

        Prompts keep the special tokens of a chat template, but not the actor's BOS. Responses lose the EOS that ended
        them.

        Args:
            rollout: answers to the prompts at `indices`, as many to each, one prompt after another.
            indices: row numbers of the prompts.
        """
        samples = len(rollout.response_ids) // len(indices)
        data: list[dict[str, Any]] = [json.loads(text) for text in self.prompts[indices]["row"]]
        lengths = rollout.response_mask.sum(dim=1) - (rollout.finish_reason == FinishReason.EOS).long()  # (B,)
        is_text = torch.arange(rollout.response_mask.shape[1], device=lengths.device) < lengths.unsqueeze(1)  # (B, R)
        prompts = texts_of(self.tokenizer, rollout.prompt_ids, rollout.prompt_mask, skip_special_tokens=False)
        return RewardRequest(
            [text.removeprefix(self.tokenizer.bos_token or "") for text in prompts],
            texts_of(self.tokenizer, rollout.response_ids, is_text, skip_special_tokens=True),
            [row for row in data for _ in range(samples)],
        )

    def __call__(self, rollout: Rollout, indices: list[int]) -> Scores:
        """Score all answers to the prompts at `indices`. Collective."""
        return self.score(self.request(rollout, indices), rollout)

    def score(self, request: RewardRequest, rollout: Rollout) -> Scores:
        """Score the answers that `request` was made from. Collective."""
        found = self.mixture(request, rollout)
        device = rollout.response_ids.device
        return Scores(found.scores.to(device), found.by_source.to(device))

    def count_faults(self) -> int:
        """Answers of all ranks that got a function's default score since the last count. Collective.

        Raises:
            RewardFunctionError: this is the first count and a function failed on every answer, so the function itself
                is wrong.
        """
        refuse_all, self._has_counted = not self._has_counted, True
        return self.mixture.count_faults(refuse_all)
