"""Log-probabilities and entropies of tokens straight from hidden states: the (N, V) logits never exist as a whole.

Both passes walk through the vocabulary in blocks. The forward pass keeps a running maximum and running sums for each
row (Milakov and Gimelshein 2018, "Online normalizer calculation for softmax"); the backward pass makes each block's
logits again. A block of the weight's gradient is one product over all rows, so it is as exact as that of a plain
linear layer in any number format.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

BLOCK_BYTES = 8 * 2**20  # of one block of fp32 logits: it should stay in a processor's cache
GPU_BLOCK_BYTES = 256 * 2**20  # a GPU wants few large products
SMALLEST_BLOCK = 256  # columns: narrower products waste the machine
LOWEST = -1e4  # a logit this far below the largest has probability 0 in fp64 too, and 0 x -inf would be NaN


@dataclass(frozen=True)
class Head:
    """What stands between a causal model's matrix product and its logits: `softcap * tanh(scale * x / softcap)`.

    `scale` is Cohere's `logit_scale` or one over Granite's `logits_scaling`; `softcap` is Gemma's, None is off.
    """

    scale: float = 1.0
    softcap: float | None = None


PLAIN_HEAD = Head()


def fused_token_scores(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tokens: Tensor,
    temperature: float = 1.0,
    head: Head = PLAIN_HEAD,
    entropy_grad: bool = False,
    block_bytes: int | None = None,
) -> tuple[Tensor, Tensor]:
    """`token_logprobs` and `token_entropy` of the logits that a language model's head makes of `hidden`.

    Args:
        hidden: (N, H), any floating dtype; N may be 0.
        weight: (V, H) of the head, same dtype.
        bias: (V) or None.
        tokens: (N) int64, the token drawn at each place.
        temperature: above 0; the sampling temperature.
        head: what follows the matrix product.
        entropy_grad: let the gradient of the entropy reach the inputs; it costs time in the backward pass.
        block_bytes: size of one block of fp32 logits; two or three such tensors live at once.

    Returns:
        (logprobs, entropy), each (N) fp32 (float64 if `hidden` is), the first with gradient for hidden, weight, bias.
        A logit of -inf adds 0 to the entropy and to every gradient but that of its own token's log-prob.
    """
    block_bytes = block_bytes or (BLOCK_BYTES if hidden.device.type == "cpu" else GPU_BLOCK_BYTES)
    columns = max(SMALLEST_BLOCK, block_bytes // (4 * max(1, hidden.shape[0])))
    scores: tuple[Tensor, Tensor] = _FusedTokenScores.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, tokens, temperature, head, entropy_grad, columns
    )
    return scores


class _FusedTokenScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, tokens: Tensor, temperature: float, head: Head,
        entropy_grad: bool, columns: int,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        largest, total, weighted, chosen = _start(hidden)
        for start in range(0, weight.shape[0], columns):
            logits, _ = _block_logits(hidden, weight, bias, slice(start, start + columns), temperature, head)
            column, inside = _in_block(tokens, start, logits.shape[1])
            chosen += torch.where(inside, logits.gather(1, column), 0).squeeze(1)
            before, largest = largest, torch.maximum(largest, logits.amax(dim=1))
            shrink = torch.exp(before - largest)
            weighted = (weighted + (before - largest) * total) * shrink
            logits.sub_(largest.unsqueeze(1)).clamp_(min=LOWEST)
            powers = torch.exp(logits)
            total = total * shrink + powers.sum(dim=1)
            weighted += torch.linalg.vecdot(powers, logits)
        log_total = largest + total.log()
        entropy = total.log() - weighted / total
        # the weight itself is saved, as nn.Linear does it: ZeRO-3 gathers it anew before the backward pass
        ctx.save_for_backward(hidden, weight, bias, tokens, log_total, entropy)
        ctx.temperature, ctx.head, ctx.entropy_grad, ctx.columns = temperature, head, entropy_grad, columns
        if not entropy_grad:
            ctx.mark_non_differentiable(entropy)
        return chosen - log_total, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, *_ = ctx.saved_tensors
        grad_hidden = torch.zeros(hidden.shape, dtype=grad_logprobs.dtype, device=hidden.device)
        grad_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        grad_bias = torch.empty_like(bias) if ctx.needs_input_grad[2] else None
        for start in range(0, weight.shape[0], ctx.columns):
            block = slice(start, start + ctx.columns)
            grad = _block_gradient(ctx, grad_logprobs, grad_entropy, block)
            if grad_bias is not None:
                grad_bias[block] = grad.sum(dim=0)
            narrow = grad.to(hidden.dtype)
            if grad_weight is not None:
                torch.mm(narrow.t(), hidden, out=grad_weight[block])
            grad_hidden += narrow @ weight[block]
        return grad_hidden.to(hidden.dtype), grad_weight, grad_bias, None, None, None, None, None


def _start(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Running maximum, sum of powers, sum of powers times logits below the maximum, the token's logit; each (N)."""
    wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    zeros = torch.zeros(hidden.shape[0], dtype=wide, device=hidden.device)
    return torch.full_like(zeros, torch.finfo(wide).min / 2), zeros, zeros, zeros.clone()


def _block_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, block: slice, temperature: float, head: Head
) -> tuple[Tensor, Tensor | None]:
    """Logits over temperature, (N, columns) fp32, and the `tanh` of the soft cap, which its derivative needs."""
    raw = torch.nn.functional.linear(hidden, weight[block], None if bias is None else bias[block])
    logits = raw if raw.dtype == torch.float64 else raw.float()
    if head.softcap is None:
        return logits.mul_(head.scale / temperature), None
    tanh = logits.mul_(head.scale / head.softcap).tanh_()
    return tanh * (head.softcap / temperature), tanh


def _block_gradient(ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor, block: slice) -> Tensor:
    """Gradient for a block of the matrix product, (N, columns) fp32.

    With z the logits over temperature: d logprob / dz = onehot - p, and d entropy / dz = -p (log p + entropy).
    """
    hidden, weight, bias, tokens, log_total, entropy = ctx.saved_tensors
    logits, tanh = _block_logits(hidden, weight, bias, block, ctx.temperature, ctx.head)
    logprobs = logits.sub_(log_total.unsqueeze(1)).clamp_(min=LOWEST)
    slope = -grad_logprobs.unsqueeze(1)
    if ctx.entropy_grad:
        slope = slope - grad_entropy.unsqueeze(1) * (logprobs + entropy.unsqueeze(1))
    grad = logprobs.exp_().mul_(slope)
    column, inside = _in_block(tokens, block.start, grad.shape[1])
    grad.scatter_add_(1, column, torch.where(inside, grad_logprobs.unsqueeze(1), 0))
    grad.mul_(ctx.head.scale / ctx.temperature)
    return grad if tanh is None else grad.mul_(1 - tanh * tanh)


def _in_block(tokens: Tensor, start: int, width: int) -> tuple[Tensor, Tensor]:
    """(column inside the block, whether the token is in it), each (N, 1)."""
    column = (tokens - start).unsqueeze(1)
    return column.clamp(0, width - 1), (column >= 0) & (column < width)
