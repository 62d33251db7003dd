"""Triton's kernels without a GPU: interpreted, against PyTorch; compiled; and in the layers of
models."""

import copy
import logging
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from generation import assert_same, run
from tiny_models import new_model
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.models.llama import modeling_llama as llama

import dschat_ppo
from dschat_ppo.algorithms import fused_logprobs
from dschat_ppo.algorithms.fused_logprobs import Forbidden, Head, OutputLayer, fused_token_scores
from dschat_ppo.models import fast_layers, head_kernels
from dschat_ppo.models.fast_layers import FastRotary, kernel_outputs, kernels_for, use_fast_layers
from dschat_ppo.models.head_kernels import head_outputs
from dschat_ppo.rollout import continuous_batching, decode_kernels, fused_layers
from dschat_ppo.rollout.decode_kernels import (
    AttentionCall,
    GPUDecode,
    decode_outputs,
    products_attention,
)
from dschat_ppo.rollout.kv_cache import DecodeMetadata, KVCache
from dschat_ppo.rollout.sampling import SamplingParameters, StoppingCriteria

pytest.importorskip("triton", reason="tests/run.sh runs these tests with it")
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def kernels():
    """They take tensors of the CPU. The interpreter does not round to bfloat16 as a GPU does, but
    to half precision."""
    from triton.runtime import interpreter

    from dschat_ppo import gpu_kernels

    patch_tensor = interpreter._patch_lang_tensor

    def with_index(tensor, scope):
        """Triton's own, `int` of an array, is an error with NumPy 2.4: it is for `range`."""
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang_tensor", with_index)
        yield gpu_kernels


# heads, hidden states and an MLP of Qwen2 0.5B to 14B: one to sixteen groups of threads for a row
@pytest.mark.parametrize("width", [24, 64, 96, 128, 896, 1536, 3584, 5120, 8960])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_each_kernel_is_as_close_to_fp64_as_its_number_format_allows(
    dtype, width, kernels, monkeypatch
):
    monkeypatch.setattr(kernels, "_PROGRAMS", 2)  # so that one has several steps
    for name, found, exact in kernel_outputs(kernels, CPU, dtype, width):
        error = (found.double() - exact.detach()).norm() / exact.detach().norm()
        assert error < torch.finfo(dtype).eps, name


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).half()


@pytest.mark.parametrize(("rows", "width"), [(5, 96), (300, 128), (70, 64), (33, 1536)])
def test_a_norms_gradients_of_several_rows_at_a_time(rows, width, kernels, monkeypatch):
    """Rows that fill neither the last step of a program nor the last program."""
    monkeypatch.setattr(kernels, "_PROGRAMS", 3)
    states, weight, gradient = drawn(rows, width), drawn(width, seed=1), drawn(rows, width, seed=2)
    x, w = states.double().requires_grad_(), weight.double().requires_grad_()
    exact = nn.functional.rms_norm(x, (width,), w, 1e-6)
    expected = torch.autograd.grad(exact, [x, w], gradient.double())
    found = kernels.rms_norm_backward(states, weight, gradient, 1e-6)
    for got, right in zip(found, expected, strict=True):
        assert (got.double() - right).norm() < 1e-3 * right.norm()


def test_no_rows_have_no_gradient(kernels):
    states, weight = drawn(0, 96), drawn(96)
    of_states, of_weight = kernels.rms_norm_backward(states, weight, states, 1e-6)
    assert of_states.shape == (0, 96) and of_weight.tolist() == [0.0] * 96


def test_they_round_where_the_layers_of_transformers_do(kernels):
    norm = llama.LlamaRMSNorm(96, eps=1e-5).half()
    nn.init.normal_(norm.weight)
    states = drawn(3, 7, 96)
    differs = (kernels.rms_norm(states, norm.weight, 1e-5) != norm(states)).float().mean()
    assert differs < 0.002  # a sum in another order may move a number across a rounding
    gate, up = drawn(9, 90).chunk(2, dim=1)
    assert torch.equal(kernels.swiglu(gate, up), nn.functional.silu(gate) * up)
    (q, k), angles = (
        (drawn(2, 3, 5, 12), drawn(2, 1, 5, 12, seed=1)),
        drawn(2, 5, 6).float().repeat(1, 1, 2),
    )
    angles[..., 6:] *= 0.5  # the two halves may have different angles
    cos, sin = angles.cos().half(), angles.sin().half()
    original = getattr(llama.apply_rotary_pos_emb, "_original", llama.apply_rotary_pos_emb)
    for found, expected in zip(
        (kernels.rotated(q, cos, sin), kernels.rotated(k, cos, sin)),
        original(q, k, cos, sin),
        strict=True,
    ):
        assert torch.equal(found, expected)


