"""A state as a file: nested tensors and plain values, written durably, read without executing anything."""

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


def write_text(path: Path, text: str) -> None:
    """Write `text` (UTF-8) durably: after a crash at any moment the file holds the old content or the new one.

    Raises:
        OSError: it cannot be written; the old content is still there.
    """
    write_file(path, text.encode("utf-8"))


def save_state(path: Path, state: dict[Any, Any]) -> None:
    """Write a state durably (see `write_text`), for `load_state`.

    Args:
        path: of the file.
        state: nested dicts (keys: text or whole numbers), lists and tuples of tensors and plain values. Tensors are
            stored as they are to see: without their gradient, on the CPU, and of a view not more than what it shows.

    Raises:
        TypeError: something else is in it, which `load_state` would refuse to open; the message says where.
        OSError: it cannot be written; the old content is still there.
    """
    # Packed in memory first: torch reports a full disk by exceptions of several kinds, a file by OSError alone.
    packed = io.BytesIO()
    torch.save(_storable(state, "state"), packed)
    write_file(path, packed.getbuffer())


def load_state(path: Path) -> dict[Any, Any]:
    """A state that `save_state` wrote, its tensors on the CPU. Nothing that the file holds is ever executed.

    Raises:
        UserError: it cannot be read, is damaged, or holds anything but tensors and plain values.
    """
    try:
        with watchdog_paused():
            state = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:  # its own message tells how to open the file all the same
        raise UserError(f"{path}: not loaded: it is damaged, or holds more than tensors and plain values") from None
    except (OSError, RuntimeError, EOFError) as problem:
        reason = str(problem).split(". ")[0] or type(problem).__name__
        raise UserError(f"{path}: cannot be loaded as a state of a run ({reason})") from None
    if not isinstance(state, dict):
        raise UserError(f"{path}: holds a {type(state).__name__}, not a state of a run")
    return state


def _storable(value: Any, where: str) -> Any:
    """`value` as it is stored. Types are compared exactly: numpy's float64, an enumeration and a named tuple are kinds
    of float, int and tuple, but do not pass the loader."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is torch.Tensor:
        return _compact(value)
    if kind is list or kind is tuple:
        return kind(_storable(part, f"{where}[{number}]") for number, part in enumerate(value))
    if kind is dict:
        for key in value:
            if type(key) not in (str, int):
                raise TypeError(f"{where} has the key {key!r} ({type(key).__name__}), which a checkpoint cannot hold")
        return {key: _storable(part, f"{where}[{key!r}]") for key, part in value.items()}
    raise TypeError(f"{where} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot hold")


def _compact(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor alone: torch.save writes the whole storage that a view looks into."""
    alone = tensor.detach().cpu()
    return alone if alone.untyped_storage().nbytes() == alone.nbytes else alone.clone()
