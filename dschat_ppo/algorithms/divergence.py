"""Divergence between the next-token distributions of a student and a teacher, from hidden states,
in blocks.

With p the student's and q the teacher's probabilities of all tokens, both at the same temperature:

- `reverse_kl`: `KL(p || q) = sum p (log p - log q)`, on responses of the student (Gu et al. 2024,
  "MiniLLM").
- `forward_kl`: `KL(q || p)`.
- `jsd`: `beta KL(q || m) + (1 - beta) KL(p || m)`, with `m = beta q + (1 - beta) p` (Agarwal et al.
  2024, "On-policy distillation of language models", GKD).

No (N, V) tensor exists, of either model: both passes go through the vocabulary in blocks, as in
`fused_logprobs`, and the backward pass computes the logits of each block again. With `top_k` the
sums have k + 1 terms: the teacher's k most likely tokens, and all others as one ("tail").
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dschat_ppo.algorithms.fused_logprobs import (
    LOWEST,
    Forbidden,
    Head,
    LogitBlocks,
    OutputLayer,
    block_logits,
    in_block,
    of_product_,
    output_layer_gradients,
    sum_dtype,
)

SHARE_OF_BLOCK = 0.5  # of the logits of one model: those of two exist at a time


@dataclass(frozen=True)
class Divergence:
    """What is summed over the vocabulary."""

    kind: str  # "reverse_kl", "forward_kl" or "jsd"
    beta: float = 0.5  # of "jsd": share of the teacher in the mixture, above 0 and below 1
    top_k: int = 0  # number of the teacher's tokens that are terms of their own; 0: all tokens are


def dense_divergence(log_p: Tensor, log_q: Tensor, kind: str, beta: float = 0.5) -> Tensor:
    """The divergence of normalised log-probs (..., V) of student and teacher, (...), with gradients
    of both. They must be finite: -1e4 stands for probability 0."""
    if kind == "reverse_kl":
        return (log_p.exp() * (log_p - log_q)).sum(dim=-1)
    if kind == "forward_kl":
        return (log_q.exp() * (log_q - log_p)).sum(dim=-1)
    log_m = _log_mixture(log_p, log_q, beta)
    of_teacher = log_q.exp() * (log_q - log_m)
    of_student = log_p.exp() * (log_p - log_m)
    return (beta * of_teacher + (1 - beta) * of_student).sum(dim=-1)


def _log_mixture(log_p: Tensor, log_q: Tensor, beta: float) -> Tensor:
    return torch.logaddexp(log_p + math.log1p(-beta), log_q + math.log(beta))


def fused_divergence(
    student: OutputLayer,
    teacher: OutputLayer,
    divergence: Divergence,
    temperature: float = 1.0,
    block_bytes: int | None = None,
    forbidden: Forbidden | None = None,
) -> Tensor:
    """The divergence at N positions, (N,) fp32, or fp64 if the hidden states are, with a gradient
    for the student's `hidden` (N, H), `weight` (V, H), which must be whole, and `bias` (V,).

    Where the vocabularies differ in size, because the rows of one or both are padded, the
    distributions are over the tokens that both have. A log-prob below -1e4 counts as -1e4, so a
    divergence that is infinite becomes large.

    Args:
        student: gets the gradient.
        teacher: at the same positions; it gets none.
        divergence: which one, and over how many tokens of the teacher.
        temperature: the logits of both are divided by it.
        block_bytes: largest size of a block of fp32 logits of both models; None: by device.
        forbidden: tokens that cannot be drawn at some positions, by student or teacher.
    """
    divergences: Tensor = _FusedDivergence.apply(  # type: ignore[no-untyped-call]
        student.hidden,
        student.weight,
        student.bias,
        student.head,
        teacher,
        divergence,
        temperature,
        forbidden,
        block_bytes,
    )
    return divergences


@dataclass(frozen=True)
class _Comparison:
    """What the divergence of a student's output layer is computed with, in both passes."""

    teacher: OutputLayer
    divergence: Divergence
    temperature: float
    forbidden: Forbidden | None
    blocks: LogitBlocks  # over the tokens that both vocabularies have


