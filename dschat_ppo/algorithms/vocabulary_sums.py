"""Sums over the vocabulary in blocks of fixed columns, in one order for training and for sampling:
the sums of the blocks, and then those of the whole vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

CPU_COLUMNS = 2048  # of a block of the forward pass on a CPU, and of sampling


def largest_logit(logits: Tensor) -> Tensor:
    """The largest of the last dimension (..., columns) -> (...), finite if all are -inf."""
    return logits.amax(dim=-1).clamp_min_(torch.finfo(logits.dtype).min / 2)


def joined_blocks(largest_of_blocks: Tensor, totals: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """From the largest logit of each block, (rows, blocks), and the sum of exponentials of the
    logits less that, those of the whole vocabulary, (rows,) each; and the factors (rows, blocks)
    by which the exponentials of each block shrink."""
    largest = largest_of_blocks.amax(dim=1)
    shrink = torch.exp(largest_of_blocks - largest.unsqueeze(1))
    return largest, (totals * shrink).sum(dim=1), shrink


@dataclass(frozen=True)
class VocabularyWeights:
    """The distribution of logits z (B, V) fp32, for sampling: `weights` (B, V) are exp(z - z*),
    `largest` (B,) is z*, the largest logit of the row, and `log_total` (B,) the log of the sum of
    the weights."""

    weights: Tensor
    largest: Tensor
    log_total: Tensor

    @classmethod
    def of(cls, logits: Tensor) -> VocabularyWeights:
        """On a CPU in the order of additions of `fused_token_scores`, whatever B is; elsewhere by
        the fewest kernels."""
        if logits.device.type != "cpu":
            largest = logits.amax(dim=1)
            weights = torch.exp(logits - largest.unsqueeze(1))
            return cls(weights, largest, weights.sum(dim=1).log())
        weights = torch.empty_like(logits)
        weight_blocks = _in_blocks(weights)
        block_largest = []
        block_totals = []
        for logit_block, weight_block in zip(_in_blocks(logits), weight_blocks, strict=True):
            largest = largest_logit(logit_block)  # (B, blocks)
            torch.sub(logit_block, largest.unsqueeze(2), out=weight_block).exp_()
            block_largest.append(largest)
            block_totals.append(weight_block.sum(dim=2))
        largest, total, shrink = joined_blocks(
            torch.cat(block_largest, 1), torch.cat(block_totals, 1)
        )
        shrinks = torch.split(shrink, [block.shape[1] for block in weight_blocks], dim=1)
        for weight_block, block_shrink in zip(weight_blocks, shrinks, strict=True):
            weight_block.mul_(block_shrink.unsqueeze(2))
        return cls(weights, largest, total.log())

    def logprobs(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """Of `tokens` (B,) int64 under the softmax of `logits` (B, V), (B,): on a CPU with the bits
        of `fused_token_scores`."""
        chosen = logits.gather(1, tokens.unsqueeze(1)).squeeze(1)
        return chosen - self.largest - self.log_total


def _in_blocks(values: Tensor) -> list[Tensor]:
    """Views of (B, V) numbers: (B, blocks, `CPU_COLUMNS`), and (B, 1, columns) of the last block,
    where that has fewer."""
    width = values.shape[1]
    divisible = width - width % CPU_COLUMNS
    blocks = []
    if divisible:
        blocks.append(values[:, :divisible].view(len(values), -1, CPU_COLUMNS))
    if divisible < width:
        blocks.append(values[:, None, divisible:])
    return blocks