COMPILE = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from dschat_ppo import gpu_kernels

KINDS = {"p": "*bf16", "f": "*fp32", "i": "i32", "x": "fp32", "l": "*i64"}
SIGNATURES = {  # types of the arguments, and sizes that are known when a kernel is compiled
    "_norm_kernel": ("p p p i x", [1024]),
    "_norm_backward_kernel": ("p p p p f i i i x", [16, 128]),
    "_rotation_kernel": ("p p p p i i i i i", [True, 16, 32]), "_gated_kernel": ("p p p i i",
    [1024]),
    "_gated_backward_kernel": ("p p p p p i", [1024]),
    "_scores_kernel": ("f l f i i x", []),
    "_scores_backward_kernel": ("f l f p i i x", []),
    "_decode_kernel": ("p p p p p l f f i i i x i", [16, 128]),
    "_merge_kernel": ("f f p i i", [2, 128]),
}
CALLED = {"_tokens_of_row", "_add_tokens"}  # by a kernel
kernels = {name for name, value in vars(gpu_kernels).items() if hasattr(value, "arg_names")}
kernels -= CALLED
assert kernels == set(SIGNATURES)
for name, (kinds, sizes) in SIGNATURES.items():
    kernel = getattr(gpu_kernels, name)
    types = [KINDS[kind] for kind in kinds.split()] + ["constexpr"] * len(sizes)
    names = kernel.arg_names
    constants = dict(zip(names[len(names) - len(sizes):], sizes, strict=True))
    source = ASTSource(kernel, dict(zip(kernel.arg_names, types, strict=True)), constants)
    assert compile(source, GPUTarget("cuda", 90, 32)).asm["cubin"]
