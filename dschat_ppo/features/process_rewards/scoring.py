"""One score of a response from the scores of its steps."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from dschat_ppo.algorithms.aggregation import zero_outside
from dschat_ppo.config.feature_flags import HasFeatures
from dschat_ppo.errors import UserError
from dschat_ppo.features.process_rewards.flags import ProcessRewardFlags
from dschat_ppo.features.process_rewards.steps import step_ends
from dschat_ppo.rewards.learned_reward import TokenScoring

SEPARATOR = "step_separator"  # key of the config of a process reward model, written by step 2
SAVED_ENTRIES = (SEPARATOR,)
StepAggregation = Literal["min", "mean", "last", "product"]


def scoring_of(
    flags: HasFeatures,
    model_config: PretrainedConfig,
    folder: str,
    tokenizer: PreTrainedTokenizerBase,
) -> TokenScoring | None:
    """The scoring of `--process_reward`, with the separator that step 2 saved with the reward
    model in `folder`."""
    how = flags.of(ProcessRewardFlags).process_reward
    if how is None:
        return None
    separator = saved_separator(model_config, folder)
    return TokenScoring(
        partial(mask_of_steps, tokenizer, separator), partial(aggregate_steps, how=how)
    )


def saved_separator(config: PretrainedConfig, folder: str) -> str:
    """Text between the steps of answers that step 2 saved with the process reward model in
    `folder`."""
    separator = config.to_dict().get(SEPARATOR)
    if not separator or not isinstance(separator, str):
        raise UserError(
            f"--process_reward: {folder}/config.json has no {SEPARATOR}; train the reward model"
            " with step 2, --objective process, or omit the flag"
        )
    return separator


def mask_of_steps(
    tokenizer: PreTrainedTokenizerBase,
    separator: str,
    responses: Sequence[list[int]],
    input_ids: Tensor,
    lengths: Tensor,
) -> Tensor:
    """(B, T) bool, True at the token that ends each step; for an empty response at the last token
    of its prompt. Arguments as of `TokenScoring.mask`."""
    mask = torch.zeros(input_ids.shape, dtype=torch.bool)
    for row, (response, length) in enumerate(zip(responses, lengths.tolist(), strict=True)):
        start = length - len(response)  # below 0 if the row lost its start
        ends = [start + end for end in step_ends(tokenizer, response, separator)]
        ends_in_row = [end for end in ends if end >= 0]
        mask[row, ends_in_row or [length - 1]] = True
    return mask.to(input_ids.device)


def aggregate_steps(scores: Tensor, step_mask: Tensor, how: StepAggregation) -> Tensor:
    """One score in [0, 1] for each response, (B,) fp32, from the probabilities `sigmoid(s)` of its
    steps.

    "min" and "product" are the two of Lightman et al. 2023 (appendix F) and Wang et al. 2024.
    `scores` (B, T), s; `step_mask` (B, T) bool, True at the ends of steps, at least one in each
    row.
    """
    steps = zero_outside(scores.float(), step_mask)
    if how == "product":
        return zero_outside(F.logsigmoid(steps), step_mask).sum(dim=1).exp()
    probabilities = torch.sigmoid(steps)
    if how == "mean":
        return zero_outside(probabilities, step_mask).sum(dim=1) / step_mask.sum(dim=1)
    if how == "min":
        return probabilities.masked_fill(~step_mask, 1.0).amin(dim=1)
    columns = torch.arange(scores.shape[1], device=scores.device)
    last = torch.where(step_mask, columns, -1).amax(dim=1, keepdim=True)  # (B, 1)
    return probabilities.gather(1, last).squeeze(1)
