"""Log-probabilities and entropy of tokens: of whole logits, and by a fused language-model head.

The head goes from hidden states to both without materialising the (N, V) logits. Its two passes
process the vocabulary in blocks. The forward pass keeps a running maximum and running sums for each
row (Milakov and Gimelshein 2018, "Online normalizer calculation for softmax"); the backward pass
recomputes the logits of each block. A block of the weight's gradient is one matrix product over all
rows, so it is as exact as that of a plain linear layer in any number format.

With so many rows that a block of the fewest columns would be too large, both passes go through the
rows in pieces as well. A block of the weight's gradient is then a sum in fp32 of one product for
each piece.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

BLOCK_BYTES = 8 * 2**20  # size of one block of fp32 logits: it should fit in the cache of a CPU
GPU_BLOCK_BYTES = 256 * 2**20  # a GPU is faster with few large products
SMALLEST_BLOCK = 256  # columns: narrower products are inefficient
HALF = (torch.float16, torch.bfloat16)
# `torch.mm(..., out_dtype=...)`, which older versions lack
FP32_PRODUCTS = hasattr(torch.ops.aten.mm, "dtype")
# positions (N,) bool, and the tokens that cannot be drawn there
Forbidden = tuple[Tensor, tuple[int, ...]]
# logit of a token that cannot be drawn: probability 0, and finite, so that 0 x it is 0
NEVER = -1e30
# a logit this far below the largest has probability 0 even in fp64, and 0 x -inf would be NaN
LOWEST = -1e4


@dataclass(frozen=True)
class Head:
    """From the output x of a model's head to its logits: `softcap * tanh(scale * x / softcap)` or
    `scale * x`."""

    scale: float = 1.0  # Cohere's `logit_scale`, or 1 / Granite's `logits_scaling`
    softcap: float | None = None  # Gemma's soft cap; None = off


PLAIN_HEAD = Head()


def fused_token_scores(  # noqa: PLR0913
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tokens: Tensor,
    temperature: float = 1.0,
    head: Head = PLAIN_HEAD,
    entropy_grad: bool = False,
    block_bytes: int | None = None,
    forbidden: Forbidden | None = None,
) -> tuple[Tensor, Tensor]:
    """`token_logprobs` and `token_entropy` of the logits that a language model's head computes from
    `hidden`.

    Args:
        hidden: (N, H), any floating dtype; N may be 0.
        weight: (V, H) of the head, same dtype; `bias` (V,) or None.
        tokens: (N,) int64, the token sampled at each position, at `temperature`.
        head: transform of the product into logits.
        entropy_grad: compute the gradient of the entropy too, which makes the backward pass slower.
        block_bytes: largest size of one block of fp32 logits, of which up to three exist at a time,
            or in the backward pass of a soft cap five. None: by device.
        forbidden: positions (N,) bool at which some tokens cannot be drawn, and their ids; the
            distribution is over the other tokens there.

    Returns:
        (logprobs, entropy), each (N,) fp32, or fp64 if `hidden` is. The first has a gradient
            for hidden, weight and bias. A logit of -inf adds 0 to the entropy, and 0 to every
            gradient but that of this token's log-prob.
    """
    columns, rows = block_shape(hidden, block_bytes)
    scores: tuple[Tensor, Tensor] = _FusedTokenScores.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, tokens, temperature, head, entropy_grad, columns, rows, forbidden
    )
    return scores


def block_shape(hidden: Tensor, block_bytes: int | None, share: float = 1.0) -> tuple[int, int]:
    """(columns, rows) of a block of fp32 logits of at most `share` of `block_bytes`; None: by
    device."""
    limit = (
        block_bytes or (BLOCK_BYTES if hidden.device.type == "cpu" else GPU_BLOCK_BYTES)
    ) * share
    fitting = int(limit) // (4 * max(1, hidden.shape[0]))
    # odd strides cost a GPU three quarters of its speed
    columns = max(1, fitting // SMALLEST_BLOCK) * SMALLEST_BLOCK
    return columns, max(1, int(limit) // (4 * columns))


def row_pieces(count: int, rows: int) -> list[slice]:
    """The rows in pieces of at most `rows`; one piece where there are none."""
    return [slice(start, start + rows) for start in range(0, max(1, count), rows)]


class _FusedTokenScores(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0913
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        tokens: Tensor,
        temperature: float,
        head: Head,
        entropy_grad: bool,
        columns: int,
        rows: int,
        forbidden: Forbidden | None,
    ) -> tuple[Tensor, Tensor]:
        if hidden.dtype == torch.float64:
            dtype = torch.float64
        else:
            dtype = torch.float32
        infinite = _may_be_infinite(hidden, bias)
        by_softmax = has_fused_softmax(hidden.device) and not infinite
        pieces = row_pieces(hidden.shape[0], rows)
        # of each piece, (rows,) each: logit of the token, log of the sum of exponentials, entropy
        found = []
        for piece in pieces:
            x = hidden[piece]
            chosen = torch.zeros(len(tokens[piece]), dtype=dtype, device=hidden.device)
            largest = torch.full_like(chosen, torch.finfo(dtype).min / 2)
            total = chosen.clone()
            weighted = chosen.clone()
            for start in range(0, weight.shape[0], columns):
                logits = block_logits(
                    x, weight, bias, slice(start, start + columns), temperature, head
                )[0]
                forbid_(logits, of_rows(forbidden, piece), start)
                # (rows, 1) each
                column, inside = in_block(tokens[piece].unsqueeze(1), start, logits.shape[1])
                chosen += torch.where(inside, logits.gather(1, column), 0).squeeze(1)
                before = largest
                if by_softmax:
                    largest, of_block, sum_of_block = _sums_by_softmax(before, logits)
                else:
                    largest = torch.maximum(before, logits.amax(dim=1))
                    logits.sub_(largest.unsqueeze(1))
                    if infinite:
                        logits.clamp_(min=LOWEST)
                    powers = torch.exp(logits)
                    of_block = powers.sum(dim=1)
                    sum_of_block = torch.linalg.vecdot(powers, logits)
                    del powers
                del logits  # before the next block is made
                shrink = torch.exp(before - largest)
                weighted = (weighted + (before - largest) * total) * shrink + sum_of_block
                total = total * shrink + of_block
            found.append((chosen, largest + total.log(), total.log() - weighted / total))
        chosen, log_total, entropy = (torch.cat(parts) for parts in zip(*found, strict=True))
        # Save the weight itself, as nn.Linear does: ZeRO-3 gathers it again before the backward
        # pass.
        ctx.save_for_backward(hidden, weight, bias, tokens, log_total, entropy)
        ctx.temperature, ctx.head, ctx.entropy_grad = temperature, head, entropy_grad
        ctx.columns, ctx.pieces, ctx.forbidden = columns, pieces, forbidden
        if not entropy_grad:
            ctx.mark_non_differentiable(entropy)
        return chosen - log_total, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, *_ = ctx.saved_tensors

        def gradient(block: slice, piece: slice) -> Tensor:
            return _block_gradient(ctx, grad_logprobs[piece], grad_entropy[piece], block, piece)

        return *layer_gradients(ctx, hidden, weight, bias, gradient, grad_logprobs.dtype), *[
            None
        ] * 7


def layer_gradients(
    ctx: Any,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gradient: Callable[[slice, slice], Tensor],
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of the first three inputs of a Function, `hidden` (N, H), `weight` (V, H) and
    `bias` (V,), from that of each block of their matrix product: `gradient(columns, rows)` (rows,
    columns) in `dtype`. `ctx.columns` is the width of a block, `ctx.pieces` are the rows; columns
    of the weight beyond `ctx.width`, if that is set, are not used."""
    width = getattr(ctx, "width", weight.shape[0])
    unused = width < weight.shape[0]
    grad_hidden = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
    empty_like = torch.zeros_like if unused else torch.empty_like
    if ctx.needs_input_grad[1]:
        grad_weight = empty_like(weight)
    else:
        grad_weight = None
    if bias is not None and ctx.needs_input_grad[2]:
        grad_bias = empty_like(bias)
    else:
        grad_bias = None
    for start in range(0, width, ctx.columns):
        block = slice(start, min(start + ctx.columns, width))
        of_weight: Tensor | None = None  # a sum over pieces; one piece needs none
        of_bias: Tensor | float = 0.0
        for piece in ctx.pieces:
            grad = gradient(block, piece)
            if grad_bias is not None:
                of_bias = of_bias + grad.sum(dim=0)
            grad = grad.to(hidden.dtype)  # (rows, columns)
            if grad_weight is not None and len(ctx.pieces) == 1:
                torch.mm(grad.t(), hidden, out=grad_weight[block])  # (columns, N) @ (N, H)
            elif grad_weight is not None:
                product = (grad.t() @ hidden[piece]).to(dtype)
                if of_weight is None:
                    of_weight = product
                else:
                    of_weight = of_weight.add_(product)
            grad_hidden[piece] += grad @ weight[block]  # (rows, columns) @ (columns, H)
            del grad  # before the next block is made
        if grad_weight is not None and of_weight is not None:
            grad_weight[block] = of_weight
        if grad_bias is not None:
            grad_bias[block] = of_bias
    return grad_hidden.to(hidden.dtype), grad_weight, grad_bias


