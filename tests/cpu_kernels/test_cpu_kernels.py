"""Building the kernels, once, whole or not at all; kernels against fp64 by their definitions, and
their roundings against PyTorch's operations."""

import ctypes
import logging
import math
import os
import stat
import subprocess

import pytest
import torch

from dschat_ppo.common import stop_requests
from dschat_ppo.cpu_kernels import operations


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder for compiled files."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    return tmp_path / "dschat_ppo_kernels"


@pytest.fixture
def fresh():
    """Nothing is loaded in this process, before and after the test."""
    operations.kernels.cache_clear()
    yield
    operations.kernels.cache_clear()


def a_compiler(path, body):
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """A file of compiled kernels, by a compiler that does not optimise: seconds less."""
    folder = tmp_path_factory.mktemp("compiled")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_EXTENSIONS_DIR", str(folder))
        patch.setenv("CXX", a_compiler(folder / "cxx", 'exec c++ "$@" -O0'))
        return operations.build(operations.cache_folder(), torch.bfloat16)


def test_it_is_compiled_once(library, monkeypatch):
    folder = library.parent
    assert folder.name == "dschat_ppo_kernels" and list(folder.iterdir()) == [library], (
        "no temporary folder stays"
    )
    assert operations.load_library(library).swiglu.restype is None
    monkeypatch.setenv("CXX", str(folder.parent / "cxx"))
    monkeypatch.setattr(operations, "_compile", lambda command: pytest.fail("compiled again"))
    assert operations.build(folder, torch.bfloat16) == library


def test_another_processor_source_header_or_flag_gets_a_file_of_its_own(monkeypatch, tmp_path):
    other = tmp_path / "other"
    other.write_text("// changed")
    names = [
        operations._fingerprint(command)
        for command in (["/bin/sh"], ["/bin/sh", "-g"], ["/bin/cat"])
    ]
    for attribute, value in (
        ("_processor", lambda: ["flags: none"]),
        ("HEADERS", [other]),
        ("SOURCES", [other]),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(operations, attribute, value)
            names.append(operations._fingerprint(["/bin/sh"]))
    assert len(set(names)) == 6


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [
        (None, "there is no C++ compiler: install g++, or name a compiler by CXX"),
        ("missing", "CXX names 'no-such-compiler', which is not there: install g++"),
        (
            (
                "echo 'In file x' >&2; echo 'number.h:1: error: no such thing' >&2; echo '  | ^~~'"
                " >&2; exit 1"
            ),
            "failed: number.h:1: error: no such thing",
        ),
        ("exit 3", "failed: exit code 3"),
        ('for last; do :; done; echo nothing >"$last"', "file too short"),  # loading fails
    ],
    ids=["none", "missing", "fails", "silent", "not a library"],
)
def test_a_machine_that_cannot_compile_is_told_once(
    folder, fresh, monkeypatch, tmp_path, caplog, compiler, reason
):
    monkeypatch.delenv("CXX", raising=False)
    if compiler is None:
        monkeypatch.setenv("PATH", str(tmp_path))
    else:
        made = a_compiler(tmp_path / "cxx", compiler)
        monkeypatch.setenv("CXX", "no-such-compiler" if compiler == "missing" else made)
    with caplog.at_level(logging.WARNING):
        assert [operations.kernels(torch.bfloat16) for _ in range(2)] == [None, None]
    [record] = [r for r in caplog.records if "kernels" in r.message]
    assert reason in record.message and "slower" in record.message


@pytest.mark.parametrize("home", [pytest.param(True, marks=pytest.mark.release), False])
def test_without_a_folder_each_process_compiles_for_itself(
    fresh, library, home, monkeypatch, tmp_path, caplog
):
    """A file is in the place of the folder, or the home is unknown."""
    monkeypatch.setattr(operations.tempfile, "tempdir", str(tmp_path))
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(
        "CXX", a_compiler(tmp_path / "cxx", f'for last; do :; done; cp "{library}" "$last"')
    )
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "file") if home else "")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    assert operations.kernels(torch.bfloat16) is not None and not caplog.text
    assert sorted(tmp_path.iterdir()) == before


