"""The compiled kernels against PyTorch's operations, bf16 on a CPU.

    python benchmarks/cpu_kernels.py [--repeats 5] [--json FILE] [--docs docs/lab-notes.md] [--tiny]

Shapes are those of a Llama of 31.6 M parameters: hidden size 512, intermediate size 1376, 8 heads of 64 numbers, 4
key-value heads. Norms and MLPs have 1,700 tokens, as a micro-batch of "varied" in `ppo_step.py`. Both sides alternate;
the fastest run of each counts, in milliseconds, with all cores. For a decode step PyTorch's side is what ran before:
two products, a softmax, and the write to the KV cache. In the backward pass of a norm it is autograd's of the layer of
transformers.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measure import markdown, threads, write_docs
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from dschat_ppo.models.fast_layers import use_fast_layers
from dschat_ppo.models.segment_attention import Segments, blockwise_attention
from dschat_ppo.rollout.attention import CPUDecode, DecodeKernel, RolloutAttention
from dschat_ppo.rollout.kv_cache import DecodeMetadata, KVCache

MARKS = ("<!-- kernels -->", "<!-- /kernels -->")
HIDDEN, INTERMEDIATE, HEADS, KEY_HEADS, WIDTH = 512, 1376, 8, 4, 64
Run = Callable[[], Any]


def drawn(*shape: int) -> Tensor:
    """Normal numbers in bf16."""
    return torch.randn(shape).bfloat16()


def passes(function: Callable[..., Tensor], inputs: list[Tensor]) -> tuple[Run, Run]:
    """The forward pass of a function, and its backward pass."""
    given = [x.detach().requires_grad_() for x in inputs]
    output = function(*given)
    gradient = torch.randn_like(output)
    return lambda: function(*given), lambda: torch.autograd.grad(output, given, gradient, retain_graph=True)


def layers(tokens: int) -> dict[str, tuple[Run, Run]]:
    """Name -> PyTorch's way and the kernel, of layers that both run on `tokens` tokens."""
    config = LlamaConfig(hidden_size=HIDDEN, intermediate_size=INTERMEDIATE)
    norm, mlp = LlamaRMSNorm(HIDDEN).bfloat16(), LlamaMLP(config).bfloat16()
    mlp.gate_proj = mlp.up_proj = mlp.down_proj = nn.Identity()  # without its products
    found: dict[str, tuple[Run, Run]] = {}
    for name, plain, width in (("RMSNorm", norm, HIDDEN), ("SwiGLU", mlp, INTERMEDIATE)):
        states = [drawn(1, tokens, width)]
        before = passes(plain.forward, states)
        use_fast_layers(plain)
        ours = passes(plain.forward, states)
        for kind, old, new in zip(("forward", "backward"), before, ours, strict=True):
            found[f"{name} of {tokens} tokens, {kind}"] = old, new
    return found


def causal(rows: int, lengths: tuple[int, ...]) -> dict[str, tuple[Run, Run]]:
    """Attention of packed rows, each segment by itself."""

    def by_segments(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        parts = zip(*(x.split(lengths, dim=2) for x in (query, key, value)), strict=True)
        return torch.cat(
            [scaled_dot_product_attention(*part, is_causal=True, enable_gqa=True) for part in parts], dim=2
        )

    states = [drawn(rows, sum(lengths), heads, WIDTH).transpose(1, 2) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    parts = Segments(lengths)
    before, ours = passes(by_segments, states), passes(lambda *x: blockwise_attention(*x, parts), states)
    count = rows * len(lengths)
    title = f"attention, {count} row{'s' * (count > 1)} of {sum(lengths) // len(lengths)}"
    return {f"{title}, {kind}": pair for kind, *pair in zip(("forward", "backward"), before, ours, strict=True)}  # type: ignore[misc]


class _Layer(nn.Module):
    layer_idx = 0


def decoding(rows: int, tokens: int) -> dict[str, tuple[Run, Run]]:
    """Attention of one token of each row over the KV cache."""
    states = [drawn(rows, heads, 1, WIDTH) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    slots = torch.full((rows,), tokens - 1)

    def way(kernel: DecodeKernel | None) -> Run:
        attention, cache = RolloutAttention(kernel), KVCache(rows, -(-tokens // 32) * 32)
        cache.layer(0, *states[1:])
        if kernel is not None:
            attention._kernel_layers.add(0)

        def step() -> None:
            attention.metadata = [DecodeMetadata(0, cache, slots)]
            attention(_Layer(), *states, None)

        return step

    return {f"decode step, {rows} row{'s' * (rows > 1)} of {tokens}": (way(None), way(CPUDecode()))}


def fastest(pair: tuple[Run, Run], repeats: int) -> list[float]:
    """Milliseconds of the fastest run of each, alternating."""
    found = [float("inf")] * 2
    for _ in range(repeats):
        for number, run in enumerate(pair):
            start = time.perf_counter()
            run()
            found[number] = min(found[number], 1e3 * (time.perf_counter() - start))
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=20, help="runs of each side, of which the fastest counts")
    parser.add_argument("--json", type=Path, help="write the numbers to this file too")
    parser.add_argument("--docs", type=Path, help="write the table into this file")
    parser.add_argument("--tiny", action="store_true", help="a trial of the script on tiny sizes")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    less = 16 if arguments.tiny else 1
    pairs = layers(1700 // less)
    for rows, lengths in ((1, (111,) * 18), (8, (256,)), (1, (1024,)), (1, (4096,))):
        pairs |= causal(rows, tuple(length // less for length in lengths))
    for rows, tokens in ((1, 200), (32, 200)):
        pairs |= decoding(rows, tokens)
    found: dict[str, list[float]] = {}
    with threads(len(os.sched_getaffinity(0))):
        for name, pair in pairs.items():
            found[name] = fastest(pair, arguments.repeats)
    rows_ = [[name, f"{old:.2f}", f"{new:.2f}", f"{old / new:.1f}"] for name, (old, new) in found.items()]
    table = markdown(["", "PyTorch, ms", "kernel, ms", "ratio"], rows_)
    print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")
    if arguments.docs:
        write_docs(arguments.docs, table, MARKS)


if __name__ == "__main__":
    main()
