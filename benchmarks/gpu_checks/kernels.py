"""Each kernel of the layers at the sizes of a model: how far it is from fp64, how long it takes,
and how long PyTorch's operations take in its place."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from measure import seconds
from torch import Tensor
from torch.nn import functional
from transformers.models.llama.modeling_llama import rotate_half

from dschat_ppo.models.fast_layers import kernels_for
from dschat_ppo.models.head_kernels import head_kernels_for
from dschat_ppo.rollout.kv_cache import DecodeMetadata, KVCache
from dschat_ppo.run.process_group import init_process_group
from gpu_checks.parts import Findings

REPEATS = 20  # calls that are timed together, so that launching them does not count
LEAST_BYTES = 2**26  # bytes: smaller cases stay in the cache, and say nothing of bandwidth


@dataclass(frozen=True)
class KernelCase:
    """One kernel at one size. Both functions take `inputs`, and return a tensor or a tuple."""

    name: str
    inputs: tuple[Tensor, ...]
    ours: Callable[..., Any]
    plain: Callable[..., Any]  # by PyTorch, in any number format


def backward_of(function: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, ...]]:
    """(inputs, gradient of the result) -> the gradients of the inputs, by autograd."""

    def backward(*inputs: Tensor) -> tuple[Tensor, ...]:
        *operands, gradient = inputs
        leaves = [tensor.detach().requires_grad_() for tensor in operands]
        return torch.autograd.grad(function(*leaves), leaves, gradient)

    return backward


def plain_norm(states: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm as transformers computes it."""
    wide = states if states.dtype == torch.float64 else states.float()
    normal = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * normal.to(states.dtype)


def plain_gate(gate: Tensor, up: Tensor) -> Tensor:
    """SwiGLU."""
    return functional.silu(gate) * up


