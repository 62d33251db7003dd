"""The kernels as functions of tensors: bf16 or fp32 on a CPU, without gradients, contiguous unless
a docstring says more.

The C++ files here are compiled once for each dtype, version of them, compiler and processor. They
have a plain C interface and need no header files of torch, so that this takes some seconds. The
library is in the folder of torch's own extensions, and appears there whole, by a rename, so ranks
may compile at once.

Results are rounded where separate operations of PyTorch are: after each product and sum that a
layer of transformers writes as a separate operation. Sums inside an operation are fp32.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dschat_ppo.common.atomic_files import sync_entries, sync_file
from dschat_ppo.common.heartbeat import watchdog_paused
from dschat_ppo.common.stop_requests import subprocesses_may_stop

SOURCES = sorted(Path(__file__).parent.glob("*.cpp"))
HEADERS = sorted(Path(__file__).parent.glob("*.h"))
# Sums in any order, so that they can be vectorised; NaN and infinity as usual.
FLAGS = tuple(
    """
    -O3 -march=native -std=c++17 -fopenmp -fno-math-errno -fno-trapping-math -fno-signed-zeros
    -fassociative-math -shared -fPIC
    """.split()
)
LIMIT_SECONDS = 300.0  # a compilation takes some seconds
# flags of the compiler
DTYPES: dict[torch.dtype, list[str]] = {torch.bfloat16: [], torch.float32: ["-DFP32"]}
_PLAIN = (Tensor, nn.Parameter)  # classes of tensors that have their numbers in memory
_NO_WINDOW = 2**62
_CHUNK = 64  # rows whose weight gradients one thread adds up
_log = logging.getLogger(__name__)

_POINTER = ctypes.c_void_p
_NUMBER = ctypes.c_int64
_REAL = ctypes.c_float
SIGNATURES: dict[str, list[Any]] = {
    "rms_norm": [_POINTER] * 2 + [_REAL, _POINTER] + [_NUMBER] * 2,
    "rotate": [_POINTER] * 3 + [_NUMBER] * 5,
    "rms_norm_backward": [_POINTER] * 3 + [_REAL] + [_POINTER] * 2 + [_NUMBER] * 3,
    "swiglu": [_POINTER] * 3 + [_NUMBER] * 3,
    "swiglu_backward": [_POINTER] * 5 + [_NUMBER] * 2,
    "causal_attention": [_POINTER] * 7 + [_NUMBER, _POINTER, _REAL],
    "causal_attention_backward": [_POINTER] * 12 + [_NUMBER, _POINTER, _REAL],
    "decode_attention": [_POINTER] * 3 + [_NUMBER] * 3 + [_POINTER] * 4 + [_NUMBER] * 6 + [_REAL],
}


class BuildError(RuntimeError):
    """The kernels cannot be compiled or loaded on this machine."""


@cache
def kernels(dtype: torch.dtype) -> ctypes.CDLL | None:
    """The library for a dtype, compiled if needed. None if this machine cannot: a warning says why,
    and PyTorch takes its place."""
    try:
        with subprocesses_may_stop("compiled kernels"), watchdog_paused():
            try:
                return load_library(build(cache_folder(), dtype))
            except OSError:  # the folder cannot be written: compile for this process alone
                with tempfile.TemporaryDirectory() as folder:
                    return load_library(build(Path(folder), dtype))
    except (BuildError, OSError, subprocess.TimeoutExpired) as problem:
        _log.warning(
            f"kernels for this processor are not available ({problem}): training and rollouts are"
            " slower"
        )
        return None


def load_library(path: Path) -> ctypes.CDLL:
    """Load a compiled library. The libgomp that torch has loaded serves it too, with torch's number
    of threads."""
    library = ctypes.CDLL(str(path))
    for name, types in SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes = types
        function.restype = None
    return library


def build(folder: Path, dtype: torch.dtype) -> Path:
    """The compiled file in `folder`. `BuildError`: no working compiler; `OSError`: `folder` cannot
    be written."""
    command = [*_compiler(), *FLAGS, *DTYPES[dtype]]
    if "clang" in os.path.basename(os.path.realpath(command[0])):
        command.remove("-fopenmp")  # its library is not torch's, and has its own threads
    path = folder / f"kernels-{_fingerprint(command)}.so"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            compiled = Path(temporary, path.name)
            _compile([*command, *map(str, SOURCES), "-o", str(compiled)])
            with compiled.open("rb") as file:
                sync_file(file.fileno())
            os.replace(compiled, path)
        sync_entries(folder)
    return path


def _compiler() -> list[str]:
    """The compiler and its first arguments: those of `CXX`, which may be "ccache g++", or c++, or
    g++."""
    named = shlex.split(os.environ.get("CXX", ""))
    commands = [["c++"], ["g++"]]
    missing = "there is no C++ compiler"
    if named:
        commands = [named]
        missing = f"CXX names '{named[0]}', which is not there"
    for program, *arguments in commands:
        path = shutil.which(program)
        if path is not None:
            return [path, *arguments]
    raise BuildError(f"{missing}: install g++, or name a compiler by CXX")


def cache_folder() -> Path:
    """The folder in that of torch's extensions, which `TORCH_EXTENSIONS_DIR` moves. `OSError`: the
    home is unknown."""
    root = os.environ.get("TORCH_EXTENSIONS_DIR")
    if not root:
        caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        root = os.path.join(caches, "torch_extensions")
    if root.startswith("~"):
        raise OSError("the home folder is unknown")
    return Path(root, "dschat_ppo_kernels")


def _compile(command: list[str]) -> None:
    """Run the compiler. `BuildError` with its first error."""
    process = subprocess.run(
        command, capture_output=True, text=True, errors="replace", timeout=LIMIT_SECONDS
    )
    if process.returncode:
        lines = (process.stderr + process.stdout).strip().splitlines()
        if not lines:
            lines = [f"exit code {process.returncode}"]
        errors = [line for line in lines if "error" in line]
        raise BuildError(f"{command[0]} failed: {(errors or lines)[0]}")


def _fingerprint(command: list[str]) -> str:
    """Of all that the compiled file depends on; a folder may be shared by machines with other
    processors."""
    compiler = os.path.realpath(command[0])
    inputs = [
        *command,
        compiler,
        str(os.stat(compiler).st_mtime_ns),
        torch.__version__,
        platform.machine(),
        *_processor(),
    ]
    inputs += [path.read_text(encoding="utf-8") for path in (*SOURCES, *HEADERS)]
    return hashlib.sha256("\0".join(inputs).encode()).hexdigest()[:16]


def _processor() -> list[str]:
    """Lines of Linux that name the processor and its instruction sets."""
    names = ("flags", "features", "model name", "cpu part")
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return sorted({line for line in lines if line.lower().startswith(names)})


def can_run(*tensors: Tensor) -> bool:
    """Whether the kernels take tensors of this kind, and are available."""
    dtype = tensors[0].dtype
    fit = all(type(x) in _PLAIN and x.dtype == dtype and x.device.type == "cpu" for x in tensors)
    return fit and dtype in DTYPES and kernels(dtype) is not None


def _call_kernel(name: str, *arguments: Tensor | ctypes.Array[Any] | float) -> None:
    """Call a kernel, whose pointers are those of the tensors; the first has the dtype. On the meta
    device tensors have shapes alone."""
    first = arguments[0]
    assert isinstance(first, Tensor)
    if first.is_meta:
        return
    library = kernels(first.dtype)
    assert library is not None, "call can_run first"
    values: list[Any] = []
    for argument in arguments:
        if isinstance(argument, Tensor):
            values.append(argument.data_ptr())
        else:
            values.append(argument)
    getattr(library, name)(*values)


def cpu_rms_norm(states: Tensor, weight: Tensor, eps: float) -> Tensor:
    """(..., H) and (H,) -> (..., H): weight * (x / sqrt(mean(x^2) + eps)). (Zhang and Sennrich
    2019, equation 4)"""
    normal = torch.empty_like(states)
    width = states.shape[-1]
    assert weight.shape == (width,)
    _call_kernel("rms_norm", states, weight, eps, normal, states.numel() // width, width)
    return normal


def cpu_rms_norm_backward(
    states: Tensor, weight: Tensor, gradient: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """The gradients of states (..., H) and weight (H,), given that of `cpu_rms_norm` (..., H)."""
    of_states = torch.empty_like(states)
    width = states.shape[-1]
    rows = states.numel() // width
    assert weight.shape == (width,) and gradient.shape == states.shape
    # one sum for each chunk of rows, so that threads share none
    chunk_sums = states.new_empty(-(-rows // _CHUNK), width, dtype=torch.float32)
    _call_kernel(
        "rms_norm_backward",
        states,
        weight,
        gradient,
        eps,
        of_states,
        chunk_sums,
        rows,
        width,
        _CHUNK,
    )
    return of_states, chunk_sums.sum(dim=0).to(weight.dtype)


def rotate_(values: Tensor, cos: Tensor, sin: Tensor, heads: int) -> None:
    """Rotate the first `heads` of `values` (n, all heads, d) in place: x * cos + rotate_half(x) *
    sin. `cos`, `sin`: (n, d), or (1, d) for all rows alike. (Su et al. 2021, equation 34)"""
    rows, all_heads, width = values.shape
    assert cos.shape == sin.shape and cos.shape in ((rows, width), (1, width))
    angle_stride = 0
    if len(cos) > 1:
        angle_stride = width
    _call_kernel("rotate", values, cos, sin, angle_stride, rows, heads, all_heads, width)


def cpu_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """(..., I) each -> (..., I): silu(gate) * up. (Shazeer 2020, equation 6) They may be the halves
    of one tensor."""
    product = gate.new_empty(gate.shape)
    width = gate.shape[-1]
    gate = gate.reshape(-1, width)
    up = up.reshape(-1, width)
    assert gate.shape == up.shape and gate.stride() == up.stride()
    _call_kernel("swiglu", gate, up, product, len(gate), width, gate.stride(0))
    return product


def cpu_swiglu_backward(gate: Tensor, up: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of gate and up (..., I), given that of `cpu_swiglu`."""
    of_gate = torch.empty_like(gate)
    of_up = torch.empty_like(up)
    width = gate.shape[-1]
    assert gate.shape == up.shape == gradient.shape
    _call_kernel(
        "swiglu_backward", gate, up, gradient, of_gate, of_up, gate.numel() // width, width
    )
    return of_gate, of_up


