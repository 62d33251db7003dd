"""Which kernels compute log-probs and entropies from the logits of a language model's head, and the
gradients of these: Triton's on a GPU, where they agree with PyTorch's operations in fp64."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from dschat_ppo.algorithms.fused_logprobs import HALF
from dschat_ppo.models.fast_layers import compared_kernels

SUMMED_IN_FP32 = (*HALF, torch.float32)  # dtypes of hidden states


def head_kernels_for(hidden: Tensor) -> Any:
    """The module `gpu_kernels`, for the logits of these hidden states of a GPU, or None."""
    if hidden.is_cuda and type(hidden) in (Tensor, nn.Parameter) and hidden.dtype in SUMMED_IN_FP32:
        return _triton_head_kernels(hidden.device, hidden.dtype)
    return None


@cache
def _triton_head_kernels(device: torch.device, dtype: torch.dtype) -> Any:
    """Triton's kernels, if they compute the scores and gradients of logits on this GPU; else None,
    with a warning. `dtype`: of the hidden states."""
    return compared_kernels(
        "the logits of a head",
        lambda kernels: head_outputs(kernels, device, dtype),
        "log-probs are slower",
    )


def head_outputs(
    kernels: Any, device: torch.device, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """`kernel_outputs` of the kernels for logits: log-probs, entropies and their gradients of five
    rows in two blocks, the second of which fills no program."""
    generator = torch.Generator().manual_seed(0)
    blocks = (slice(0, 4096), slice(4096, 5000))
    factor = 1.25
    logits = 3 * torch.randn(5, 5000, generator=generator).to(device)
    tokens = torch.tensor([0, 4095, 4096, 4999, 17], device=device)
    gradients = torch.randn(2, 5, generator=generator).to(device)
    sums = torch.zeros(4, 5, device=device)
    sums[0] = torch.finfo(torch.float32).min / 2
    for block in blocks:
        kernels.add_scores_(logits[:, block].contiguous(), tokens, sums, block.start, factor)
    largest, total, weighted, chosen = sums
    log_total = largest + total.log()
    entropy = total.log() - weighted / total
    with torch.enable_grad():
        z = logits.double().requires_grad_()
        logprobs = torch.log_softmax(factor * z, dim=1)
        exact = logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1)
        exact_entropy = -(logprobs.exp() * logprobs).sum(dim=1)
        yield "a log-prob", chosen - log_total, exact
        yield "an entropy", entropy, exact_entropy
        scores = torch.stack([exact, exact_entropy])
        [expected] = torch.autograd.grad(scores, z, gradients.double())
    terms = torch.stack([log_total, entropy, *gradients])
    for block in blocks:
        output = kernels.scores_backward(
            logits[:, block].contiguous(), tokens, terms, block.start, factor, dtype
        )
        yield "the gradient of a log-prob", output, expected[:, block]