def test_a_stop_ends_the_compilation_and_the_run(folder, fresh, monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", a_compiler(tmp_path / "cxx", "exit 1"))
    monkeypatch.setattr(stop_requests, "requested", lambda: True)
    with pytest.raises(stop_requests.StopRequested):
        operations.kernels(torch.bfloat16)


# largest error of rounding; of fp32, of a short sum
HALF_STEP = {torch.bfloat16: 2.0**-8, torch.float32: 2.0**-21}
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def threads(request):
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(1)


def drawn(*shape, seed=0, scale=1.0, dtype=torch.bfloat16):
    return (scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


@DTYPES
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(("rows", "width"), [(3, 50), (700, 96)])
def test_a_norm_and_its_gradients(rows, width, dtype):
    states, weight, gradient = (
        drawn(*shape, dtype=dtype) for shape in ((rows, width), (width,), (rows, width))
    )
    gradient = gradient.roll(1)
    found = operations.cpu_rms_norm(states, weight, 1e-5)
    of_states, of_weight = operations.cpu_rms_norm_backward(states, weight, gradient, 1e-5)
    wide, factors = states.double().requires_grad_(), weight.double().requires_grad_()
    exact = factors * wide / (wide.pow(2).mean(dim=1, keepdim=True) + 1e-5).sqrt()
    # two roundings
    torch.testing.assert_close(found.double(), exact.detach(), rtol=2.5 * HALF_STEP[dtype], atol=0)
    exact_grads = torch.autograd.grad(exact, [wide, factors], gradient.double())
    for got, true in zip((of_states, of_weight), exact_grads, strict=True):
        torch.testing.assert_close(got.double(), true, rtol=HALF_STEP[dtype], atol=1e-5)


@DTYPES
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("rows", [5, 900])
def test_a_rotation_is_that_of_separate_operations(rows, dtype):
    """To the bit: no product is joined with the sum that it goes into."""
    values, angles = drawn(rows, 7, 12, dtype=dtype), drawn(rows, 6, seed=1).float().repeat(1, 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    sin[:, 6:] *= 0.5  # the two halves may have different angles
    first, second = values[:, :4].chunk(2, dim=2)
    expected = values[:, :4] * cos[:, None] + torch.cat([-second, first], dim=2) * sin[:, None]
    alike = values[:, :4] * cos[:1, None] + torch.cat([-second, first], dim=2) * sin[:1, None]
    # one set of angles for all rows
    for angles, right in (((cos, sin), expected), ((cos[:1], sin[:1]), alike)):
        found = values.clone()
        operations.rotate_(found, *angles, 4)
        assert torch.equal(found[:, :4], right)
        assert torch.equal(found[:, 4:], values[:, 4:])


@DTYPES
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("rows", [1, 900])
def test_a_gated_product_and_its_gradients(rows, dtype):
    both, gradient = drawn(rows, 90, scale=3, dtype=dtype), drawn(rows, 45, seed=1, dtype=dtype)
    gate, up = both.chunk(2, dim=1)
    found = operations.cpu_swiglu(gate, up)
    assert torch.equal(found, operations.cpu_swiglu(gate.contiguous(), up.contiguous()))
    wide = [part.double().requires_grad_() for part in (gate, up)]
    exact = wide[0] / (1 + torch.exp(-wide[0])) * wide[1]
    torch.testing.assert_close(
        found.double(), exact.detach(), rtol=2.5 * HALF_STEP[dtype], atol=1e-30
    )
    got = operations.cpu_swiglu_backward(gate.contiguous(), up.contiguous(), gradient)
    for ours, true in zip(got, torch.autograd.grad(exact, wide, gradient.double()), strict=True):
        torch.testing.assert_close(ours.double(), true, rtol=HALF_STEP[dtype], atol=1e-6)


@pytest.fixture(scope="module")
def functions(tmp_path_factory):
    """Functions of `number.h`, compiled with the flags of the library, which let the compiler
    reorder sums."""
    folder = tmp_path_factory.mktemp("functions")
    (folder / "functions.cpp").write_text(f"""
        #include "{operations.SOURCES[0].parent / "number.h"}"
        extern "C" void exponential(const float *x, float *y, long n) {{
            for (long i = 0; i < n; i++) y[i] = fast_exp(x[i]);
        }}
        extern "C" void narrowed(const float *x, number *y, long n) {{
            for (long i = 0; i < n; i++) y[i] = narrow(x[i]);
        }}
    """)
    made = str(folder / "functions.so")
    subprocess.run(
        [*operations._compiler(), *operations.FLAGS, str(folder / "functions.cpp"), "-o", made],
        check=True,
    )
    compiled = ctypes.CDLL(made)

    def run(name, x, dtype):
        y = torch.empty(len(x), dtype=dtype)
        getattr(compiled, name)(
            ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(y.data_ptr()), ctypes.c_long(len(x))
        )
        return y

    return run


def test_the_exponential_is_accurate(functions):
    x = torch.cat(
        [
            torch.linspace(-86, 88.7, 2**21),
            torch.tensor([-1e38, -86.01, 88.73, 1e38, math.inf, -math.inf]),
        ]
    )
    y, exact = functions("exponential", x, torch.float32), x.double().exp()
    assert ((y.double() - exact).abs() / exact)[:-6].max() < 2e-7
    assert y[-6:].tolist() == [0, 0, math.inf, math.inf, math.inf, 0]
    assert functions("exponential", torch.full((40,), math.nan), torch.float32).isnan().all()


def test_numbers_are_rounded_as_pytorch_rounds_them(functions):
    bits = torch.randint(-(2**31), 2**31, (2**20,), generator=torch.Generator().manual_seed(0)).to(
        torch.int32
    )
    ties = bits & ~0xFFFF | 0x8000
    special = torch.tensor(
        [0x7F800001, 0x7FFFFFFF, 0x7F800000, 0x7F7FFFFF, 0x7FC00000, -1, -0x7FFFFF, 0, 1, -(2**31)]
    )
    x = torch.cat([bits, ties, special.to(torch.int32)]).view(torch.float32)
    found, expected = functions("narrowed", x, torch.bfloat16), x.bfloat16()
    assert torch.equal(found.isnan(), x.isnan()) and torch.equal(
        found[~x.isnan()], expected[~x.isnan()]
    )


@pytest.mark.parametrize("place", [0, 11, 39])
def test_nan_stays_nan(place):
    states, weight = drawn(3, 40), drawn(40, seed=1)
    states[1, place] = math.nan
    norm = operations.cpu_rms_norm(states, weight, 1e-5)
    assert norm[1].isnan().all() and not norm[[0, 2]].isnan().any()
    product = operations.cpu_swiglu(states, weight.expand(3, -1).contiguous())
    assert product.isnan().nonzero().tolist() == [[1, place]]
    # (2, 1, 3, 40)
    states = states.view(1, 3, 40).expand(2, -1, -1).contiguous()[:, :, None].transpose(1, 2)
    parts = torch.tensor([[0, 3, 0, 0]])
    mixed, _ = operations.causal_attention(
        states, drawn(2, 1, 3, 40), drawn(2, 1, 3, 40, seed=4), parts, None, 0.1
    )
    assert not mixed[:, :, [0, 2]].isnan().any() and mixed[:, :, 1].isnan().all()


def by_definition(query, histories, scale, window):
    """(n, heads, d) in fp64, one query after another; `histories`: keys and values of each row,
    (kv_heads, T, d)."""
    rows = []
    for row, history in enumerate(histories):
        for head in range(query.shape[1]):
            k, v = (
                x[head // (query.shape[1] // len(x))].double()[-(window or x.shape[1]) :]
                for x in history
            )
            rows.append(torch.softmax(k @ query[row, head, 0].double() * scale, dim=0) @ v)
    return torch.stack(rows).view(len(histories), query.shape[1], -1)


@DTYPES
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "width"), [(6, 2, 24), (2, 2, 32), (9, 1, 64), (5, 1, 96), (6, 3, 128)]
)
@pytest.mark.parametrize("pooled", [False, True])
def test_decoding_writes_and_attends(heads, kv_heads, width, window, dtype, pooled):
    """Three rows of five of a cache; or three segments of a pool, of which two have the same three
    tokens before."""
    size = (1, kv_heads, 200, width) if pooled else (5, kv_heads, 40, width)
    keys, values = drawn(*size, dtype=dtype), drawn(*size, seed=1, dtype=dtype)
    kept = keys.clone(), values.clone()
    qkv = drawn(3, 1, heads + 2 * kv_heads, width, seed=2, dtype=dtype).transpose(1, 2)
    query, key, value = qkv.split([heads, kv_heads, kv_heads], dim=1)
    own, none = torch.tensor([0, 39, 17]), torch.zeros(3, dtype=torch.int64)
    rows, starts, prefixes, shared = torch.arange(3), none, none, none
    if pooled:
        rows, starts = none, torch.tensor([160, 90, 20])
        prefixes, shared = torch.tensor([[7, 7, 0], [3, 3, 0]])
    places = torch.stack([own, starts + rows * kv_heads * size[2], prefixes, shared])
    found = operations.decode_attention(query, key, value, (keys, values), places, 0.3, window)
    for cached, before, new in zip((keys, values), kept, (key, value), strict=True):
        before[rows, :, starts + own] = new[:, :, 0]
        assert torch.equal(cached, before), "the new token is written, and nothing else"
    histories = []
    for row, start, count, first, many in zip(rows, starts, own, prefixes, shared, strict=True):
        slots = [*range(first, first + many), *range(start, start + count + 1)]
        histories.append([x[row][:, slots] for x in (keys, values)])
    exact = by_definition(query, histories, 0.3, window)
    torch.testing.assert_close(found.double(), exact, rtol=HALF_STEP[dtype], atol=4e-6)


@DTYPES
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(4, 2, 64), (4, 1, 32), (2, 2, 20)])
def test_decoding_and_training_have_the_same_bits(heads, kv_heads, width, window, dtype):
    """A row of 50 tokens: whole; in two segments, of which the second sees the first; and token by
    token over a cache, whose first tokens are in another place than the others."""
    tokens = 50
    before = 33
    query = drawn(1, heads, tokens, width, dtype=dtype)
    key = drawn(1, kv_heads, tokens, width, seed=1, dtype=dtype)
    value = drawn(1, kv_heads, tokens, width, seed=2, dtype=dtype)
    whole, _ = operations.causal_attention(
        query, key, value, torch.tensor([[0, tokens, 0, 0]]), window, width**-0.5
    )
    segments = torch.tensor([[0, before, 0, 0], [before, tokens, 0, before]])
    divided, _ = operations.causal_attention(query, key, value, segments, window, width**-0.5)
    assert torch.equal(divided, whole)

    keys = drawn(1, kv_heads, 90, width, seed=3, dtype=dtype)  # a pool
    values = drawn(1, kv_heads, 90, width, seed=4, dtype=dtype)
    keys[:, :, 50 : 50 + before] = key[:, :, :before]
    values[:, :, 50 : 50 + before] = value[:, :, :before]
    for token in range(before, tokens):
        new = slice(token, token + 1)
        mixed = operations.decode_attention(
            query[:, :, new].contiguous(),
            key[:, :, new].contiguous(),
            value[:, :, new].contiguous(),
            (keys, values),
            torch.tensor([[token - before], [10], [50], [before]]),
            width**-0.5,
            window,
        )
        assert torch.equal(mixed[0], whole[0, :, token])
