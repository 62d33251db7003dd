"""Kernels against fp64 by their definitions, and their roundings against PyTorch's operations."""

import ctypes
import math
import subprocess

import pytest
import torch

from dschat_ppo.cpu_kernels import operations

HALF_STEP = 2.0**-8  # largest relative error of rounding to bfloat16


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def threads(request):
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(1)


def drawn(*shape, seed=0, scale=1.0):
    return (scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).bfloat16()


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(("rows", "width"), [(3, 50), (700, 96)])
def test_a_norm_and_its_gradients(rows, width):
    states, weight, gradient = drawn(rows, width), drawn(width, seed=1), drawn(rows, width, seed=2)
    found = operations.rms_norm(states, weight, 1e-5)
    of_states, of_weight = operations.rms_norm_backward(states, weight, gradient, 1e-5)
    wide, factors = states.double().requires_grad_(), weight.double().requires_grad_()
    exact = factors * wide / (wide.pow(2).mean(dim=1, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(found.double(), exact.detach(), rtol=2.5 * HALF_STEP, atol=0)  # two roundings
    exact_grads = torch.autograd.grad(exact, [wide, factors], gradient.double())
    for got, true in zip((of_states, of_weight), exact_grads, strict=True):
        torch.testing.assert_close(got.double(), true, rtol=HALF_STEP, atol=1e-5)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("rows", [5, 900])
def test_a_rotation_has_the_bits_of_separate_operations(rows):
    values, angles = drawn(rows, 7, 12), drawn(rows, 6, seed=1).float().repeat(1, 2)
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    sin[:, 6:] *= 0.5  # the two halves may have different angles
    first, second = values[:, :4].chunk(2, dim=2)
    expected = values[:, :4] * cos[:, None] + torch.cat([-second, first], dim=2) * sin[:, None]
    alike = values[:, :4] * cos[:1, None] + torch.cat([-second, first], dim=2) * sin[:1, None]
    for angles, right in (((cos, sin), expected), ((cos[:1], sin[:1]), alike)):  # one set of angles for all rows
        found = values.clone()
        operations.rotate_(found, *angles, 4)
        assert torch.equal(found[:, :4], right) and torch.equal(found[:, 4:], values[:, 4:])


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("rows", [1, 900])
def test_a_gated_product_and_its_gradients(rows):
    both, gradient = drawn(rows, 90, scale=3), drawn(rows, 45, seed=1)
    gate, up = both.chunk(2, dim=1)
    found = operations.swiglu(gate, up)
    assert torch.equal(found, operations.swiglu(gate.contiguous(), up.contiguous()))
    wide = [part.double().requires_grad_() for part in (gate, up)]
    exact = wide[0] / (1 + torch.exp(-wide[0])) * wide[1]
    torch.testing.assert_close(found.double(), exact.detach(), rtol=2.5 * HALF_STEP, atol=1e-30)
    got = operations.swiglu_backward(gate.contiguous(), up.contiguous(), gradient)
    for ours, true in zip(got, torch.autograd.grad(exact, wide, gradient.double()), strict=True):
        torch.testing.assert_close(ours.double(), true, rtol=HALF_STEP, atol=1e-6)


@pytest.fixture(scope="module")
def functions(tmp_path_factory):
    """Functions of `bf16.h`, compiled with the flags of the library, which let the compiler reorder sums."""
    folder = tmp_path_factory.mktemp("functions")
    (folder / "functions.cpp").write_text(f"""
        #include "{operations.HEADERS[0]}"
        extern "C" void exponential(const float *x, float *y, long n) {{
            for (long i = 0; i < n; i++) y[i] = fast_exp(x[i]);
        }}
        extern "C" void narrowed(const float *x, bf16 *y, long n) {{
            for (long i = 0; i < n; i++) y[i] = narrow(x[i]);
        }}
    """)
    made = str(folder / "functions.so")
    subprocess.run([*operations._compiler(), *operations.FLAGS, str(folder / "functions.cpp"), "-o", made], check=True)
    compiled = ctypes.CDLL(made)

    def run(name, x, dtype):
        y = torch.empty(len(x), dtype=dtype)
        getattr(compiled, name)(ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(y.data_ptr()), ctypes.c_long(len(x)))
        return y

    return run


def test_the_exponential_is_accurate(functions):
    x = torch.cat([torch.linspace(-86, 88.7, 2**21), torch.tensor([-1e38, -86.01, 88.73, 1e38, math.inf, -math.inf])])
    y, exact = functions("exponential", x, torch.float32), x.double().exp()
    assert ((y.double() - exact).abs() / exact)[:-6].max() < 2e-7
    assert y[-6:].tolist() == [0, 0, math.inf, math.inf, math.inf, 0]
    assert functions("exponential", torch.full((40,), math.nan), torch.float32).isnan().all()


def test_numbers_are_rounded_as_pytorch_rounds_them(functions):
    bits = torch.randint(-(2**31), 2**31, (2**20,), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    ties = bits & ~0xFFFF | 0x8000
    special = torch.tensor([0x7F800001, 0x7FFFFFFF, 0x7F800000, 0x7F7FFFFF, 0x7FC00000, -1, -0x7FFFFF, 0, 1, -(2**31)])
    x = torch.cat([bits, ties, special.to(torch.int32)]).view(torch.float32)
    found, expected = functions("narrowed", x, torch.bfloat16), x.bfloat16()
    assert torch.equal(found.isnan(), x.isnan()) and torch.equal(found[~x.isnan()], expected[~x.isnan()])


@pytest.mark.parametrize("place", [0, 11, 39])
def test_nan_stays_nan(place):
    states, weight = drawn(3, 40), drawn(40, seed=1)
    states[1, place] = math.nan
    norm = operations.rms_norm(states, weight, 1e-5)
    assert norm[1].isnan().all() and not norm[[0, 2]].isnan().any()
    product = operations.swiglu(states, weight.expand(3, -1).contiguous())
    assert product.isnan().nonzero().tolist() == [[1, place]]
    states = states.view(1, 3, 40).expand(2, -1, -1).contiguous()[:, :, None].transpose(1, 2)  # (2, 1, 3, 40)
    parts = torch.tensor([[0, 3, 0, 0]])
    mixed, _ = operations.causal_attention(states, drawn(2, 1, 3, 40), drawn(2, 1, 3, 40, seed=4), parts, None, 0.1)
    assert not mixed[:, :, [0, 2]].isnan().any() and mixed[:, :, 1].isnan().all()


def by_definition(query, keys, values, slots, scale, window):
    """(n, heads, d) in fp64, one query after another."""
    rows, group = [], query.shape[1] // keys.shape[1]
    for row, slot in enumerate(slots.tolist()):
        seen = slice(0 if window is None else max(0, slot + 1 - window), slot + 1)
        for head in range(query.shape[1]):
            k, v = (x[row, head // group, seen].double() for x in (keys, values))
            rows.append(torch.softmax(k @ query[row, head, 0].double() * scale, dim=0) @ v)
    return torch.stack(rows).view(len(slots), query.shape[1], -1)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(4, 4, 16), (6, 2, 24), (16, 1, 64)])
def test_decoding_writes_and_attends(heads, kv_heads, width, window):
    keys, values = drawn(5, kv_heads, 40, width), drawn(5, kv_heads, 40, width, seed=1)
    kept = keys.clone(), values.clone()
    qkv = drawn(3, 1, heads + 2 * kv_heads, width, seed=2).transpose(1, 2)  # three rows of five
    query, key, value = qkv.split([heads, kv_heads, kv_heads], dim=1)
    slots = torch.tensor([0, 39, 17])
    found = operations.decode_attention(query, key, value, keys, values, slots, 0.3, window)
    for cached, before, new in zip((keys, values), kept, (key, value), strict=True):
        for row, slot in enumerate(slots.tolist()):
            before[row, :, slot] = new[row, :, 0]
        assert torch.equal(cached, before), "the new token is written, and nothing else"
    exact = by_definition(query, keys, values, slots, 0.3, window)
    torch.testing.assert_close(found.double(), exact, rtol=HALF_STEP, atol=1e-6)
