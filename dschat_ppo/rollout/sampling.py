"""Drawing the next token. Everything about it is explicit; a model's own generation config has no say."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """temperature > 0; top_k 0 = off, 1 = greedy; top_p 1 = off."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0


def truncate(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """`-inf` on all but the kept tokens: the `top_k` likeliest, then the smallest set that reaches `top_p`.

    Args:
        logits: (B, V) fp32, already divided by the temperature.
        top_k: 0 keeps all.
        top_p: 1 keeps all. The likeliest token is always kept. (Holtzman et al. 2020)

    Returns:
        (B, V) fp32.
    """
    if 0 < top_k < logits.shape[-1]:
        threshold = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < threshold, float("-inf"))
    if top_p < 1:
        ordered, order = logits.sort(dim=-1, descending=True)
        probabilities = ordered.softmax(dim=-1)
        reached_before = probabilities.cumsum(dim=-1) - probabilities >= top_p
        drop = torch.zeros_like(reached_before).scatter(-1, order, reached_before)
        logits = logits.masked_fill(drop, float("-inf"))
    return logits


def sample(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw one token per row.

    Args:
        logits: (B, V), any floating dtype.
        sampling: how.
        generator: on the device of `logits`.

    Returns:
        (tokens (B,) int64, logprobs (B,) fp32 of those tokens under `softmax(logits / temperature)`, the
        distribution before top-k and top-p, which is the one that training differentiates).
    """
    scaled = logits.float() / sampling.temperature
    kept = truncate(scaled, sampling.top_k, sampling.top_p)
    tokens = torch.multinomial(kept.softmax(dim=-1), 1, generator=generator).squeeze(1)
    logprobs = torch.log_softmax(scaled, dim=-1).gather(1, tokens.unsqueeze(1)).squeeze(1)
    return tokens, logprobs
