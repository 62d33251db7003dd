"""Log-probabilities and entropy of tokens: of whole logits, and by a fused language-model head.

The head goes from hidden states to both without materialising the (N, V) logits. Its two passes
process the vocabulary in blocks. The forward pass keeps the maximum and the sums of each block, and
joins them (as in Milakov and Gimelshein 2018, "Online normalizer calculation for softmax"); the
backward pass recomputes the logits of each block. A block of the weight's gradient is one matrix
product over all rows, so it is as exact as that of a plain linear layer in any number format.

With so many rows that a block of the fewest columns would be too large, both passes go through the
rows in pieces as well. A block of the weight's gradient is then a sum in fp32 of one product for
each piece.

On a CPU the blocks of the forward pass have the same columns for any number of rows, and sampling
adds in the same order (`vocabulary_sums.py`): a log-prob depends on the logits of its row alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dschat_ppo.algorithms.vocabulary_sums import CPU_COLUMNS, joined_blocks, largest_logit

BLOCK_BYTES = 8 * 2**20  # size of one block of fp32 logits: it should fit in the cache of a CPU
GPU_BLOCK_BYTES = 256 * 2**20  # a GPU is faster with few large products
SMALLEST_BLOCK = 256  # columns: narrower products are inefficient
FEWEST_ROWS = 4  # of a product on a CPU: MKL adds in another order where there are fewer
HALF = (torch.float16, torch.bfloat16)
# `torch.mm(..., out_dtype=...)`, which older versions lack
FP32_PRODUCTS = hasattr(torch.ops.aten.mm, "dtype")
# logit of a token that cannot be drawn: probability 0, and finite, so that 0 x it is 0
NEVER = -1e30
# a logit this far below the largest has probability 0 even in fp64, and 0 x -inf would be NaN
LOWEST = -1e4


@dataclass(frozen=True)
class Forbidden:
    """Tokens that cannot be drawn at N positions; the distribution is over the others there."""

    positions: Tensor  # (N,) bool, True where `ids` cannot be drawn
    ids: tuple[int, ...]
    always: tuple[int, ...] = ()  # what cannot be drawn at any position

    def at(self, index: Tensor | slice) -> Forbidden:
        """At some of the positions, in the order of `index`."""
        return replace(self, positions=self.positions[index])


@dataclass(frozen=True)
class Head:
    """From the output x of a model's head to its logits: `softcap * tanh(scale * x / softcap)` or
    `scale * x`."""

    scale: float = 1.0  # Cohere's `logit_scale`, or 1 / Granite's `logits_scaling`
    softcap: float | None = None  # Gemma's soft cap; None = off


PLAIN_HEAD = Head()


@dataclass(frozen=True)
class OutputLayer:
    """From what a model's logits at N positions are computed: `hidden` (N, H) of any floating
    dtype, `weight` (V, H) and `bias` (V,) of its head, of the same dtype; N may be 0. `whole()` is
    a context in which the weight is not partitioned; opening it may be collective."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None = None
    head: Head = PLAIN_HEAD  # transform of the product into logits
    whole: Callable[[], AbstractContextManager[Any]] = nullcontext


