"""State files: nested tensors and plain values, written durably, and loaded without executing anything."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import torch

from dschat_ppo.common.atomic_files import write_file
from dschat_ppo.common.heartbeat import watchdog_paused
from dschat_ppo.errors import UserError

_PLAIN = (str, int, float, bool, type(None))


def save_state(path: Path, state: dict[Any, Any]) -> None:
    """Write a state for `load_state`, durably: after a crash at any moment the file holds the old state or the new one.
    The state is nested dicts (keys: text or integers), lists and tuples of tensors and plain values. Tensors are stored
    without their gradient, on the CPU; of a view only its elements. `TypeError` for another value says where."""
    # Serialised in memory first: torch raises several kinds of exceptions for a full disk, `write_file` only OSError.
    buffer = io.BytesIO()
    torch.save(_storable(state, "state"), buffer)
    write_file(path, buffer.getbuffer())


def load_state(path: Path) -> dict[Any, Any]:
    """Load a state that `save_state` wrote, with tensors on the CPU. No code in the file is ever executed."""
    try:
        with watchdog_paused():
            state = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:  # its message explains how to open the file without safety
        raise UserError(f"{path}: not loaded: it is damaged, or holds more than tensors and plain values") from None
    except (OSError, RuntimeError, EOFError, ValueError, LookupError) as problem:
        reason = str(problem).split(". ")[0] or type(problem).__name__
        raise UserError(f"{path}: cannot be loaded as a state of a run ({reason})") from None
    if not isinstance(state, dict):
        raise UserError(f"{path}: holds a {type(state).__name__}, not a state of a run")
    return state


def _storable(value: Any, where: str) -> Any:
    """`value` as it is stored. Types are compared exactly: the loader refuses subclasses such as numpy's float64."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is torch.Tensor:
        alone = value.detach().cpu()  # torch.save writes the whole storage of a view, so a view is copied
        return alone if alone.untyped_storage().nbytes() == alone.nbytes else alone.clone()
    if kind is list or kind is tuple:
        return kind(_storable(part, f"{where}[{number}]") for number, part in enumerate(value))
    if kind is dict:
        for key in value:
            if type(key) not in (str, int):
                raise TypeError(f"{where} has the key {key!r} ({type(key).__name__}), which a checkpoint cannot hold")
        return {key: _storable(part, f"{where}[{key!r}]") for key, part in value.items()}
    raise TypeError(f"{where} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot hold")
