"""Drawing the next token, and when a response ends. All settings are explicit; a model's own
generation config is ignored."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dschat_ppo.algorithms.vocabulary_sums import VocabularyWeights
from dschat_ppo.common.seeding import SPLITMIX_STEP, splitmix64
from dschat_ppo.types import ForbiddenTokens

BLOCK = 128  # tokens of one block of the two-level search
# the nucleus is first searched among this many of the likeliest tokens, then among all
NUCLEUS_GUESS = 1024
NUCLEUS_STATIC = 4096  # the same number in steps that cannot ask whether it was enough


@dataclass(frozen=True)
class SamplingParameters:
    """temperature > 0; top_k 0 = off, 1 = greedy; top_p 1 = off; min_p 0 = off; repetition_penalty
    1 = off."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @property
    def changes_distribution(self) -> bool:
        """Whether tokens are drawn from another distribution than `softmax(logits /
        temperature)`."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0 or self.repetition_penalty != 1


def row_uniforms(seeds: Tensor, count: int) -> Tensor:
    """(B, count) fp32 in [0, 1), multiples of 2**-24: the t-th number of a row depends only on its
    seed and on t. The numbers are those of SplitMix64: the state is the seed, `seeds` (B,) int64,
    plus t times an odd constant."""
    steps = np.arange(1, count + 1, dtype=np.uint64) * SPLITMIX_STEP
    z = splitmix64(seeds.cpu().numpy().view(np.uint64)[:, None] + steps[None, :])
    uniforms = (z >> np.uint64(40)).astype(np.float32) * np.float32(2**-24)
    return torch.from_numpy(uniforms).to(seeds.device)


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Draw one index per row, (B,) int64, with probability proportional to its weight, by inverting
    the distribution.

    The search has two levels: the block of `BLOCK` weights in which the cumulative weight passes
    `uniform * total`, then the index inside it. An index of weight 0 is never drawn. `weights` (B,
    V) fp32, at least 0, one above 0 in each row; `uniforms` (B,) fp32 in [0, 1).
    """
    padding = -weights.shape[1] % BLOCK
    if padding:
        weights = torch.nn.functional.pad(weights, (0, padding))
    blocks = weights.unflatten(1, (-1, BLOCK))
    totals = blocks.sum(dim=2)
    ends = _running_sums(totals)
    target = uniforms.unsqueeze(1) * ends[:, -1:]
    block = _first_past(totals, ends, target)  # (B, 1)
    before = torch.where(block > 0, ends.gather(1, (block - 1).clamp_min(0)), 0.0)
    in_block = blocks.gather(1, block.unsqueeze(2).expand(-1, 1, BLOCK)).squeeze(1)
    index = _first_past(in_block, _running_sums(in_block), target - before)
    return (block * BLOCK + index).squeeze(1)


def _first_past(weights: Tensor, ends: Tensor, target: Tensor) -> Tensor:
    """(B, 1) int64: the first index with a weight above 0 whose running sum is above `target`
    (B, 1); `ends` (B, n) are the running sums of `weights` (B, n)."""
    # Rounding may put the target at the end or past it; a parallel sum does not always grow where a
    # weight does.
    positive = weights > 0
    last = torch.where(positive, ends, 0.0).amax(dim=1, keepdim=True)
    above = ends > torch.minimum(target, last * (1 - 2.0**-23))
    return (above & positive).to(torch.uint8).argmax(dim=1, keepdim=True)


def _running_sums(weights: Tensor) -> Tensor:
    """Cumulative sums of weights (B, n) fp32, as `cumsum` computes them. PyTorch has no
    deterministic cumsum of floats on a GPU, so `--deterministic` adds integers: multiples of 2^-40
    of the largest weight of the row."""
    if not torch.are_deterministic_algorithms_enabled():
        return weights.cumsum(dim=1)
    unit = weights.amax(dim=1, keepdim=True).double() * 2.0**-40
    return ((weights / unit).long().cumsum(dim=1) * unit).float()


@dataclass(frozen=True)
class NucleusSearch:
    """Where a step looks for the nucleus of `top_p`: among the likeliest `tokens`; None: among all.
    `overflow` (B,) bool is set for rows whose nucleus is larger, and their result is then wrong.
    Without `overflow`, such rows are searched again among all tokens, which needs an answer from
    the device."""

    tokens: int | None = NUCLEUS_GUESS
    overflow: Tensor | None = None


ASK_DEVICE = NucleusSearch()


def _nucleus_floor(weights: Tensor, top_p: float, search: NucleusSearch) -> Tensor:
    """Least weight (B, 1) in the smallest set of likeliest tokens with a share of `top_p`.
    (Holtzman et al. 2020)"""
    mass = top_p * weights.sum(dim=1, keepdim=True)
    if search.tokens is None or search.tokens >= weights.shape[1]:
        ordered = weights.sort(dim=1, descending=True).values
    else:
        ordered = weights.topk(search.tokens, dim=1).values
        is_enough = ordered.sum(dim=1, keepdim=True) >= mass
        if search.overflow is not None:
            search.overflow.logical_or_(~is_enough.squeeze(1))
        elif not bool(is_enough.all()):
            ordered = weights.sort(dim=1, descending=True).values
    inside = _running_sums(ordered) - ordered < mass
    return torch.where(inside, ordered, float("inf")).amin(dim=1, keepdim=True)


