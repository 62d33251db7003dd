"""The compiled library of the C++ files here: built once for each version of these files, compiler and processor.

It has a plain C interface and needs no header files of torch, so that a compilation takes some seconds. Files lie
beside the operators that DeepSpeed compiles. A file appears there whole, by a rename, so ranks may compile at once.
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
_log = logging.getLogger(__name__)

_POINTER, _NUMBER, _REAL = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
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
def kernels() -> ctypes.CDLL | None:
    """The library, compiled if needed. None if this machine cannot: a warning says why, and PyTorch takes its place."""
    try:
        with subprocesses_may_stop("compiled kernels"), watchdog_paused():
            try:
                return load(build(cache_folder()))
            except OSError:  # the folder cannot be written: compile for this process alone
                with tempfile.TemporaryDirectory() as place:
                    return load(build(Path(place)))
    except (BuildError, OSError, subprocess.TimeoutExpired) as problem:
        _log.warning(f"kernels for this processor are not available ({problem}): training and rollouts are slower")
        return None


def load(path: Path) -> ctypes.CDLL:
    """Load a compiled library. The libgomp that torch has loaded serves it too, with torch's number of threads."""
    library = ctypes.CDLL(str(path))
    for name, types in SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = types, None
    return library


def build(folder: Path) -> Path:
    """The compiled file in `folder`. `BuildError`: no working compiler; `OSError`: `folder` cannot be written."""
    command = [*_compiler(), *FLAGS]
    if "clang" in os.path.basename(os.path.realpath(command[0])):
        command.remove("-fopenmp")  # its library is another one than torch's, with threads of its own
    path = folder / f"kernels-{_fingerprint(command)}.so"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as place:
            made = Path(place, path.name)
            _compile([*command, *map(str, SOURCES), "-o", str(made)])
            with made.open("rb") as file:
                sync_file(file.fileno())
            os.replace(made, path)
        sync_entries(folder)
    return path


def _compiler() -> list[str]:
    """The compiler and its first arguments: those of `CXX`, which may be "ccache g++", or c++, or g++."""
    named = shlex.split(os.environ.get("CXX", ""))
    for program, *arguments in [named] if named else [["c++"], ["g++"]]:
        if (found := shutil.which(program)) is not None:
            return [found, *arguments]
    missing = f"CXX names '{named[0]}', which is not there" if named else "there is no C++ compiler"
    raise BuildError(f"{missing}: install g++, or name a compiler by CXX")


def cache_folder() -> Path:
    """The folder in that of torch's extensions, which `TORCH_EXTENSIONS_DIR` moves. `OSError`: the home is unknown."""
    root = os.environ.get("TORCH_EXTENSIONS_DIR")
    if not root:
        root = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "torch_extensions")
    if root.startswith("~"):
        raise OSError("the home folder is unknown")
    return Path(root, "dschat_ppo_kernels")


def _compile(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=LIMIT_SECONDS)
    if done.returncode:
        lines = (done.stderr + done.stdout).strip().splitlines() or [f"exit code {done.returncode}"]
        errors = [line for line in lines if "error" in line]
        raise BuildError(f"{command[0]} failed: {(errors or lines)[0]}")


def _fingerprint(command: list[str]) -> str:
    """Of all that the compiled file depends on; a folder may be shared by machines with other processors."""
    real = os.path.realpath(command[0])
    parts = [*command, real, str(os.stat(real).st_mtime_ns), torch.__version__, platform.machine(), *_processor()]
    parts += [path.read_text(encoding="utf-8") for path in (*SOURCES, *HEADERS)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _processor() -> list[str]:
    """Lines of Linux that name the processor and its instruction sets."""
    kept = ("flags", "features", "model name", "cpu part")
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return sorted({line for line in lines if line.lower().startswith(kept)})
