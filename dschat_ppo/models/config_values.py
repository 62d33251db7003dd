"""What `config.json` may say: a look at it before transformers builds by it, which may take the machine's memory."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from dschat_ppo.errors import UserError, reading

# Names of settings, and the largest value: parts that are built one by one, and sizes of what is built on the CPU.
_LARGEST = {
    re.compile(r"(layers?|labels)$"): 10_000,  # `num_hidden_layers`, `n_layer`, `num_labels`, ...
    re.compile(r"(size|dim|heads|embd|d_model|positions|position_embeddings)$"): 50_000_000,
}


def check_settings(folder: str, refused: str) -> None:
    """Look at `config.json` of a model folder without transformers.

    Args:
        folder: of the model.
        refused: the beginning of what is said if the file cannot be used.

    Raises:
        UserError: it is no JSON object, or a number in it is beyond any model's.
    """
    with reading(refused):
        settings = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    if not isinstance(settings, dict):
        raise UserError(f"{refused}: it is not a JSON object")
    _check_sizes(settings, refused)
    architectures = settings.get("architectures") or []
    if not isinstance(architectures, list) or not all(isinstance(name, str) for name in architectures):
        raise UserError(f"{refused}: 'architectures' must be a list of names")


def _check_sizes(settings: dict[str, Any], refused: str) -> None:
    """Here and in nested settings, such as `text_config`."""
    for name, value in settings.items():
        if isinstance(value, dict):
            _check_sizes(value, refused)
        for pattern, most in _LARGEST.items():
            if pattern.search(name) and isinstance(value, (int, float)) and value > most:
                raise UserError(f"{refused}: '{name}' is above {most}, which no model has")