@dataclass(frozen=True)
class LogitBlocks:
    """How the logits (N, V) are divided, so that they never exist as a whole."""

    pieces: list[slice]  # of the N rows; one where there are none
    columns: int  # tokens of a block of the vocabulary; the last one may have fewer
    width: int  # tokens of the vocabulary that are used, the first ones

    @classmethod
    def of(
        cls, hidden: Tensor, width: int, block_bytes: int | None, share: float = 1.0
    ) -> LogitBlocks:
        """Blocks of fp32 logits of `hidden` (N, H), each of at most `share` of `block_bytes`; None:
        by device."""
        if not block_bytes:
            block_bytes = BLOCK_BYTES if hidden.device.type == "cpu" else GPU_BLOCK_BYTES
        limit = int(block_bytes * share)
        count = hidden.shape[0]
        fitting = limit // (4 * max(1, count))
        # odd strides cost a GPU three quarters of its speed
        columns = max(1, fitting // SMALLEST_BLOCK) * SMALLEST_BLOCK
        return cls(_row_pieces(count, columns, limit), columns, width)

    @classmethod
    def of_forward_pass(cls, hidden: Tensor, width: int, block_bytes: int | None) -> LogitBlocks:
        """As `of`, but on a CPU of `CPU_COLUMNS` columns unless `block_bytes` says more."""
        if hidden.device.type != "cpu" or block_bytes:
            return cls.of(hidden, width, block_bytes)
        return cls(_row_pieces(len(hidden), CPU_COLUMNS, BLOCK_BYTES), CPU_COLUMNS, width)

    @property
    def vocabulary(self) -> list[slice]:
        """The tokens of each block."""
        starts = range(0, self.width, self.columns)
        return [slice(start, min(start + self.columns, self.width)) for start in starts]


def _row_pieces(count: int, columns: int, limit: int) -> list[slice]:
    """`count` rows in pieces, so that fp32 logits of a piece and of `columns` tokens have at most
    `limit` bytes; at least one piece."""
    rows = max(1, limit // (4 * columns))
    return [slice(start, start + rows) for start in range(0, max(1, count), rows)]


def fused_token_scores(
    layer: OutputLayer,
    tokens: Tensor,
    temperature: float = 1.0,
    entropy_grad: bool = False,
    block_bytes: int | None = None,
    forbidden: Forbidden | None = None,
    kernels: Any = None,
) -> tuple[Tensor, Tensor]:
    """`token_logprobs` and `token_entropy` of the logits of a language model's `layer`, whose
    weight must be whole.

    Args:
        tokens: (N,) int64, the token sampled at each position, at `temperature`.
        entropy_grad: compute the gradient of the entropy too, which makes the backward pass slower.
        block_bytes: largest size of one block of fp32 logits, of which up to three exist at a time,
            or in the backward pass of a soft cap five. None: by device.
        forbidden: tokens that cannot be drawn.
        kernels: the module `gpu_kernels`, whose functions for a block of logits take the place of
            PyTorch's operations; None: these.

    Returns:
        (logprobs, entropy), each (N,) fp32, or fp64 if `layer.hidden` is. The first has a gradient
            for hidden, weight and bias. A logit of -inf adds 0 to the entropy, and 0 to every
            gradient but that of this token's log-prob.
    """
    scores: tuple[Tensor, Tensor] = _FusedTokenScores.apply(  # type: ignore[no-untyped-call]
        layer.hidden,
        layer.weight,
        layer.bias,
        tokens,
        layer.head,
        temperature,
        forbidden,
        entropy_grad,
        block_bytes,
        kernels,
    )
    return scores


class _FusedTokenScores(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0913
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        tokens: Tensor,
        head: Head,
        temperature: float,
        forbidden: Forbidden | None,
        entropy_grad: bool,
        block_bytes: int | None,
        kernels: Any,
    ) -> tuple[Tensor, Tensor]:
        layer = OutputLayer(hidden, weight, bias, head)
        blocks = LogitBlocks.of_forward_pass(hidden, weight.shape[0], block_bytes)
        # (N,) each: log-prob of the token, log of the sum of exponentials, entropy
        logprobs = torch.empty(len(tokens), dtype=sum_dtype(hidden), device=hidden.device)
        log_total = torch.empty_like(logprobs)
        entropy = torch.empty_like(logprobs)
        for piece in blocks.pieces:
            arguments = (layer, tokens, piece, blocks.vocabulary, temperature, forbidden)
            if kernels is not None:
                scores = _scores_by_kernels(kernels, *arguments)
            else:
                scores = _scores_of_piece(*arguments)
            logprobs[piece], log_total[piece], entropy[piece] = scores
        # Save the weight itself, as nn.Linear does: ZeRO-3 gathers it again before the backward
        # pass.
        ctx.save_for_backward(hidden, weight, bias, tokens, log_total, entropy)
        ctx.head = head
        ctx.temperature = temperature
        ctx.forbidden = forbidden
        ctx.entropy_grad = entropy_grad
        ctx.blocks = LogitBlocks.of(hidden, weight.shape[0], block_bytes)
        ctx.kernels = kernels
        if not entropy_grad:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, tokens, log_total, entropy = ctx.saved_tensors
        layer = OutputLayer(hidden, weight, bias, ctx.head)
        if not ctx.entropy_grad:
            grad_entropy = torch.zeros_like(grad_logprobs)
        terms = torch.stack([log_total, entropy, grad_logprobs, grad_entropy])  # (4, N)

        def gradient_by_kernels(block: slice, piece: slice) -> Tensor:
            """`block_gradient` by a kernel, in the dtype of `hidden` where nothing follows."""
            logits, tanh, factor = _block_for_kernels(
                layer, block, piece, ctx.temperature, ctx.forbidden
            )
            dtype = torch.float32
            if tanh is None and bias is None:
                dtype = hidden.dtype
            grad: Tensor = ctx.kernels.scores_backward(
                logits, tokens[piece], terms[:, piece].contiguous(), block.start, factor, dtype
            )
            if tanh is None:
                return grad
            return of_product_(grad, tanh, ctx.head, ctx.temperature)

        def block_gradient(block: slice, piece: slice) -> Tensor:
            """Gradient of a block of the matrix product for a piece of the rows, (rows, columns)
            fp32. With z = logits / temperature: d logprob / dz = onehot - p, and d entropy / dz =
            -p (log p + entropy)."""
            logits, tanh = block_logits(layer, block, piece, ctx.temperature, ctx.forbidden)
            logprobs = logits.sub_(log_total[piece].unsqueeze(1))
            if _may_be_infinite(layer):
                logprobs.clamp_(min=LOWEST)
            of_logprob = grad_logprobs[piece].unsqueeze(1)  # (rows, 1)
            slope = -of_logprob
            if ctx.entropy_grad:
                of_entropy = grad_entropy[piece].unsqueeze(1)
                slope = slope - of_entropy * (logprobs + entropy[piece].unsqueeze(1))
            grad = logprobs.exp_().mul_(slope)
            column, inside = in_block(tokens[piece].unsqueeze(1), block.start, grad.shape[1])
            grad.scatter_add_(1, column, torch.where(inside, of_logprob, 0))
            return of_product_(grad, tanh, ctx.head, ctx.temperature)

        function = block_gradient
        if ctx.kernels is not None:
            function = gradient_by_kernels
        gradients = output_layer_gradients(
            layer, ctx.blocks, ctx.needs_input_grad, function, grad_logprobs.dtype
        )
        return *gradients, *[None] * 7


def _scores_of_piece(
    layer: OutputLayer,
    tokens: Tensor,
    piece: slice,
    vocabulary: list[slice],
    temperature: float,
    forbidden: Forbidden | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Of a `piece` of the rows of `layer`, (rows,) each: the log-prob of the token, the log of the
    sum of the exponentials of all logits, and the entropy. `tokens` (N,) are those of all rows, and
    `forbidden` holds positions of all rows.

    With z the logits and z_b the largest of a block of the `vocabulary`, the sums of exp(z - z_b)
    and of exp(z - z_b) (z - z_b) are computed block by block."""
    tokens = tokens[piece].unsqueeze(1)  # (rows, 1)
    infinite = _may_be_infinite(layer)
    dtype = sum_dtype(layer.hidden)
    chosen = torch.zeros(len(tokens), dtype=dtype, device=layer.hidden.device)
    # of each block, (rows,): z_b, and the sums of exp(z - z_b) and of exp(z - z_b) (z - z_b)
    block_largest = []
    block_totals = []
    block_weighted = []
    for block in vocabulary:
        logits, _ = block_logits(layer, block, piece, temperature, forbidden)
        column, inside = in_block(tokens, block.start, logits.shape[1])  # (rows, 1) each
        chosen += torch.where(inside, logits.gather(1, column), 0).squeeze(1)
        largest = largest_logit(logits)
        logits.sub_(largest.unsqueeze(1))
        if infinite:
            logits.clamp_(min=LOWEST)
        powers = torch.exp(logits)
        total = powers.sum(dim=1)
        weighted = torch.linalg.vecdot(powers, logits)
        del powers
        del logits  # before the next block is made
        block_largest.append(largest)
        block_totals.append(total)
        block_weighted.append(weighted)
    largest_of_blocks = torch.stack(block_largest, dim=1)  # (rows, blocks)
    totals = torch.stack(block_totals, dim=1)
    largest, total, shrink = joined_blocks(largest_of_blocks, totals)
    weighted = torch.stack(block_weighted, dim=1)
    weighted = weighted + (largest_of_blocks - largest.unsqueeze(1)) * totals
    weighted = (weighted * shrink).sum(dim=1)
    log_total = total.log()
    return chosen - largest - log_total, largest + log_total, log_total - weighted / total


def _scores_by_kernels(
    kernels: Any,
    layer: OutputLayer,
    tokens: Tensor,
    piece: slice,
    vocabulary: list[slice],
    temperature: float,
    forbidden: Forbidden | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`_scores_of_piece` by one of the `kernels` for each block, in fp32."""
    tokens = tokens[piece]
    sums = torch.zeros(4, len(tokens), device=tokens.device)
    largest, total, weighted, chosen = sums
    largest.fill_(torch.finfo(torch.float32).min / 2)
    for block in vocabulary:
        logits, _, factor = _block_for_kernels(layer, block, piece, temperature, forbidden)
        kernels.add_scores_(logits, tokens, sums, block.start, factor)
        del logits  # before the next block is made
    log_total = total.log()
    return chosen - largest - log_total, largest + log_total, log_total - weighted / total


def output_layer_gradients(
    layer: OutputLayer,
    blocks: LogitBlocks,
    needs_grad: Sequence[bool],
    block_gradient: Callable[[slice, slice], Tensor],
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of hidden (N, H), weight (V, H) and bias (V,) of an output layer, each in the dtype
    of what it is the gradient of; None: not asked for (`needs_grad` of the three; the first is
    computed anyway), or there is no bias. The weight must be whole. Products of blocks and of
    pieces are summed in `dtype`.

    `block_gradient`: (slice of the vocabulary, slice of the N rows) -> the gradient of this block
    of `layer.hidden @ weight.T + bias` (N, V), (rows, columns).
    """
    hidden = layer.hidden
    weight = layer.weight
    grad_hidden = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
    empty_like = torch.empty_like
    if blocks.width < weight.shape[0]:  # no block writes the rows of tokens beyond `width`
        empty_like = torch.zeros_like
    grad_weight = None
    if needs_grad[1]:
        grad_weight = empty_like(weight)
    grad_bias = None
    if layer.bias is not None and needs_grad[2]:
        grad_bias = empty_like(layer.bias)
    for block in blocks.vocabulary:
        weight_sum: Tensor | None = None  # over pieces; one piece needs none
        bias_sum: Tensor | float = 0.0
        for piece in blocks.pieces:
            grad = block_gradient(block, piece)
            if grad_bias is not None:
                bias_sum = bias_sum + grad.sum(dim=0)
            grad = grad.to(hidden.dtype)  # (rows, columns)
            if grad_weight is not None and len(blocks.pieces) == 1:
                torch.mm(grad.t(), hidden, out=grad_weight[block])  # (columns, N) @ (N, H)
            elif grad_weight is not None:
                product = (grad.t() @ hidden[piece]).to(dtype)
                if weight_sum is None:
                    weight_sum = product
                else:
                    weight_sum = weight_sum.add_(product)
            grad_hidden[piece] += grad @ weight[block]  # (rows, columns) @ (columns, H)
            del grad  # before the next block is made
        if grad_weight is not None and weight_sum is not None:
            grad_weight[block] = weight_sum
        if grad_bias is not None:
            grad_bias[block] = bias_sum
    return grad_hidden.to(hidden.dtype), grad_weight, grad_bias


def sum_dtype(hidden: Tensor) -> torch.dtype:
    """The dtype of sums over the vocabulary."""
    if hidden.dtype == torch.float64:
        return torch.float64
    return torch.float32


def _may_be_infinite(layer: OutputLayer) -> bool:
    """Whether a logit may be -inf in a sound model: by a bias of -inf, or beyond the range of
    fp16."""
    return layer.bias is not None or layer.hidden.dtype == torch.float16


def block_logits(
    layer: OutputLayer,
    block: slice,
    piece: slice,
    temperature: float,
    forbidden: Forbidden | None,
) -> tuple[Tensor, Tensor | None]:
    """Logits / temperature of `layer` for a block of tokens and a piece of the rows, fp32 (rows,
    columns), `NEVER` for forbidden tokens, which the caller may change in place; and the `tanh` of
    the soft cap, which the derivative needs, None without a soft cap."""
    bias = None
    if layer.bias is not None:
        bias = layer.bias[block]
    logits = fp32_product(layer.hidden[piece], layer.weight[block], bias)
    head = layer.head
    factor = head.scale / temperature
    tanh = None
    if head.softcap is not None:
        tanh = logits.mul_(head.scale / head.softcap).tanh_()
        logits = tanh * (head.softcap / temperature)
    elif factor != 1:
        logits.mul_(factor)
    if forbidden is not None:
        forbid_(logits, forbidden.at(piece), block.start)
    return logits, tanh


def _block_for_kernels(
    layer: OutputLayer,
    block: slice,
    piece: slice,
    temperature: float,
    forbidden: Forbidden | None,
) -> tuple[Tensor, Tensor | None, float]:
    """`block_logits`, and a factor that a kernel multiplies the logits by, so that they are read
    once less."""
    if layer.head.softcap is not None:
        logits, tanh = block_logits(layer, block, piece, temperature, forbidden)
        return logits, tanh, 1.0
    unscaled = replace(layer, head=PLAIN_HEAD)
    logits, _ = block_logits(unscaled, block, piece, 1.0, forbidden)
    return logits, None, layer.head.scale / temperature


def forbid_(logits: Tensor, forbidden: Forbidden | None, first: int = 0) -> None:
    """Set the logits (N, columns) fp32 of forbidden tokens to `NEVER`; column 0 is that of token
    `first`."""
    if forbidden is None:
        return
    for token in forbidden.ids:
        if 0 <= token - first < logits.shape[1]:
            logits[:, token - first].masked_fill_(forbidden.positions, NEVER)
    for token in forbidden.always:
        if 0 <= token - first < logits.shape[1]:
            logits[:, token - first] = NEVER


def fp32_product(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The linear layer (N, columns) in fp32, or fp64; on a GPU without rounding to bf16 or fp16
    before, and on a CPU with the bits of a product of many rows."""
    count = len(hidden)
    if count < FEWEST_ROWS and not hidden.is_cuda:
        hidden = torch.nn.functional.pad(hidden, (0, 0, 0, FEWEST_ROWS - count))
    if hidden.is_cuda and hidden.dtype in HALF and bias is None and FP32_PRODUCTS:
        return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    raw = torch.nn.functional.linear(hidden, weight, bias)[:count]
    if raw.dtype == torch.float64:
        return raw
    return raw.float()


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