def plain_rotation(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """(1, heads, L, d), rotated by angles of (1, L, d)."""
    return heads * cos.unsqueeze(1) + rotate_half(heads) * sin.unsqueeze(1)


def plain_scores(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probs of tokens, and entropies."""
    logprobs = torch.log_softmax(logits, dim=1)
    chosen = logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1)
    return chosen, -(logprobs.exp() * logprobs).sum(dim=1)


def cases_of_head(device: torch.device, tokens: int) -> Iterator[KernelCase]:
    """A block of logits of so many tokens, and its gradients."""
    logits = torch.randn(tokens, 8192, device=device)
    drawn = torch.randint(0, 8192, (tokens,), device=device)
    ours = head_kernels_for(logits)
    if ours is None:
        return

    def scores(logits: Tensor, drawn: Tensor) -> tuple[Tensor, Tensor]:
        sums = torch.zeros(4, tokens, device=device)
        sums[0] = torch.finfo(torch.float32).min / 2
        ours.add_scores_(logits, drawn, sums, 0, 1.0)
        largest, total, weighted, chosen = sums
        return chosen - largest - total.log(), total.log() - weighted / total

    yield KernelCase(f"scores {tokens} x 8192", (logits, drawn), scores, plain_scores)
    log_total = logits.logsumexp(dim=1)
    entropy = plain_scores(logits, drawn)[1]
    of_logprob = torch.randn(tokens, device=device)
    terms = torch.stack([log_total, entropy, of_logprob, torch.zeros_like(of_logprob)])

    def gradient(logits: Tensor, drawn: Tensor, of_logprob: Tensor) -> Tensor:
        leaf = logits.detach().requires_grad_()
        [result] = torch.autograd.grad(plain_scores(leaf, drawn)[0], leaf, of_logprob)
        return result

    yield KernelCase(
        f"gradients of scores {tokens} x 8192",
        (logits, drawn, of_logprob),
        lambda *_: ours.scores_backward(logits, drawn, terms, 0, 1.0, torch.bfloat16),
        gradient,
    )


def cases_of_decoding(
    ours: Any, random: Callable[..., Tensor], rows: int, tokens: int
) -> Iterator[KernelCase]:
    """A decode step of so many rows with so many tokens each: heads of Qwen2 0.5 B and 7 B, and
    heads that share no keys."""
    scale = 0.1

    def attention(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(
            query, keys, values, scale=scale, enable_gqa=True
        )

    for heads, kv_heads, width in ((14, 2, 64), (28, 4, 128), (32, 32, 128)):
        keys, values = random(rows, kv_heads, tokens, width), random(rows, kv_heads, tokens, width)
        slots = torch.full((rows,), tokens - 1, device=keys.device)
        cache = KVCache(rows, tokens)
        token_offsets = DecodeMetadata(0, cache, slots).token_offsets(kv_heads)
        newest = keys[:, :, -1:].contiguous(), values[:, :, -1:].contiguous()

        def step(
            query: Tensor,
            keys: Tensor,
            values: Tensor,
            newest: tuple[Tensor, Tensor] = newest,
            token_offsets: Tensor = token_offsets,
        ) -> Tensor:
            mixed: Tensor = ours.decode_step_attention(
                query, *newest, (keys, values), token_offsets, scale, None
            )
            return mixed.unsqueeze(2)

        yield KernelCase(
            f"decode step {rows} x {tokens} of {heads} over {kv_heads} x {width}",
            (random(rows, heads, 1, width), keys, values),
            step,
            attention,
        )


def cases(device: torch.device, tiny: bool) -> Iterator[KernelCase]:
    """Kernels and sizes: 8,192 tokens of a model of 1.5 B weights, and heads of Qwen3."""
    tokens = 16 if tiny else 8192

    def random(*shape: int) -> Tensor:
        drawn = torch.randn(shape, generator=torch.Generator(device).manual_seed(0), device=device)
        return drawn.bfloat16()

    yield from cases_of_head(device, tokens)
    ours = kernels_for(random(1, 64))
    if ours is None:
        return
    for rows, width in ((tokens, 1536), (16 * tokens, 128)):
        states, weight, gradient = random(rows, width), random(width), random(rows, width)
        yield KernelCase(
            f"norm {rows} x {width}",
            (states, weight),
            lambda x, w: ours.rms_norm(x, w, 1e-6),
            plain_norm,
        )
        yield KernelCase(
            f"gradients of norm {rows} x {width}",
            (states, weight, gradient),
            lambda x, w, g: ours.rms_norm_backward(x, w, g, 1e-6),
            backward_of(plain_norm),
        )
    gate, up, gradient = (random(tokens, 8960) for _ in range(3))
    yield KernelCase(f"gate {tokens} x 8960", (gate, up), ours.swiglu, plain_gate)
    yield KernelCase(
        f"gradients of gate {tokens} x 8960",
        (gate, up, gradient),
        ours.swiglu_backward,
        backward_of(plain_gate),
    )
    if hasattr(ours, "rotated"):
        heads = random(1, tokens, 12, 128).transpose(1, 2)
        angles = random(1, tokens, 128)
        yield KernelCase(
            f"rotation {tokens} x 12 x 128",
            (heads, angles.cos(), angles.sin()),
            ours.rotated,
            plain_rotation,
        )
        yield from cases_of_decoding(ours, random, 4 if tiny else 64, 16 if tiny else 768)


def error_of(case: KernelCase) -> float:
    """The largest relative difference, in the Euclidean norm, of a result from the same in fp64."""
    results = case.ours(*case.inputs)
    exact_inputs = []
    for tensor in case.inputs:
        exact_inputs.append(tensor.double() if tensor.is_floating_point() else tensor)
    expected = case.plain(*exact_inputs)
    if isinstance(results, Tensor):
        results, expected = (results,), (expected,)
    errors = [
        float((result.double() - exact).norm() / exact.norm())
        for result, exact in zip(results, expected, strict=True)
    ]
    return max(errors)


def microseconds(run: Callable[[], Any]) -> float:
    """Of one call: the median of five times `REPEATS` calls."""
    run()

    def repeated() -> None:
        for _ in range(REPEATS):
            run()

    return 1e6 * statistics.median(seconds(repeated) for _ in range(5)) / REPEATS


def bytes_moved(case: KernelCase) -> int:
    """Bytes of the inputs and of the results."""
    results = case.ours(*case.inputs)
    if isinstance(results, Tensor):
        results = (results,)
    return sum(tensor.nbytes for tensor in (*case.inputs, *results))


def compare_kernels(found: Findings, tiny: bool) -> None:
    """Each kernel: difference, microseconds and TB/s, and the microseconds of PyTorch."""
    device = init_process_group()
    wrong = []
    rates = {}
    for case in cases(device, tiny):
        error = found.measure(f"error of {case.name}", lambda case=case: error_of(case))
        if not (isinstance(error, float) and error <= torch.finfo(torch.bfloat16).eps):
            wrong.append(case.name)
            continue
        ours = microseconds(lambda case=case: case.ours(*case.inputs))
        plain = microseconds(lambda case=case: case.plain(*case.inputs))
        moved = bytes_moved(case)
        rate = moved / ours / 1e6
        if tiny or moved >= LEAST_BYTES:
            rates[case.name] = rate
        found.add(case.name, {"us": ours, "pytorch_us": plain, "tb_s": rate})
    found.add("wrong", len(wrong))
    found.add("wrong_kernels", wrong)
    found.add("slowest_tb_s", min(rates.values(), default=None))