def sample(
    logits: Tensor,
    sampling: SamplingParameters,
    uniforms: Tensor,
    seen: Tensor | None = None,
    forbidden: Tensor | None = None,
    search: NucleusSearch = ASK_DEVICE,
) -> tuple[Tensor, Tensor]:
    """Draw one token per row.

    Args:
        logits: (B, V) of any floating dtype.
        sampling: temperature, penalty and truncation.
        uniforms: (B,) fp32 in [0, 1), the only source of randomness.
        seen: (B, V) bool, True for tokens already in the row; needed for a repetition penalty.
        forbidden: (B, V) bool, True for tokens that must not be drawn.
        search: where `top_p` looks for the nucleus.

    Returns:
        Tokens (B,) int64, and their logprobs (B,) fp32 under `softmax(logits / temperature)`
        without the forbidden ones. That is the policy's distribution before penalty and truncation,
        the one that training differentiates.
    """
    plain = logits.float()
    if forbidden is not None:
        plain = plain.masked_fill(forbidden, float("-inf"))
    scaled = plain
    if sampling.temperature != 1:
        scaled = plain * (1 / sampling.temperature)  # as the head of training does
    distribution = VocabularyWeights.of(scaled)
    weights = distribution.weights
    if sampling.repetition_penalty != 1 and seen is not None:
        penalty = sampling.repetition_penalty  # (Keskar et al. 2019, section 4.1)
        penalised = torch.where(plain > 0, plain / penalty, plain * penalty)
        steered = torch.where(seen, penalised, plain)
        weights = torch.softmax(steered / sampling.temperature, dim=1)
    if sampling.top_k == 1:
        tokens = weights.argmax(dim=1)
    else:
        tokens = draw(_truncated(weights, sampling, search), uniforms)
    return tokens, distribution.logprobs(scaled, tokens)


def _truncated(weights: Tensor, sampling: SamplingParameters, search: NucleusSearch) -> Tensor:
    """`weights` (B, V), 0 for all tokens but the `top_k` likeliest; of those, the nucleus; of
    those, `min_p`. Ties stay together."""
    if 0 < sampling.top_k < weights.shape[1]:
        floor = weights.topk(sampling.top_k, dim=1).values[:, -1:]
        weights = torch.where(weights >= floor, weights, 0.0)
    if sampling.top_p < 1:
        floor = _nucleus_floor(weights, sampling.top_p, search)
        weights = torch.where(weights >= floor, weights, 0.0)
    if sampling.min_p > 0:
        floor = sampling.min_p * weights.amax(dim=1, keepdim=True)
        weights = torch.where(weights >= floor, weights, 0.0)
    return weights


Decode = Callable[[list[list[int]]], list[str]]

# tokens decoded beyond those that a stop string can span, for tokens that are no text by themselves
TAIL = 8


@dataclass(frozen=True)
class StoppingCriteria:
    """What ends a response. The token that ends it belongs to the response. `max_new_tokens` is at
    least 1. Tokens of `eos_ids` and `stop_ids` cannot be sampled before `min_new_tokens` tokens.
    `stop_strings` end a response once its decoded text contains one of them; they need `decode`
    (rows of ids -> texts). Tokens of `banned_ids` cannot be sampled at all."""

    max_new_tokens: int
    eos_ids: tuple[int, ...] = ()
    stop_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    min_new_tokens: int = 0
    decode: Decode | None = None
    banned_ids: tuple[int, ...] = ()

    @property
    def ids(self) -> tuple[int, ...]:
        """All tokens that end a response."""
        return (*self.eos_ids, *self.stop_ids)

    @property
    def forbidden_tokens(self) -> ForbiddenTokens | None:
        """The tokens that cannot be sampled, before `min_new_tokens` or at all; None if there are
        none."""
        minimum = 0
        if self.ids:
            minimum = self.min_new_tokens
        if minimum or self.banned_ids:
            return ForbiddenTokens(self.ids, minimum, self.banned_ids)
        return None

    def reach(self, further: Iterable[str] = ()) -> int:
        """How many of the last tokens can take part in a stop string, also of the `further` ones:
        at most one per byte, plus `TAIL`."""
        stop_strings = (*self.stop_strings, *further)
        return max((len(text.encode()) for text in stop_strings), default=0) + TAIL

    def found_in_text(
        self, tails: list[list[int]], further: Sequence[tuple[str, ...]] | None = None
    ) -> list[bool]:
        """Whether the newest token of each response completed a stop string.

        Args:
            tails: the last `reach` ids of each response, or all.
            further: stop strings of each response besides those of all; None: no others.
        """
        if self.decode is None or not tails:
            return [False] * len(tails)
        if further is None:
            further = [()] * len(tails)
        completes = list[bool]()
        for text, further_strings in zip(self.decode(tails), further, strict=True):
            stop_strings = (*self.stop_strings, *further_strings)
            completes.append(any(stop in text for stop in stop_strings))
        return completes