def decode_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cache: tuple[Tensor, Tensor],
    token_offsets: Tensor,
    scale: float,
    window: int | None,
) -> Tensor:
    """Write one token of each row into the KV cache; attend from it to its row's tokens up to it ->
    (n, heads, d).

    Args:
        query: (n, heads, 1, d), a view whose heads are side by side.
        key: (n, kv_heads, 1, d), likewise; and `value`.
        cache: keys and values, (rows, kv_heads, capacity, d) each, which change in place.
        token_offsets: (4, n) int64, contiguous. For each row the number of own tokens before the
            new one, and the line of the keys of the first head, counted as if all rows were one,
            from which they are; then, for tokens before these, the line from which they are, and
            their number.
        scale: of the logits.
        window: how many tokens a token sees, itself among them; None: all.
    """
    rows, heads, _, width = query.shape
    keys, values = cache
    kv_heads, capacity = keys.shape[1:3]
    assert keys.shape == values.shape and key.shape == value.shape == (rows, kv_heads, 1, width)
    assert token_offsets.shape == (4, rows) and token_offsets.is_contiguous()
    mixed = query.new_empty(rows, heads, width)
    _call_kernel(
        "decode_attention",
        query,
        key,
        value,
        query.stride(0),
        key.stride(0),
        value.stride(0),
        keys,
        values,
        token_offsets,
        mixed,
        rows,
        heads,
        kv_heads,
        capacity,
        width,
        _window(window),
        scale,
    )
    return mixed