print("compiled")
"""


def test_they_compile_for_gpus(tmp_path):
    settings = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    ran = subprocess.run(
        [sys.executable, "-c", COMPILE], env=settings, capture_output=True, text=True
    )
    assert ran.stdout == "compiled\n", ran.stderr


def test_which_kernels_run():
    half = torch.ones(2, 2).bfloat16()
    assert kernels_for(half) in (fast_layers.CPU_KERNELS, None)  # None without a compiler
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert kernels_for(half.to("meta", dtype)) is fast_layers.CPU_KERNELS
    for x in (half, half.to("meta")):
        assert kernels_for(x, x.float()) is None
    assert kernels_for(half.half()) is None


@pytest.mark.parametrize("broken", ["swiglu", "rotated_heads", None])
def test_kernels_that_compute_something_else_are_not_used(broken, kernels, monkeypatch, caplog):
    functions = {name: getattr(kernels, name) for name in dir(kernels) if not name.startswith("__")}
    if broken:
        original = functions[broken]
        functions[broken] = lambda *given: tuple(1.01 * part for part in original(*given))
    monkeypatch.setattr(dschat_ppo, "gpu_kernels", SimpleNamespace(**functions), raising=False)
    monkeypatch.setattr(logging.getLogger("dschat_ppo"), "propagate", True)
    found = fast_layers._triton_kernels.__wrapped__(CPU, torch.float16, 64)
    assert (found is None) is (broken is not None)
    assert ("Triton's kernels cannot be used" in caplog.text) is (broken is not None)


def test_a_norm_is_compared_at_the_width_of_the_model(kernels, monkeypatch, caplog):
    """One that sums a first group of threads alone is right where a row has no other."""
    functions = {name: getattr(kernels, name) for name in dir(kernels) if not name.startswith("__")}

    def narrow(states, weight, eps):
        factor = torch.rsqrt(states[..., :256].double().pow(2).mean(-1, keepdim=True) + eps)
        return (weight * states * factor).half()

    functions["rms_norm"] = narrow
    monkeypatch.setattr(dschat_ppo, "gpu_kernels", SimpleNamespace(**functions), raising=False)
    monkeypatch.setattr(logging.getLogger("dschat_ppo"), "propagate", True)
    assert fast_layers._triton_kernels.__wrapped__(CPU, torch.float16, 96) is not None
    assert fast_layers._triton_kernels.__wrapped__(CPU, torch.float16, 1536) is None
    assert "for rows of 1536: it ends with ArithmeticError (a norm is off" in caplog.text


def test_a_comparison_in_a_checkpoint_saves_nothing_for_it(kernels, monkeypatch):
    """The layers run again save what the first pass saved, and not what was compared in it."""
    monkeypatch.setattr(dschat_ppo, "gpu_kernels", kernels, raising=False)
    fast_layers._triton_kernels.cache_clear()

    def layer(states):
        assert fast_layers._triton_kernels(CPU, torch.float16, 64) is not None
        return states.sin().sin()

    states = torch.ones(3, requires_grad=True)
    checkpoint(layer, states, use_reentrant=False).sum().backward()
    fast_layers._triton_kernels.cache_clear()
    assert states.grad is not None


# Of a head


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_the_kernels_of_a_head_are_as_close_to_fp64_as_fp32_allows(dtype, kernels):
    for name, output, exact in head_outputs(kernels, CPU, dtype):
        error = (output.double() - exact.detach()).norm() / exact.detach().norm()
        assert error < max(torch.finfo(output.dtype).eps, 2e-6), name


@pytest.mark.parametrize("vocabulary", [151936, 50257])
def test_a_vocabulary_of_a_model_in_blocks(vocabulary, kernels):
    """As a batch of 8,192 rows has it: blocks of 8,192 logits, the last of them short."""
    logits = 8 * drawn(2, vocabulary).float()
    tokens = torch.tensor([vocabulary - 1, 8192])
    sums = torch.zeros(4, 2)
    sums[0] = torch.finfo(torch.float32).min / 2
    for start in range(0, vocabulary, 8192):
        block = logits[:, start : start + 8192].contiguous()
        kernels.add_scores_(block, tokens, sums, start, 0.9)
    largest, total, weighted, chosen = sums.double()
    exact = torch.log_softmax(0.9 * logits.double(), dim=1)
    torch.testing.assert_close(
        chosen - largest - total.log(), exact[[0, 1], tokens], rtol=1e-6, atol=2e-6
    )
    entropy = -(exact.exp() * exact).sum(dim=1)
    torch.testing.assert_close(total.log() - weighted / total, entropy, rtol=1e-6, atol=2e-6)


OF_HEADS = {
    "plain": Head(),
    "scale": Head(scale=0.25),
    "soft cap": Head(softcap=5.0),
}


@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("head", OF_HEADS.values(), ids=OF_HEADS)
def test_a_head_with_kernels_gives_the_scores_and_gradients_of_whole_logits(
    head, has_bias, kernels, monkeypatch
):
    """In pieces of the rows and blocks of the vocabulary; some tokens are forbidden in some rows,
    and a bias of -inf forbids one in all."""
    monkeypatch.setattr(fused_logprobs, "SMALLEST_BLOCK", 300)
    hidden, weight = drawn(7, 64).float(), drawn(1000, 64, seed=1).float() / 2
    bias = None
    if has_bias:
        bias = drawn(1000, seed=2).float()
        bias[77] = -torch.inf
    tokens = torch.tensor([0, 299, 300, 999, 5, 600, 42])
    forbidden = Forbidden(torch.arange(7) % 3 == 1, (17, 301))
    leaves = [x.requires_grad_() for x in (hidden, weight, bias) if x is not None]
    scores = fused_token_scores(
        OutputLayer(hidden, weight, bias, head),
        tokens,
        0.8,
        entropy_grad=True,
        block_bytes=4 * 300 * 4,
        forbidden=forbidden,
        kernels=kernels,
    )
    assert len(scores[0].grad_fn.blocks.pieces) == 2
    exact_leaves = [x.detach().double().requires_grad_() for x in leaves]
    logits = nn.functional.linear(*exact_leaves) * head.scale
    if head.softcap:
        logits = head.softcap * torch.tanh(logits / head.softcap)
    for token in forbidden.ids:
        logits = logits.index_put(
            (forbidden.positions.nonzero().squeeze(1), torch.tensor(token)),
            torch.tensor(-1e30).double(),
        )
    log_probs = torch.log_softmax(logits / 0.8, dim=1)
    finite = log_probs.clamp_min(-1e4)
    exact = log_probs.gather(1, tokens.unsqueeze(1)).squeeze(1), -(finite.exp() * finite).sum(1)
    weights = torch.linspace(-1, 2, 14).view(2, 7)
    found = torch.autograd.grad((torch.stack(scores) * weights).sum(), leaves)
    expected = torch.autograd.grad((torch.stack(exact) * weights).sum(), exact_leaves)
    for ours, right in zip((*scores, *found), (*exact, *expected), strict=True):
        torch.testing.assert_close(ours.double(), right.double(), rtol=1e-4, atol=2e-5)


def test_logits_that_are_not_finite_give_scores_that_are_not(kernels):
    for bad in (torch.nan, torch.inf):
        logits = drawn(2, 3000).float()
        logits[0, 2500] = bad
        sums = torch.zeros(4, 2)
        sums[0] = torch.finfo(torch.float32).min / 2
        kernels.add_scores_(logits, torch.zeros(2, dtype=torch.int64), sums, 0, 1.0)
        assert sums[1, 0].isnan() and sums[2, 0].isnan() and sums[:, 1].isfinite().all()
        terms = torch.zeros(4, 2)
        terms[2] = 1.0
        terms[0, 0] = torch.nan
        gradient = kernels.scores_backward(
            logits, torch.zeros(2, dtype=torch.int64), terms, 0, 1.0, torch.float16
        )
        assert gradient[0].isnan().all() and gradient[1].isfinite().all()


@pytest.mark.parametrize("broken", ["add_scores_", "scores_backward", None])
def test_kernels_of_a_head_that_compute_something_else_are_not_used(
    broken, kernels, monkeypatch, caplog
):
    functions = {name: getattr(kernels, name) for name in dir(kernels) if not name.startswith("__")}
    if broken:
        original = functions[broken]
        # one block is left out
        functions[broken] = lambda logits, *rest: original(logits * (logits.shape[1] > 1000), *rest)
    monkeypatch.setattr(dschat_ppo, "gpu_kernels", SimpleNamespace(**functions), raising=False)
    monkeypatch.setattr(logging.getLogger("dschat_ppo"), "propagate", True)
    chosen = head_kernels._triton_head_kernels.__wrapped__(CPU, torch.float16)
    assert (chosen is None) is (broken is not None)
    warned = "Triton's kernels cannot be used for the logits of a head" in caplog.text
    assert warned is (broken is not None)


# Of decode steps


# heads, key heads and their width of Qwen2 0.5B and 7B, Qwen3, GPT-2, Phi-2 and Gemma
SHAPES_OF_HEADS = [
    (14, 2, 64),
    (28, 4, 128),
    (4, 2, 128),
    (3, 3, 64),
    (2, 2, 80),
    (4, 1, 256),
]


@pytest.mark.parametrize(("heads", "kv_heads", "width"), SHAPES_OF_HEADS)
def test_attention_of_a_decode_step_is_that_of_products_in_fp64(
    heads, kv_heads, width, kernels, monkeypatch
):
    """In half precision, of rows whose tokens are divided and whose are not, and what it writes."""
    monkeypatch.setattr(kernels, "DECODE_PROGRAMS", 8 * kv_heads + 1)
    monkeypatch.setattr(kernels, "_SPLITS", 2)
    for name, output, exact in decode_outputs(kernels, CPU, torch.float16, heads, kv_heads, width):
        error = (output.double() - exact).norm() / exact.norm()
        assert error < torch.finfo(torch.float16).eps, name


def test_rows_of_few_tokens_are_divided_among_more_programs(kernels):
    """Programs that have no token add nothing; caches of rows, and queries that are views."""
    cache = KVCache(3, 16)
    cache.keys[0], cache.values[0] = drawn(3, 2, 16, 32), drawn(3, 2, 16, 32, seed=1)
    batch = DecodeMetadata(0, cache, torch.tensor([0, 5, 11]))
    heads = drawn(3, 1, 8, 32, seed=2).transpose(1, 2)
    query, key, value = heads.split([4, 2, 2], dim=1)
    found = kernels.decode_step_attention(
        query, key, value, (cache.keys[0], cache.values[0]), batch.token_offsets(2), 0.2, None
    )
    for cached, new in ((cache.keys[0], key), (cache.values[0], value)):
        assert torch.equal(cached[range(3), :, batch.slots], new[:, :, 0])
    call = AttentionCall(0, query.float(), key, value, 0.2)
    cache.keys[0], cache.values[0] = cache.keys[0].float(), cache.values[0].float()
    expected = products_attention(batch, call)
    torch.testing.assert_close(found.float(), expected, rtol=0, atol=2e-3)


@pytest.mark.parametrize("broken", ["attention", "cache", None])
def test_a_decode_kernel_that_computes_something_else_is_not_used(
    broken, kernels, monkeypatch, caplog
):
    functions = {name: getattr(kernels, name) for name in dir(kernels) if not name.startswith("__")}
    functions["DECODE_PROGRAMS"] = 8
    monkeypatch.setattr(kernels, "DECODE_PROGRAMS", 8)
    original = functions["decode_step_attention"]

    def decode_attention(query, key, value, cache, token_offsets, scale, window):
        if broken == "attention" and window is not None:
            window += 1
        if broken == "cache":
            value = value + 1
        return original(query, key, value, cache, token_offsets, scale, window)

    functions["decode_step_attention"] = decode_attention
    monkeypatch.setattr(dschat_ppo, "gpu_kernels", SimpleNamespace(**functions), raising=False)
    monkeypatch.setattr(logging.getLogger("dschat_ppo"), "propagate", True)
    chosen = decode_kernels._triton_decode_kernels.__wrapped__(CPU, torch.float16, 4, 2, 32)
    assert (chosen is None) is (broken is not None)
    warned = "cannot be used for decode steps of 4 heads over 2 of 32" in caplog.text
    assert warned is (broken is not None)


def test_answers_by_the_decode_kernel_are_those_of_products(kernels, monkeypatch):
    """Of a model with windows, whose prompts are shared."""
    monkeypatch.setattr(continuous_batching, "MIN_SHARED_TOKENS", 8)
    settings = {
        "sampling": SamplingParameters(1.3),
        "stopping": StoppingCriteria(5, eos_ids=(3, 9)),
        "static": True,
        "samples": 2,
    }
    expected = run("mistral-window", (9, 14), rows=4, **settings)
    calls = []

    def counted(*arguments):
        calls.append(arguments)
        return kernels.decode_step_attention(*arguments)

    functions = SimpleNamespace(decode_step_attention=counted)
    monkeypatch.setattr(dschat_ppo, "gpu_kernels", functions, raising=False)
    monkeypatch.setattr(kernels, "_SPLITS", 2)
    monkeypatch.setattr(GPUDecode, "supports", lambda self, call: True)
    monkeypatch.setattr(continuous_batching, "decode_kernel_for", lambda device: GPUDecode())
    assert_same(run("mistral-window", (9, 14), rows=4, **settings), expected)
    assert len(calls) > 5


# In layers


@pytest.fixture
def in_layers(kernels, monkeypatch):
    for module in (fast_layers, fused_layers):
        monkeypatch.setattr(
            module, "kernels_for", lambda *tensors: None if tensors[0].is_meta else kernels
        )


def losses_and_gradients(model):
    ids = torch.arange(14).view(2, 7) % 29 + 3
    model.zero_grad()
    logits = model(input_ids=ids).logits
    logits.pow(2).mean().backward()
    return [logits.detach(), *(weight.grad.clone() for weight in model.parameters())]


@pytest.mark.parametrize("name", ["qwen3", "phi"])
@pytest.mark.usefixtures("in_layers")
def test_a_model_computes_the_same_logits_and_gradients(name):
    """Phi rotates a part of each head, Qwen3 has norms of queries and keys."""
    plain = new_model(name)
    fast = copy.deepcopy(plain)
    module = sys.modules[type(plain).__module__]
    original = module.apply_rotary_pos_emb
    try:
        use_fast_layers(fast)
        assert isinstance(module.apply_rotary_pos_emb, FastRotary)
        found = losses_and_gradients(fast)
    finally:
        module.apply_rotary_pos_emb = original
    for got, expected in zip(found, losses_and_gradients(plain), strict=True):
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)


def test_other_rotations_are_left_to_the_model(kernels, monkeypatch):
    calls = []
    rotate = FastRotary(lambda *given, **named: calls.append((len(given), named)) or given[:2])
    q, cos = drawn(2, 4, 3, 8), drawn(2, 3, 8)
    rotate(q, q, cos, cos)  # no kernels take them
    monkeypatch.setattr(fast_layers, "kernels_for", lambda *_: kernels)
    rotate(q, q, cos[..., :4], cos[..., :4])  # a part of each head
    rotate(q, q, cos, cos, unsqueeze_dim=2)
    assert calls == [(4, {}), (4, {}), (4, {"unsqueeze_dim": 2})]
    rotate(q, q, cos, cos)
    assert len(calls) == 3