class _FusedDivergence(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0913
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        head: Head,
        teacher: OutputLayer,
        divergence: Divergence,
        temperature: float,
        forbidden: Forbidden | None,
        block_bytes: int | None,
    ) -> Tensor:
        student = OutputLayer(hidden, weight, bias, head)
        with teacher.whole():
            width = min(weight.shape[0], teacher.weight.shape[0])
            blocks = LogitBlocks.of(hidden, width, block_bytes, SHARE_OF_BLOCK)
            comparison = _Comparison(teacher, divergence, temperature, forbidden, blocks)
            of_piece = _of_all_tokens
            if divergence.top_k:
                of_piece = _of_top_tokens
            results = [of_piece(comparison, student, piece) for piece in blocks.pieces]
        # of all rows: the divergence, and what the backward pass needs
        divergences, *for_gradient = [torch.cat(tensors) for tensors in zip(*results, strict=True)]
        ctx.comparison = comparison
        ctx.head = head
        ctx.save_for_backward(hidden, weight, bias, *for_gradient)
        return divergences

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, *for_gradient = ctx.saved_tensors
        student = OutputLayer(hidden, weight, bias, ctx.head)
        comparison = ctx.comparison
        gradient_of_logits = _gradient_of_all_tokens
        whole_teacher = comparison.teacher.whole
        if comparison.divergence.top_k:
            gradient_of_logits = _gradient_of_top_tokens
            whole_teacher = nullcontext  # the gradient needs no weight of the teacher

        def block_gradient(block: slice, piece: slice) -> Tensor:
            """Gradient of a block of the matrix product for a piece of the rows, (rows, columns)
            fp32."""
            logits, tanh = _finite_logits(comparison, student, block, piece)
            saved = [tensor[piece] for tensor in for_gradient]
            of_logits = gradient_of_logits(comparison, logits, saved, block, piece)
            of_logits.mul_(grad[piece].unsqueeze(1))
            return of_product_(of_logits, tanh, ctx.head, comparison.temperature)

        with whole_teacher():
            gradients = output_layer_gradients(
                student, comparison.blocks, ctx.needs_input_grad, block_gradient, grad.dtype
            )
        return *gradients, *[None] * 6


def _finite_logits(
    comparison: _Comparison, layer: OutputLayer, block: slice, piece: slice
) -> tuple[Tensor, Tensor | None]:
    """`block_logits` of student or teacher, at least `LOWEST`, so that 0 times one is 0."""
    logits, tanh = block_logits(layer, block, piece, comparison.temperature, comparison.forbidden)
    return logits.clamp_(min=LOWEST), tanh


def _of_all_tokens(
    comparison: _Comparison, student: OutputLayer, piece: slice
) -> tuple[Tensor, ...]:
    """Of a piece of the rows, (rows,) each: the divergence, the log of the sum of exponentials of
    both models, and `KL(p || q)` or `KL(p || m)`, which the gradient needs.

    A KL divergence follows from one pass: with z the logits, `KL(p || q) = sum p (z_p - z_q) -
    lse_p + lse_q`, and the sum, like the log of the sum of exponentials, is updated from block to
    block. The mixture of "jsd" is known after that pass only."""
    kind = comparison.divergence.kind
    hidden = student.hidden[piece]
    lse_p = torch.full((len(hidden),), -torch.inf, dtype=sum_dtype(hidden), device=hidden.device)
    lse_q = lse_p.clone()
    mean = torch.zeros_like(lse_p)  # of z_p - z_q under p, or of z_q - z_p under q
    for block in comparison.blocks.vocabulary:
        z_p, _ = _finite_logits(comparison, student, block, piece)
        z_q, _ = _finite_logits(comparison, comparison.teacher, block, piece)
        lse_p_before = lse_p
        lse_q_before = lse_q
        lse_p = _log_sum(lse_p, z_p)
        lse_q = _log_sum(lse_q, z_q)
        if kind == "reverse_kl":
            mean = _mean_difference(mean, lse_p_before, lse_p, z_p, z_q)
        elif kind == "forward_kl":
            mean = _mean_difference(mean, lse_q_before, lse_q, z_q, z_p)
    if kind == "reverse_kl":
        divergence = mean - lse_p + lse_q
        return divergence, lse_p, lse_q, divergence
    if kind == "forward_kl":
        return mean - lse_q + lse_p, lse_p, lse_q, torch.zeros_like(lse_p)
    beta = comparison.divergence.beta
    of_student = torch.zeros_like(lse_p)  # KL(p || m)
    of_teacher = torch.zeros_like(lse_p)  # KL(q || m)
    for block in comparison.blocks.vocabulary:
        z_p, _ = _finite_logits(comparison, student, block, piece)
        z_q, _ = _finite_logits(comparison, comparison.teacher, block, piece)
        log_p = z_p.sub_(lse_p.unsqueeze(1))
        log_q = z_q.sub_(lse_q.unsqueeze(1))
        log_m = _log_mixture(log_p, log_q, beta)
        of_teacher += torch.linalg.vecdot(log_q.exp(), log_q - log_m)
        of_student += torch.linalg.vecdot(log_p.exp(), log_p - log_m)
    return beta * of_teacher + (1 - beta) * of_student, lse_p, lse_q, of_student


