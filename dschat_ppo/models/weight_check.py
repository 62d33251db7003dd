"""Compare the weights of a checkpoint with those of its model, without reading them."""

from __future__ import annotations

from collections.abc import Mapping, Set
from functools import cache
from pathlib import Path
from typing import Any

import transformers
from transformers import PretrainedConfig

from dschat_ppo.common.heartbeat import watchdog_paused
from dschat_ppo.common.logging import logger
from dschat_ppo.errors import UserError, reading
from dschat_ppo.models.adapter_weights import LM_HEADS
from dschat_ppo.models.model_files import (
    checkpoint_shapes,
    is_old_buffer,
    odd_expert,
    wants_settings_only,
    weight_files,
)

MAX_NAMES = 6  # of weights, in a message
_COMPARED: dict[tuple[Any, ...], Set[str]] = {}  # models that fit -> the allowed names that are missing


def check_weights(
    kind: Any,
    folder: str,
    config: PretrainedConfig,
    key_mapping: Mapping[str, str] | None = None,
    allowed_missing: Set[str] = frozenset(),
    allowed_unexpected: Set[str] = frozenset(),
) -> Set[str]:
    """Compare the checkpoint with the model on the meta device; returns the allowed names that are missing.

    A step checks all its models first and each again when it is loaded, and some roles share a folder. The result is
    kept for files that have not changed. With `settings_only`, a folder without weights is not compared.

    `kind` is the class of the model, or an auto class; `key_mapping` has patterns that rename weights of the
    checkpoint.
    """
    if wants_settings_only() and not weight_files(folder):
        _note_lack_of_weights(folder)
        return frozenset()
    files = {path.name: path.stat() for path in sorted(Path(folder).iterdir()) if path.is_file()}
    key = (
        kind.__module__, kind.__name__, folder, config.to_json_string(use_diff=False),
        *((name, found.st_size, found.st_mtime_ns) for name, found in files.items()),
        *sorted((key_mapping or {}).items()), frozenset(allowed_missing), frozenset(allowed_unexpected),
    )  # fmt: skip
    if key not in _COMPARED:
        _COMPARED[key] = _compare(kind, folder, config, key_mapping, allowed_missing, allowed_unexpected)
    return _COMPARED[key]


@cache
def _note_lack_of_weights(folder: str) -> None:
    logger().info(f"note: {folder} holds no weights, so they are not compared with its config.json")


def _compare(
    kind: Any,
    folder: str,
    config: PretrainedConfig,
    key_mapping: Mapping[str, str] | None,
    allowed_missing: Set[str],
    allowed_unexpected: Set[str],
) -> Set[str]:
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)  # it reports the same facts on a page
    try:
        with watchdog_paused(), reading(f"{folder}: its weights cannot be read as those of a {type(config).__name__}"):
            _, info = kind.from_pretrained(
                folder, config=config, device_map="meta", output_loading_info=True, key_mapping=key_mapping or None,
                ignore_mismatched_sizes=True,
            )  # fmt: skip
    except UserError as problem:
        odd = odd_expert(checkpoint_shapes(folder))
        if odd is None:
            raise
        fault = f"{folder}: the checkpoint does not fit {type(config).__name__}: wrong shape: {odd}"
        raise UserError(fault) from problem.__cause__
    finally:
        transformers.logging.set_verbosity(verbosity)
    missing = set(info["missing_keys"])
    unexpected = {name for name in info["unexpected_keys"] if not name.startswith(LM_HEADS)} - allowed_unexpected
    if unexpected:
        unexpected -= {name for name, shape in checkpoint_shapes(folder).items() if is_old_buffer(name, shape)}
    wrong_shape = {entry[0] if isinstance(entry, tuple) else str(entry) for entry in info["mismatched_keys"]}
    faults = []
    for fault, names in (
        ("missing", missing - allowed_missing), ("unexpected", unexpected), ("wrong shape", wrong_shape)
    ):  # fmt: skip
        more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
        faults += [f"{fault}: {', '.join(sorted(names)[:MAX_NAMES])}{more}"] if names else []
    if faults:
        raise UserError(f"{folder}: the checkpoint does not fit {type(config).__name__}: {'; '.join(faults)}")
    return missing & allowed_missing