def _sums_by_softmax(before: Tensor, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The new largest logit z*, and the block's sums of exp(z - z*) and exp(z - z*) (z - z*),
    (rows,) each, in fewer passes over the block: a GPU computes the softmax p = exp(z - z_b) / S in
    one, with z_b the block's largest logit. S is 1 / max p, and the sum of exp(z - z_b) (z - z*) is
    S (sum of p z - z*)."""
    shares = torch.softmax(logits, dim=1)
    top, column = shares.max(dim=1)  # (rows,) each
    highest = logits.gather(1, column.unsqueeze(1)).squeeze(1)
    mean = torch.linalg.vecdot(shares, logits)
    largest = torch.maximum(before, highest)
    of_block = torch.exp(highest - largest) / top
    return largest, of_block, of_block * (mean - largest)


def has_fused_softmax(device: torch.device) -> bool:
    """Whether the softmax of a block is one pass over it; on a CPU the passes cost little, a block
    is in its cache."""
    return device.type == "cuda"


def _may_be_infinite(hidden: Tensor, bias: Tensor | None) -> bool:
    """Whether a logit may be -inf in a sound model: by a bias of -inf, or beyond the range of
    fp16."""
    return bias is not None or hidden.dtype == torch.float16


def block_logits(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    block: slice,
    temperature: float,
    head: Head,
) -> tuple[Tensor, Tensor | None]:
    """Logits / temperature, (N, columns) fp32, and the `tanh` of the soft cap, which the derivative
    needs."""
    logits = fp32_product(hidden, weight[block], None if bias is None else bias[block])
    if head.softcap is None:
        factor = head.scale / temperature
        return logits if factor == 1 else logits.mul_(factor), None
    tanh = logits.mul_(head.scale / head.softcap).tanh_()
    return tanh * (head.softcap / temperature), tanh


def forbid_(logits: Tensor, forbidden: Forbidden | None, first: int = 0) -> None:
    """Set the logits (N, columns) fp32 of forbidden tokens to `NEVER`; column 0 is that of token
    `first`."""
    if forbidden is not None:
        places, ids = forbidden
        for token in ids:
            if 0 <= token - first < logits.shape[1]:
                logits[:, token - first].masked_fill_(places, NEVER)


def of_rows(forbidden: Forbidden | None, piece: slice) -> Forbidden | None:
    if forbidden is None:
        return None
    return (forbidden[0][piece], forbidden[1])


def fp32_product(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The linear layer (N, columns) in fp32, or fp64; on a GPU without rounding to bf16 or fp16
    before."""
    if hidden.is_cuda and hidden.dtype in HALF and bias is None and FP32_PRODUCTS:
        return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    raw = torch.nn.functional.linear(hidden, weight, bias)
    if raw.dtype == torch.float64:
        return raw
    return raw.float()


def _block_gradient(
    ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor, block: slice, piece: slice
) -> Tensor:
    """Gradient of a block of the matrix product for a piece of the rows, (rows, columns) fp32. With
    z = logits / temperature: d logprob / dz = onehot - p, and d entropy / dz = -p (log p +
    entropy)."""
    hidden, weight, bias, tokens, log_total, entropy = ctx.saved_tensors
    hidden = hidden[piece]
    tokens = tokens[piece]
    log_total = log_total[piece]
    entropy = entropy[piece]
    logits, tanh = block_logits(hidden, weight, bias, block, ctx.temperature, ctx.head)
    forbid_(logits, of_rows(ctx.forbidden, piece), block.start)
    logprobs = logits.sub_(log_total.unsqueeze(1))
    if _may_be_infinite(hidden, bias):
        logprobs.clamp_(min=LOWEST)
    slope = -grad_logprobs.unsqueeze(1)
    if ctx.entropy_grad:
        slope = slope - grad_entropy.unsqueeze(1) * (logprobs + entropy.unsqueeze(1))
    grad = logprobs.exp_().mul_(slope)
    column, inside = in_block(tokens.unsqueeze(1), block.start, grad.shape[1])
    grad.scatter_add_(1, column, torch.where(inside, grad_logprobs.unsqueeze(1), 0))
    return of_product_(grad, tanh, ctx.head, ctx.temperature)


def of_product_(grad: Tensor, tanh: Tensor | None, head: Head, temperature: float) -> Tensor:
    """The gradient of logits / temperature, changed in place into that of the matrix product that
    they come from."""
    factor = head.scale / temperature
    if factor != 1:
        grad.mul_(factor)
    if tanh is None:
        return grad
    return grad.mul_(1 - tanh * tanh)


def in_block(tokens: Tensor, start: int, width: int) -> tuple[Tensor, Tensor]:
    """Tokens (N, k) -> (column in the block, whether the token is in the block), each (N, k)."""
    column = tokens - start
    return column.clamp(0, width - 1), (column >= 0) & (column < width)


def token_logprobs(logits: Tensor, tokens: Tensor, temperature: float = 1.0) -> Tensor:
    """`log softmax(logits / temperature)[tokens]` in fp32: (..., V) of any floating dtype, (...)
    int64 -> (...)."""
    scaled = logits.float() / temperature
    chosen = scaled.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)  # (..., V) -> (..., 1) -> (...)
    return chosen - torch.logsumexp(scaled, dim=-1)


def token_entropy(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Entropy in nats of `softmax(logits / temperature)`: `logsumexp(z) - sum(softmax(z) z)`, (...,
    V) -> (...) fp32. A token of logit -inf has probability 0 and adds 0 to value and gradient."""
    scaled = logits.float() / temperature
    factors = scaled.masked_fill(scaled == -torch.inf, 0.0)  # 0 x -inf is NaN
    return torch.logsumexp(scaled, dim=-1) - (torch.softmax(scaled, dim=-1) * factors).sum(dim=-1)