def _mean_difference(
    mean: Tensor, lse_before: Tensor, lse: Tensor, z: Tensor, other_z: Tensor
) -> Tensor:
    """The mean of `z - other_z` under softmax(z), (rows,), over one more block of logits z (rows,
    columns): `mean` is that over the blocks before, `lse_before` and `lse` (rows,) the log of the
    sum of exponentials of z without and with this block."""
    shares = torch.exp(z - lse.unsqueeze(1))
    fading = torch.exp(lse_before - lse)
    updated: Tensor = mean * fading + torch.linalg.vecdot(shares, z - other_z)
    return updated


def _gradient_of_all_tokens(
    comparison: _Comparison, z_p: Tensor, saved: list[Tensor], block: slice, piece: slice
) -> Tensor:
    """d divergence / d z_p, (rows, columns) fp32: `p (log p - log q - KL)`, `p - q`, or `(1 - beta)
    p (log p - log m - KL(p || m))`. `saved`: what `_of_all_tokens` returned after the
    divergence."""
    kind = comparison.divergence.kind
    beta = comparison.divergence.beta
    lse_p, lse_q, of_student = saved
    z_q, _ = _finite_logits(comparison, comparison.teacher, block, piece)
    log_p = z_p.sub_(lse_p.unsqueeze(1))
    log_q = z_q.sub_(lse_q.unsqueeze(1))
    of_student = of_student.unsqueeze(1)
    if kind == "forward_kl":
        return log_p.exp_().sub_(log_q.exp_())
    if kind == "reverse_kl":
        return log_q.neg_().add_(log_p).sub_(of_student).mul_(log_p.exp_())
    log_m = _log_mixture(log_p, log_q, beta)
    return log_m.neg_().add_(log_p).sub_(of_student).mul_(log_p.exp_()).mul_(1 - beta)


