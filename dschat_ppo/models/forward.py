"""Forward passes that rollout, scoring and training share, so that their numbers agree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dschat_ppo.models.backbone import Layout, unwrap
from dschat_ppo.models.policy_model import PolicyModel
from dschat_ppo.types import LateEnds, Model, Rollout, full_sequences


def vocabulary_size(model: Any) -> int:
    """Width of the logits, V, which may be more than the number of the tokenizer's tokens."""
    return int(model.get_output_embeddings().out_features)


@dataclass(frozen=True)
class ResponseLogprobs:
    """Of the response tokens: `logprobs` and `entropy` are (B, R) fp32, 0 outside `response_mask`. If requested,
    `distributions` (N, V) fp32 are the log-probs of all tokens at the N response tokens, row after row."""

    logprobs: Tensor
    entropy: Tensor
    distributions: Tensor | None = None


def response_logprobs(
    engine: Model, rows: Rollout, temperature: float, entropy_grad: bool = False, distributions: bool = False,
    late_ends: LateEnds | None = None,
) -> ResponseLogprobs:  # fmt: skip
    """Log-probs of the response tokens under the model, and entropies of the distributions that they are drawn from.
    `engine` is a DeepSpeed engine around a `PolicyModel`, a `PolicyModel`, or a causal language model (not fused).
    `late_ends`: tokens that could not be drawn at the beginning of an answer."""
    policy = engine
    if not isinstance(unwrap(engine), PolicyModel):
        policy = PolicyModel(cast(PreTrainedModel, engine), Layout(fused=False))
    input_ids, lengths = full_sequences(rows)
    slots = torch.arange(input_ids.shape[1], device=input_ids.device)
    starts = rows.prompt_mask.sum(dim=1, keepdim=True)  # (B, 1)
    wanted = (slots >= starts) & (slots < lengths.unsqueeze(1))
    forbidden = None if late_ends is None else (wanted & (slots < starts + late_ends.minimum), late_ends.ids)
    empty = torch.zeros(rows.response_mask.shape, device=input_ids.device)
    logprobs, entropy, *extras = policy(input_ids, wanted, temperature, entropy_grad, distributions, forbidden)
    return ResponseLogprobs(
        empty.masked_scatter(rows.response_mask, logprobs),
        empty.masked_scatter(rows.response_mask, entropy),
        extras.pop(0) if distributions else None,
    )


def answer_logprobs(engine: Model, input_ids: Tensor, answer_mask: Tensor) -> Tensor:
    """Log-prob of each row's whole answer: the sum over its tokens, (B,) fp64, with gradient if gradients are on.
    `input_ids` (B, T) right-padded; `answer_mask` (B, T) bool, False in the first column; a row without a True has the
    sum 0. The sum is in fp64 because training uses small differences of such sums."""
    logprobs, _ = engine(input_ids, answer_mask)
    empty = torch.zeros(answer_mask.shape, dtype=torch.float64, device=input_ids.device)
    return empty.masked_scatter(answer_mask, logprobs.double()).sum(dim=1)


def response_values(engine: Model, rows: Rollout) -> Tensor:
    """The critic's value before each response token, (B, R) fp32, 0 outside `response_mask`."""
    input_ids, lengths = full_sequences(rows)
    slots = torch.arange(input_ids.shape[1], device=input_ids.device)
    before = (slots >= rows.prompt_mask.sum(dim=1, keepdim=True) - 1) & (slots < lengths.unsqueeze(1) - 1)
    values = engine(input_ids, lengths, wanted=before)  # (N,)
    return torch.zeros(rows.response_mask.shape, device=input_ids.device).masked_scatter(rows.response_mask, values)
