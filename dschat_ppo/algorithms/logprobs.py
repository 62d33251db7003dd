"""Log-probabilities and entropy of tokens, for rollout, scoring and training alike."""

from __future__ import annotations

import torch
from torch import Tensor


def token_logprobs(logits: Tensor, tokens: Tensor, temperature: float = 1.0) -> Tensor:
    """`log softmax(logits / temperature)[tokens]`, computed in fp32.

    Args:
        logits: (..., V), any floating dtype.
        tokens: (...) int64, the token sampled at each position.
        temperature: above 0; the sampling temperature.

    Returns:
        (...) fp32.
    """
    scaled = logits.float() / temperature
    chosen = scaled.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)  # (..., V) -> (..., 1) -> (...)
    return chosen - torch.logsumexp(scaled, dim=-1)


def token_entropy(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Entropy in nats of `softmax(logits / temperature)`: `logsumexp(z) - sum(softmax(z) z)`, in fp32.

    Args:
        logits: (..., V), any floating dtype; a token of logit -inf has probability 0 and adds 0 to value and gradient.
        temperature: above 0.

    Returns:
        (...) fp32.
    """
    scaled = logits.float() / temperature
    factors = scaled.masked_fill(scaled == -torch.inf, 0.0)  # 0 x -inf is NaN
    return torch.logsumexp(scaled, dim=-1) - (torch.softmax(scaled, dim=-1) * factors).sum(dim=-1)