def _of_top_tokens(
    comparison: _Comparison, student: OutputLayer, piece: slice
) -> tuple[Tensor, ...]:
    """Of a piece of the rows: the divergence (rows,), and what `_gradient_of_top_tokens` needs: the
    student's log of the sum of exponentials of all tokens and of the tail, (rows,) each, the
    teacher's tokens (rows, k) int64, and the slopes (rows, k + 1).

    The tail is summed by itself, and not as 1 less the top tokens: a teacher that is very sure
    leaves it less than the rounding of 1, and a student may not be as sure."""
    blocks = comparison.blocks
    top_k = min(comparison.divergence.top_k, blocks.width)
    hidden = student.hidden[piece]
    # of the teacher's top tokens so far: logits of both models (rows, up to k), and their ids
    top_p = torch.empty(len(hidden), 0, dtype=sum_dtype(hidden), device=hidden.device)
    top_q = top_p.clone()
    tokens = top_p.long()
    # of the other tokens so far: the log of the sum of exponentials (rows,)
    tail_p = top_p.new_full((len(hidden),), -torch.inf)
    tail_q = tail_p.clone()
    for block in blocks.vocabulary:
        z_p, _ = _finite_logits(comparison, student, block, piece)
        z_q, _ = _finite_logits(comparison, comparison.teacher, block, piece)
        columns = z_q.topk(min(top_k, z_q.shape[1]), dim=1).indices  # (rows, up to k)
        top_p = torch.cat([top_p, z_p.gather(1, columns)], dim=1)
        top_q = torch.cat([top_q, z_q.gather(1, columns)], dim=1)
        tokens = torch.cat([tokens, columns + block.start], dim=1)
        # into the tail go the other tokens of the block, and those that are now beyond the first k
        chosen = top_q.topk(min(top_k, block.stop), dim=1).indices
        tail_p = _log_sum(tail_p, z_p.scatter_(1, columns, -torch.inf))
        tail_q = _log_sum(tail_q, z_q.scatter_(1, columns, -torch.inf))
        tail_p = _log_sum(tail_p, top_p.scatter(1, chosen, -torch.inf))
        tail_q = _log_sum(tail_q, top_q.scatter(1, chosen, -torch.inf))
        top_p = top_p.gather(1, chosen)
        top_q = top_q.gather(1, chosen)
        tokens = tokens.gather(1, chosen)
    lse_p = _log_sum(tail_p, top_p)
    lse_q = _log_sum(tail_q, top_q)
    log_p = torch.cat([top_p, tail_p.unsqueeze(1)], dim=1) - lse_p.unsqueeze(1)  # (rows, k + 1)
    log_q = torch.cat([top_q, tail_q.unsqueeze(1)], dim=1) - lse_q.unsqueeze(1)
    # where the top tokens are all tokens, the log-prob of the tail is -inf
    log_p.clamp_(min=LOWEST).requires_grad_()
    log_q.clamp_(min=LOWEST)
    with torch.enable_grad():
        kind = comparison.divergence.kind
        beta = comparison.divergence.beta
        divergence = dense_divergence(log_p, log_q, kind, beta)
        # d divergence / d log-prob of each of the k + 1 terms
        [slopes] = torch.autograd.grad(divergence.sum(), log_p)
    return divergence.detach(), lse_p, tail_p, tokens, slopes


def _log_sum(so_far: Tensor, logits: Tensor) -> Tensor:
    """The log of the sum of exponentials of `so_far` (rows,), itself such a log, and `logits`
    (rows, columns)."""
    return torch.logaddexp(so_far, logits.logsumexp(dim=1))


def _gradient_of_top_tokens(
    comparison: _Comparison, z_p: Tensor, saved: list[Tensor], block: slice, piece: slice
) -> Tensor:
    """d divergence / d z_p, (rows, columns) fp32. With s_b the slope for log P_b of term b, a token
    v of the term gets `s_b p_v / P_b - p_v sum_c s_c`. p_v / P_b is 1 for each of the top tokens;
    in the tail it is computed from logits, as both may be too small for fp32. `saved`: what
    `_of_top_tokens` returned after the divergence."""
    lse_p, tail_p, tokens, slopes = saved
    width = z_p.shape[1]
    columns, inside = in_block(tokens, block.start, width)  # (rows, k) each
    is_top = inside.new_zeros(len(z_p), width + 1)  # the last column is of tokens of other blocks
    is_top.scatter_(1, torch.where(inside, columns, width), True)
    of_tail = (z_p - tail_p.unsqueeze(1)).exp_().masked_fill_(is_top[:, :width], 0.0)
    grad = z_p.sub_(lse_p.unsqueeze(1)).exp_().mul_(-slopes.sum(dim=1, keepdim=True))
    grad.addcmul_(of_tail, slopes[:, -1:])
    return grad.scatter_add_(1, columns, torch.where(inside, slopes[:, :-1], 0.0))
