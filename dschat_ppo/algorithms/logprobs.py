"""Log-probabilities and entropy of tokens, for rollout, scoring and training alike."""

from __future__ import annotations

import torch
from torch import Tensor


def token_logprobs(logits: Tensor, tokens: Tensor, temperature: float = 1.0) -> Tensor:
    """`log softmax(logits / temperature)[tokens]` in fp32: (..., V) of any floating dtype, (...) int64 -> (...)."""
    scaled = logits.float() / temperature
    chosen = scaled.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)  # (..., V) -> (..., 1) -> (...)
    return chosen - torch.logsumexp(scaled, dim=-1)


def token_entropy(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Entropy in nats of `softmax(logits / temperature)`: `logsumexp(z) - sum(softmax(z) z)`, (..., V) -> (...) fp32. A
    token of logit -inf has probability 0 and adds 0 to value and gradient."""
    scaled = logits.float() / temperature
    factors = scaled.masked_fill(scaled == -torch.inf, 0.0)  # 0 x -inf is NaN
    return torch.logsumexp(scaled, dim=-1) - (torch.softmax(scaled, dim=-1) * factors).sum(dim=-1)
