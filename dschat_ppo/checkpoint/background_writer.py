"""Files of engine states: copied at once, written, hashed and flushed in the background; loading them runs no code."""

from __future__ import annotations

import copy
import copyreg
import hashlib
import os
import pickle
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, cast

import torch
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address
from torch import Tensor

from dschat_ppo.common.heartbeat import heartbeat, watchdog_paused
from dschat_ppo.errors import UserError

# Every class that DeepSpeed 0.19.8 pickles for ZeRO stages 0 to 3 in fp32, bf16 and fp16, with and without offload.
_CLASSES = [LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address]
# Enum members by value: Python 3.11.0 to 3.11.3 would write a `getattr`, which `load_file` refuses.
copyreg.pickle(ZeroStageEnum, lambda stage: (ZeroStageEnum, (stage.value,)))
_PLAIN = (str, int, float, bool, type(None), torch.dtype, torch.Size, ZeroStageEnum, fragment_address)


class BackgroundWriter(CheckpointEngine):
    """DeepSpeed's interface for files of an engine: `save` copies and returns, a thread writes, `wait` waits for it.

    One writer serves any number of engines. The host holds a copy of each state until it is written. `save` and
    `makedirs` raise no errors of the disk, because the other ranks would then wait for this one at DeepSpeed's
    barriers; `wait` raises them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.name = "BackgroundWriter"
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._written: dict[Path, Future[tuple[int, str]]] = {}
        self._problem: OSError | None = None

    def create(self, info: Any) -> None:
        """Nothing to prepare."""

    def commit(self, info: Any) -> bool:
        """Nothing to do: a checkpoint is complete when its manifest is written, after `wait`."""
        return True

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Make a folder; `wait` raises a failure."""
        try:
            os.makedirs(path, exist_ok=exist_ok)
        except OSError as problem:
            self._problem = self._problem or problem

    def save(self, state_dict: dict[str, Any], path: str) -> None:
        """Copy the state as it is now, and let the thread write it. `TypeError`: `load_file` would refuse a value."""
        self._written[Path(path)] = self._thread.submit(_write, host_copy(state_dict), Path(path))

    def load(self, path: str, map_location: Any = None) -> dict[str, Any]:
        """The state in `path`, on the host. Weights are mapped from the file; optimizer states are copied."""
        with watchdog_paused():  # this waits only for the disk
            state = load_file(path)
            return {key: value if key == "module" else host_copy(value) for key, value in state.items()}

    def done(self) -> bool:
        """Whether everything is written, so that `wait` returns (or raises) at once."""
        return all(future.done() for future in self._written.values())

    def wait(self) -> dict[Path, tuple[int, str]]:
        """Wait until all that was saved is on the disk; returns length and SHA-256 (hex) of each file of this rank.

        Only files since the last call count. The thread sends no heartbeat: it would hide that training, which runs at
        the same time, hangs. Raises the `OSError` of a file that could not be written; the writer can be used again.
        """
        written, problem = self._written, self._problem
        self._written, self._problem = {}, None
        with watchdog_paused():
            failures = [failure for future in written.values() if (failure := future.exception())]
        if problem or failures:
            raise problem or failures[0]
        return {path: future.result() for path, future in written.items()}


class _HashedFile:
    """A file for `torch.save`: counts and hashes the bytes, and remembers the error of the disk. When a write fails,
    torch's archive writer raises a RuntimeError, which hides the reason."""

    def __init__(self, file: IO[bytes]):
        self._file = file
        self._hash = hashlib.sha256()
        self.length = 0
        self.problem: OSError | None = None

    def write(self, data: bytes | memoryview) -> int:
        try:
            self._file.write(data)
        except OSError as problem:
            self.problem = self.problem or problem
            raise
        self._hash.update(data)
        self.length += len(data)
        return len(data)

    def flush(self) -> None:
        self._file.flush()

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


def _write(state: dict[str, Any], path: Path) -> tuple[int, str]:
    """Write, flush to the disk, and return (bytes, SHA-256)."""
    with open(path, "wb") as file:
        hashed = _HashedFile(file)
        try:
            torch.save(state, cast(IO[bytes], hashed))
        except RuntimeError:
            if hashed.problem is None:
                raise
            raise hashed.problem from None
        os.fsync(file.fileno())
    return hashed.length, hashed.hexdigest()


def host_copy(value: Any, seen: dict[Any, Tensor] | None = None, where: str = "state") -> Any:
    """A copy of nested containers in which every tensor is a contiguous copy in host memory.

    A view becomes a tensor of only its elements, so that a file does not contain the buffer behind it. Two names of one
    tensor (tied weights) share one copy, so that `torch.save` writes it once. Raises `TypeError`, which says where, for
    a class that `load_file` refuses.
    """
    seen = {} if seen is None else seen
    if isinstance(value, Tensor):
        identity = (value.device, value.data_ptr(), value.dtype, value.shape, value.stride())
        if value.numel() == 0 or identity not in seen:
            seen[identity] = value.detach().to("cpu", copy=True).contiguous()
            heartbeat()
        return seen[identity]
    if isinstance(value, LossScaler | DynamicLossScaler):
        return copy.copy(value)  # training changes it in place
    if isinstance(value, _PLAIN):
        return value
    if type(value) in (dict, OrderedDict):
        return type(value)((key, host_copy(item, seen, f"{where}.{key}")) for key, item in value.items())
    if type(value) in (list, tuple):
        return type(value)(host_copy(item, seen, f"{where}[{number}]") for number, item in enumerate(value))
    raise TypeError(f"{where} is a {type(value).__name__}, which a checkpoint cannot hold")


def load_file(path: str | Path) -> dict[str, Any]:
    """Load a file of `BackgroundWriter`, executing no code. Tensors are mapped: copy those that must outlive it."""
    try:
        with torch.serialization.safe_globals(_CLASSES):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (pickle.UnpicklingError, RuntimeError) as problem:
        reason = str(problem).rpartition("WeightsUnpickler error: ")[2].split(". ")[0].splitlines()[0]
        raise UserError(f"{path}: not a file of engine states that is safe to open ({reason})") from None
