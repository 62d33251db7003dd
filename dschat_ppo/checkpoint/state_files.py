"""Files of tensors and plain values: written durably, at once or in the background, and loaded
without running code."""

from __future__ import annotations

import hashlib
import os
import pickle
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, TypedDict, cast

import torch
from torch import Tensor

from dschat_ppo.common.heartbeat import heartbeat, watchdog_paused
from dschat_ppo.errors import UserError


class FileEntry(TypedDict):
    """Size and SHA-256 (hex) of a file."""

    bytes: int
    sha256: str


_PLAIN = (str, int, float, bool, type(None), torch.dtype, torch.Size)


def save_state(path: Path, state: dict[Any, Any]) -> None:
    """Write a state for `load_state`, and flush it to the disk. `OSError`: the file may be
    incomplete."""
    _write_and_describe(host_copy(state), path)


def load_state(path: str | Path, mapped: bool = False) -> dict[Any, Any]:
    """Load a state, with tensors on the CPU; no code in the file is ever executed. Tensors that are
    `mapped` from the file take no memory until they are read: copy those that must outlive it."""
    try:
        with watchdog_paused():
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except (
        pickle.UnpicklingError,
        OSError,
        RuntimeError,
        EOFError,
        ValueError,
        LookupError,
    ) as problem:
        # torch's message explains at length how to open the file without safety, before it names
        # the reason
        lines = str(problem).rpartition("WeightsUnpickler error: ")[2].split(". ")[0].splitlines()
        reason = next((line for line in lines if line.strip()), type(problem).__name__)
        raise UserError(
            f"{path}: cannot be loaded: it is damaged, or holds more than tensors and plain values"
            f" ({reason})"
        ) from None
    if not isinstance(state, dict):
        raise UserError(f"{path}: holds a {type(state).__name__}, not a state of a run")
    return state


def host_copy(value: Any, seen: dict[Any, Tensor] | None = None, where: str = "state") -> Any:
    """A copy of nested containers in which every tensor is a contiguous copy in host memory, of a
    view only its elements. Two names of one tensor (tied weights) share one copy, which
    `torch.save` writes once. Raises `TypeError`, which says where, for a class that `load_state`
    refuses: types are compared exactly, since it refuses numpy's float64, a float.

    Args:
        value: a tensor, a plain value, or containers of them.
        seen: the copies so far, by the tensor that was copied; None: none yet.
        where: what `value` is, for the message.
    """
    if seen is None:
        seen = {}
    if isinstance(value, Tensor):
        identity = (value.device, value.data_ptr(), value.dtype, value.shape, value.stride())
        if value.numel() == 0 or identity not in seen:
            seen[identity] = value.detach().to("cpu", copy=True).contiguous()
            heartbeat()
        return seen[identity]
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind in (dict, OrderedDict):
        for key in value:
            if type(key) not in (str, int):
                raise TypeError(
                    f"{where} has the key {key!r} ({type(key).__name__}), which a checkpoint cannot"
                    " hold"
                )
        return kind(
            (key, host_copy(item, seen, f"{where}[{key!r}]")) for key, item in value.items()
        )
    if kind in (list, tuple):
        return kind(host_copy(item, seen, f"{where}[{index}]") for index, item in enumerate(value))
    raise TypeError(
        f"{where} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot hold"
    )


class BackgroundWriter:
    """`save` copies a state and returns, a thread writes it, `wait` waits for it and raises the
    errors of the disk. The host holds a copy of each state until it is written."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._written: dict[Path, Future[FileEntry]] = {}

    def save(self, state: dict[str, Any], path: Path) -> None:
        """Copy the state as it is now, and let the thread write it. `TypeError`: `load_state` would
        refuse a value."""
        self._written[path] = self._thread.submit(_write_and_describe, host_copy(state), path)

    def done(self) -> bool:
        """Whether everything is written, so that `wait` returns (or raises) at once."""
        return all(future.done() for future in self._written.values())

    def wait(self) -> dict[Path, FileEntry]:
        """Wait until all that was saved since the last call is on the disk; returns length and
        SHA-256 (hex) of each file of this rank. Raises the `OSError` of a file that could not be
        written; the writer can be used again. The thread sends no heartbeat: it would hide that
        training, which runs at the same time, hangs."""
        written = self._written
        self._written = {}
        with watchdog_paused():
            failures = [future.exception() for future in written.values()]
        for failure in failures:
            if failure is not None:
                raise failure
        return {path: future.result() for path, future in written.items()}


def _write_and_describe(state: dict[str, Any], path: Path) -> FileEntry:
    """Write, flush to the disk, and describe the file."""
    digest = hashlib.sha256()
    with open(path, "wb") as file:

        def write(data: bytes | memoryview) -> int:
            digest.update(data)
            return file.write(data)

        try:
            torch.save(state, cast(IO[bytes], SimpleNamespace(write=write, flush=file.flush)))
        except RuntimeError as problem:
            # torch's archive writer may hide the error of the disk in it
            if isinstance(problem.__context__, OSError):
                raise problem.__context__ from None
            raise problem from None
        file.flush()
        os.fsync(file.fileno())
        return {"bytes": file.tell(), "sha256": digest.hexdigest()}
