"""A package `flash_attn` for machines without it: its function, as its documentation defines it, in loops."""

import importlib.machinery
import itertools
import sys
from types import ModuleType
from typing import Any

import torch
from torch import Tensor


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Any = None,
    deterministic: bool = False,
) -> Tensor:  # fmt: skip
    """(queries, heads, d), with gradients, in any dtype."""
    assert causal and alibi_slopes is None and dropout_p == 0
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert (max_seqlen_q, max_seqlen_k) == (int(cu_seqlens_q.diff().max()), int(cu_seqlens_k.diff().max()))
    assert q.shape[1] % k.shape[1] == 0 and q.is_contiguous() and k.is_contiguous() and v.is_contiguous()
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    outputs = []
    pairs = zip(itertools.pairwise(cu_seqlens_q.tolist()), itertools.pairwise(cu_seqlens_k.tolist()), strict=True)
    for (start, end), (first, last) in pairs:
        own = torch.arange(end - start).unsqueeze(1) + (last - first) - (end - start)  # the key of each query
        key = torch.arange(last - first)
        sees = key <= own  # causal; its right window is then 0
        if window_size[0] >= 0:
            sees &= key >= own - window_size[0]
        logits = torch.einsum("qhd,khd->hqk", q[start:end], k[first:last]) * (softmax_scale or q.shape[-1] ** -0.5)
        if softcap > 0:
            logits = softcap * torch.tanh(logits / softcap)
        weights = logits.masked_fill(~sees, -torch.inf).softmax(dim=-1)
        outputs.append(torch.einsum("hqk,khd->qhd", weights, v[first:last]))
    return torch.cat(outputs)


def install(monkeypatch, function=flash_attn_varlen_func) -> list[dict]:
    """Make `import flash_attn` find `function`; returns a list of the options of each call."""
    calls = []

    def recorded(*args, **options):
        calls.append(options | {"segments": len(args[3]) - 1})
        return function(*args, **options)

    recorded.__wrapped__ = function  # its signature is that of the function
    module: Any = ModuleType("flash_attn")
    module.__spec__ = importlib.machinery.ModuleSpec("flash_attn", None)
    module.flash_attn_varlen_func = recorded
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    return calls