def causal_attention(
    query: Tensor, key: Tensor, value: Tensor, segments: Tensor, window: int | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention inside each segment of the rows, to the keys up to a query's own.

    `query` (b, heads, T, d); `key` (b, key heads, T, d), and `value` likewise, of another d or of
    the same; key heads divide the heads. `segments` (segments, 4) int64: the columns of each, start
    and end, and those that it sees before its own. `window`: how many keys a query sees, its own
    among them; None: all.

    Returns (b, heads, T, d of the values), laid out in memory as (b, T, heads, d), and for the
    backward pass the logarithm of the sum of the exponentials of each query's logits, (b, heads, T)
    fp32.
    """
    query = _dense(query)
    key = _dense(key)
    value = _dense(value)
    rows, heads, length, _ = query.shape
    output = query.new_empty(rows, length, heads, value.shape[-1]).transpose(1, 2)
    log_sums = query.new_empty(rows, heads, length, dtype=torch.float32)
    tensors = query, key, value, output
    shape = _shape(query, key, value, window)
    _call_kernel(
        "causal_attention",
        *tensors,
        _strides(*tensors),
        log_sums,
        segments,
        len(segments),
        shape,
        scale,
    )
    return output, log_sums


def causal_attention_backward(
    projections: tuple[Tensor, Tensor, Tensor],
    results: tuple[Tensor, Tensor],
    gradient: Tensor,
    segments: Tensor,
    groups: Tensor,
    window: int | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of the arguments of `causal_attention`.

    Args:
        projections: query, key and value, as there.
        results: what it has returned.
        gradient: of the first of these.
        segments: as there.
        groups: (groups + 1,) int64, the first segment of each group, and the number of segments;
            no segment sees another group.
        window: as there.
        scale: as there.

    Returns:
        Those of query, key and value.
    """
    query = _dense(projections[0])
    key = _dense(projections[1])
    value = _dense(projections[2])
    output, log_sums = results
    gradient = _dense(gradient)
    of_query = torch.empty_like(query)
    of_key = torch.empty_like(key)
    of_value = torch.empty_like(value)
    tensors = query, key, value, output, gradient, of_query, of_key, of_value
    shape = _shape(query, key, value, window)
    _call_kernel(
        "causal_attention_backward",
        *tensors,
        _strides(*tensors),
        log_sums,
        segments,
        groups,
        len(groups) - 1,
        shape,
        scale,
    )
    return of_query, of_key, of_value


def _dense(values: Tensor) -> Tensor:
    """`values`, whose last dimension has no gaps in memory."""
    if values.stride(-1) == 1:
        return values
    return values.contiguous()


def _window(window: int | None) -> int:
    """How many keys a query sees, for a kernel."""
    if window is None:
        return _NO_WINDOW
    return window


def _strides(*tensors: Tensor) -> ctypes.Array[Any]:
    """The first three strides of each, for a kernel."""
    strides = list[int]()
    for tensor in tensors:
        strides += tensor.stride()[:3]
    return (ctypes.c_int64 * len(strides))(*strides)


def _shape(query: Tensor, key: Tensor, value: Tensor, window: int | None) -> ctypes.Array[Any]:
    """Rows, heads, key heads, columns, widths of a head of keys and of values, and the window, for
    a kernel."""
    rows, heads, length, width = query.shape
    sizes = (rows, heads, key.shape[1], length, width, value.shape[-1], _window(window))
    return (ctypes.c_int64 * len(sizes))(*sizes)
