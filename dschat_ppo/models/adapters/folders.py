"""The files of an adapter folder: its settings, and LoRA matrices under peft's names."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from dschat_ppo.errors import UserError, reading
from dschat_ppo.models.weight_headers import (
    WeightHeader,
    format_of,
    load_pickled,
    require_floating_point,
)

ADAPTER = "default"  # peft's name of a model's only adapter
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_OLD_WEIGHTS = "adapter_model.bin"
# Settings of an adapter that this project reads, and those that say only how it began or was
# written.
_USED = {
    "alpha_pattern",
    "base_model_name_or_path",
    "bias",
    "exclude_modules",
    "fan_in_fan_out",
    "init_lora_weights",
    "layers_pattern",
    "layers_to_transform",
    "lora_alpha",
    "lora_dropout",
    "modules_to_save",
    "r",
    "rank_pattern",
    "revision",
    "target_modules",
    "task_type",
    "use_dora",
    "use_rslora",
}
_NO_EFFECT = {
    "auto_mapping",
    "corda_config",
    "eva_config",
    "inference_mode",
    "loftq_config",
    "lora_ga_config",
    "megatron_core",
    "peft_type",
    "peft_version",
    "qalora_group_size",
}
_PREFIX = "base_model.model."  # of peft's names of weights: a model inside two wrappers
_MAGNITUDE = "lora_magnitude_vector"  # of DoRA: a module with one weight, which the file leaves out


def read_adapter_config(folder: str, flag: str) -> dict[str, Any]:
    """The settings in `adapter_config.json` that peft gets: a closed list, so that a folder names
    no code. `UserError`: they do not describe LoRA matrices of linear layers, or the scale is not a
    number."""
    file = Path(folder) / ADAPTER_CONFIG
    with reading(f"{flag} {file}: cannot be used"):
        config = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(config, dict):
        raise UserError(f"{flag} {file}: must be a JSON object")
    kind = config.get("peft_type")
    start = config.get("init_lora_weights", True)
    unknown_settings = sorted(
        name for name, value in config.items() if value and name not in _USED | _NO_EFFECT
    )
    unusable = {
        f"an adapter of type {kind}": kind != "LORA",
        "LoRA with trained biases": config.get("bias", "none") != "none",
        f"LoRA that changed the weights of its base (init_lora_weights {start})": (
            isinstance(start, str) and start not in ("gaussian", "eva", "orthogonal")
        ),
        f"LoRA with {', '.join(unknown_settings)}": bool(unknown_settings),
    }
    for description, applies in unusable.items():
        if applies:
            raise UserError(
                f"{flag} {folder}: holds {description}; merge it into its base with peft"
                " (merge_and_unload) and save that"
            )
    scales = {"lora_alpha": config.get("lora_alpha", 1)}
    if isinstance(config.get("alpha_pattern"), dict):
        scales |= config["alpha_pattern"]
    for name, scale in scales.items():
        is_number = isinstance(scale, (int, float)) and not isinstance(scale, bool)
        if not is_number or not math.isfinite(scale):
            raise UserError(
                f"{flag} {file}: the scale {name} must be a finite number and is {scale!r}; copy"
                " the file again, or write the lora_alpha that the adapter was trained with"
            )
    return {name: value for name, value in config.items() if name in _USED}


def adapter_weights(folder: str) -> dict[str, Tensor]:
    """The weights in an adapter folder, on the CPU, under the names of a model with the adapter."""
    file = Path(folder) / ADAPTER_WEIGHTS
    with reading(f"{folder}: its adapter cannot be read, copy it again"):
        if file.is_file():
            saved = load_file(file)
        else:
            file = Path(folder) / _OLD_WEIGHTS
            saved = load_pickled(file, "cpu")
    headers = {
        name: WeightHeader(file, tuple(weight.shape), format_of(weight.dtype))
        for name, weight in saved.items()
    }
    require_floating_point(folder, headers)
    return {_loaded_name(key.removeprefix(_PREFIX)): weight for key, weight in saved.items()}


def saved_name(parameter: str) -> str:
    """The name in the file of a parameter of the adapter, or of another weight: inverse of
    loading."""
    plain = parameter.replace(f".{ADAPTER}.weight", ".weight").replace(
        f"{_MAGNITUDE}.weight", _MAGNITUDE
    )
    return _PREFIX + plain


def _loaded_name(saved: str) -> str:
    if saved.endswith(_MAGNITUDE):
        return f"{saved}.{ADAPTER}.weight"
    return re.sub(r"\.(lora_(?:A|B))\.weight$", rf".\1.{ADAPTER}.weight", saved)
