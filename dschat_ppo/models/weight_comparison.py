"""Compare the weights of a checkpoint with those of a model, by names and shapes, before they are
loaded."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

import transformers
from transformers import PretrainedConfig

from dschat_ppo.common.heartbeat import watchdog_paused
from dschat_ppo.common.logging import log_once
from dschat_ppo.errors import UserError, reading
from dschat_ppo.models.architectures import LM_HEADS
from dschat_ppo.models.model_folders import files_key, wants_settings_only
from dschat_ppo.models.weight_headers import (
    checkpoint_headers,
    checkpoint_shapes,
    is_old_buffer,
    require_floating_point,
    weight_files,
)

MAX_NAMES = 6  # of weights, in a message
# models that fit -> the allowed names that are missing
_COMPARED: dict[tuple[Any, ...], Set[str]] = {}


def check_weights(
    kind: Any,
    folder: str,
    config: PretrainedConfig,
    key_mapping: Mapping[str, str] | None = None,
    allowed_missing: Set[str] = frozenset(),
    allowed_unexpected: Set[str] = frozenset(),
) -> Set[str]:
    """Compare the checkpoint with the model on the meta device. The result is kept for files that
    have not changed, as steps check all models first and again when they load them. With
    `settings_only`, a folder without weights is not compared.

    Args:
        kind: a class of models, or an auto class.
        folder: that of the checkpoint.
        config: of the model.
        key_mapping: patterns that rename weights of the checkpoint.
        allowed_missing: names of weights that the checkpoint need not have.
        allowed_unexpected: names of weights that it may have besides.

    Returns:
        The names of `allowed_missing` that it does not have.

    Raises:
        UserError: other weights are missing or unexpected, or a shape or a number format differs.
    """
    if wants_settings_only() and not weight_files(folder):
        log_once(f"note: {folder} holds no weights, so they are not compared with its config.json")
        return frozenset()
    key = (
        kind.__module__,
        kind.__name__,
        config.to_json_string(use_diff=False),
        *files_key(folder),
        *sorted((key_mapping or {}).items()),
        frozenset(allowed_missing),
        frozenset(allowed_unexpected),
    )
    if key not in _COMPARED:
        info, integers = _compared_by_transformers(kind, folder, config, key_mapping)
        require_floating_point(folder, checkpoint_headers(folder), integers)
        missing = set(info["missing_keys"])
        names_by_fault = {
            "missing": missing - allowed_missing,
            "unexpected": _unexpected_names(info, folder, allowed_unexpected),
            "wrong shape": _names_of_wrong_shape(info),
        }
        _refuse_faults(folder, config, names_by_fault)
        _COMPARED[key] = missing & allowed_missing
    return _COMPARED[key]


def _refuse_faults(
    folder: str, config: PretrainedConfig, names_by_fault: Mapping[str, Set[str]]
) -> None:
    """Refuse a checkpoint if any fault has names of weights."""
    faults = [f"{fault}: {_first_names(names)}" for fault, names in names_by_fault.items() if names]
    if faults:
        raise UserError(
            f"{folder}: the checkpoint does not fit {type(config).__name__}: {'; '.join(faults)}"
        )


def _unexpected_names(info: Mapping[str, Any], folder: str, allowed: Set[str]) -> set[str]:
    """The weights in transformers' record that the model does not have, without those `allowed`,
    output heads of language models, and buffers of old files."""
    names = {name for name in info["unexpected_keys"] if not name.startswith(LM_HEADS)}
    names -= allowed
    if names:
        for name, shape in checkpoint_shapes(folder).items():
            if is_old_buffer(name, shape):
                names.discard(name)
    return names


def _names_of_wrong_shape(info: Mapping[str, Any]) -> set[str]:
    """The weights in transformers' record whose shape is another one than the model's."""
    names = set()
    for entry in info["mismatched_keys"]:  # (name, shape, shape), or a name
        if isinstance(entry, tuple):
            names.add(entry[0])
        else:
            names.add(str(entry))
    return names


def _compared_by_transformers(
    kind: Any, folder: str, config: PretrainedConfig, key_mapping: Mapping[str, str] | None
) -> tuple[dict[str, Any], list[str]]:
    """transformers' record of how the weights in `folder` differ from the model's, which it builds
    on the meta device, and the names of the model's buffers that are not of floating point."""
    verbosity = transformers.logging.get_verbosity()
    # it reports the same facts on a page
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    try:
        with (
            watchdog_paused(),
            reading(f"{folder}: its weights cannot be read as those of a {type(config).__name__}"),
        ):
            model, info = kind.from_pretrained(
                folder,
                config=config,
                device_map="meta",
                output_loading_info=True,
                key_mapping=key_mapping or None,
                ignore_mismatched_sizes=True,
            )
    finally:
        transformers.logging.set_verbosity(verbosity)
    integers = [name for name, buffer in model.named_buffers() if not buffer.is_floating_point()]
    return info, integers


def _first_names(names: Set[str]) -> str:
    """The first `MAX_NAMES` of `names`, and how many more there are."""
    text = ", ".join(sorted(names)[:MAX_NAMES])
    if len(names) > MAX_NAMES:
        text += f" and {len(names) - MAX_NAMES} more"
    return text
