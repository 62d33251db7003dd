"""What a saved language model takes over from its checkpoint without training it: the
configuration and the weights of a vision tower, or of layers that predict further tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from dschat_ppo.models.weight_headers import weight_files

# of a language model with parts that do not train: a vision tower, layers that predict further
# tokens
NOT_TEXT = re.compile(r"(^|\.)(mtp|visual|vision)|^model\.layers\.\d+\.")
TRAINED = "model-trained.safetensors"
UNTRAINED = "model-untrained.safetensors"


def config_around(model: PreTrainedModel, source: Path) -> Any:
    """The configuration in `source` of a model of images and text whose text model is `model`; None
    if `model` is the whole one."""
    if not (source / "config.json").is_file():
        return None
    config = AutoConfig.from_pretrained(source, trust_remote_code=False)
    if hasattr(config, "text_config") and config.model_type != model.config.model_type:
        return config
    return None


def add_untrained(model: PreTrainedModel, source: Path, folder: Path) -> None:
    """Add to a saved language model the weights of its checkpoint that transformers leaves out when
    it loads the text model, unchanged: a vision tower, or layers that predict further tokens. The
    folder then loads wherever the checkpoint does."""
    patterns = model._keys_to_ignore_on_load_unexpected
    if not patterns or not source.is_dir():
        return

    def is_left_out(name: str) -> bool:
        is_ignored = any(re.search(pattern, name) for pattern in patterns)
        return is_ignored and NOT_TEXT.search(name) is not None

    file_of_weight: dict[str, str] = {}  # name of a weight -> name of its file in the folder
    for file in weight_files(str(folder)):
        file_of_weight |= dict.fromkeys(_names_in(file), file.name)
    added_weights: dict[str, Tensor] = {}
    for file in weight_files(str(source)):
        if file.suffix == ".safetensors":
            names = [name for name in _names_in(file) if name not in file_of_weight]
            added_weights |= _read_weights(file, filter(is_left_out, names))
    if not added_weights:
        return
    save_file(added_weights, folder / UNTRAINED, metadata={"format": "pt"})
    single_file = folder / SAFE_WEIGHTS_NAME
    if single_file.exists():  # transformers would read this file alone
        single_file.rename(folder / TRAINED)
        file_of_weight = dict.fromkeys(file_of_weight, TRAINED)
    file_of_weight |= dict.fromkeys(added_weights, UNTRAINED)
    total_size = sum(file.stat().st_size for file in weight_files(str(folder)))
    index = {"metadata": {"total_size": total_size}, "weight_map": file_of_weight}
    (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2))


def _read_weights(file: Path, names: Iterable[str]) -> dict[str, Tensor]:
    """The weights of these names in a safetensors file."""
    with safe_open(file, "pt") as tensors:
        return {name: tensors.get_tensor(name) for name in names}


def _names_in(file: Path) -> list[str]:
    """The names of the weights in a safetensors file."""
    with safe_open(file, "pt") as tensors:
        return list(tensors.keys())
