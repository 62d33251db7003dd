"""Scores of answers: texts and data rows for the sources of reward."""

from __future__ import annotations

import json
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dschat_ppo.rewards.reward_mixture import MixedScores, RewardMixture
from dschat_ppo.rewards.reward_source import RewardRequest
from dschat_ppo.types import FinishReason, Rollout


def texts_of(tokenizer: PreTrainedTokenizerBase, ids: Tensor, mask: Tensor, skip_special_tokens: bool) -> list[str]:
    """The real tokens of each row, `ids` and `mask` (B, T), as text."""
    rows = [row[real].tolist() for row, real in zip(ids, mask, strict=True)]
    return list(tokenizer.batch_decode(rows, skip_special_tokens=skip_special_tokens))


class RewardScorer:
    """Asks the sources of reward about a rollout.

    Args:
        mixture: the sources with their weights.
        prompts: token rows of the prompts, with the data row of each as JSON.
        tokenizer: of the actor.
    """

    def __init__(self, mixture: RewardMixture, prompts: Dataset, tokenizer: PreTrainedTokenizerBase):
        self.mixture = mixture
        self.prompts = prompts
        self.tokenizer = tokenizer
        self._counted = False  # faults, at least once

    def request(self, rollout: Rollout, indices: list[int]) -> RewardRequest:
        """What the sources are asked. Prompts keep the marks of a chat template, but not the actor's BOS, which is no
        text; nor is the token that ended a response.

        Args:
            rollout: answers to the prompts at `indices`, as many of each, one prompt after another.
            indices: row numbers of the prompts.
        """
        samples = len(rollout.response_ids) // len(indices)
        data: list[dict[str, Any]] = [json.loads(text) for text in self.prompts[indices]["row"]]
        lengths = rollout.response_mask.sum(dim=1) - (rollout.finish_reason == FinishReason.EOS).long()
        is_text = torch.arange(rollout.response_mask.shape[1], device=lengths.device) < lengths.unsqueeze(1)
        prompts = texts_of(self.tokenizer, rollout.prompt_ids, rollout.prompt_mask, skip_special_tokens=False)
        return RewardRequest(
            [text.removeprefix(self.tokenizer.bos_token or "") for text in prompts],
            texts_of(self.tokenizer, rollout.response_ids, is_text, skip_special_tokens=True),
            [row for row in data for _ in range(samples)],
        )

    def __call__(self, rollout: Rollout, indices: list[int]) -> MixedScores:
        """Scores of all answers to the prompts at `indices`. Collective."""
        return self.score(self.request(rollout, indices), rollout)

    def score(self, request: RewardRequest, rollout: Rollout) -> MixedScores:
        """Scores of what `request` made of the rollout, on its device. Collective."""
        found = self.mixture(request, rollout)
        device = rollout.response_ids.device
        return MixedScores(found.scores.to(device), found.by_source.to(device))

    def count_failed_rows(self) -> int:
        """Rows of all ranks that got a function's default score since the last count. Collective.

        Raises:
            RewardFunctionError: this is the first count, and a function failed on every row: the function is wrong, not
                an answer.
        """
        refuse_all, self._counted = not self._counted, True
        return self.mixture.count_failed_rows(refuse_all)
