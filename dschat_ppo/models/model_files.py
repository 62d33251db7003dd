"""The files of a model folder, read without building the model: `config.json`, shapes of weights, a fingerprint."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from dschat_ppo.common.heartbeat import heartbeat
from dschat_ppo.errors import UserError, reading

BLOCKS, BLOCK_BYTES = 64, 2**16

# Names of settings, and their largest values: parts that are built one by one, and sizes of tensors built on the CPU.
_LARGEST = {
    re.compile(r"(layers?|labels)$"): 10_000,  # `num_hidden_layers`, `n_layer`, `num_labels`, ...
    re.compile(r"(size|dim|heads|embd|d_model|positions|position_embeddings)$"): 50_000_000,
}
_WEIGHTS = ("*.safetensors", "*.bin")
_READ_WHOLE = (
    "config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json", "vocab*", "merges.txt", "*.model",
    "*.jinja",
)  # fmt: skip


def check_settings(folder: str, refused: str) -> None:
    """Check `config.json` of a model folder before transformers builds a model from it, which may exhaust memory.

    Args:
        folder: of the model.
        refused: beginning of the error message.

    Raises:
        UserError: it is not a JSON object, or a number in it is too large for any model.
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
    """Check these settings and nested ones, such as `text_config`."""
    for name, value in settings.items():
        if isinstance(value, dict):
            _check_sizes(value, refused)
        for pattern, most in _LARGEST.items():
            if pattern.search(name) and isinstance(value, (int, float)) and value > most:
                raise UserError(f"{refused}: '{name}' is above {most}, which no model has")


def weight_files(folder: str) -> list[Path]:
    """The safetensors files of a model folder, or else its `pytorch_model*.bin` files."""
    root = Path(folder)
    return sorted(root.glob("*.safetensors")) or sorted(root.glob("pytorch_model*.bin"))


def checkpoint_shapes(folder: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the weights in a checkpoint, without reading the weights."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in weight_files(folder):
        with reading(f"{file}: cannot be read, copy the model again"):
            if file.suffix == ".bin":
                loaded = torch.load(file, map_location="meta", weights_only=True, mmap=True)
                shapes |= {name: tuple(weight.shape) for name, weight in loaded.items()}
                continue
            with safe_open(file, framework="pt") as weights:
                shapes |= {name: tuple(weights.get_slice(name).get_shape()) for name in list(weights.keys())}
    return shapes


def is_old_buffer(name: str, shape: Sequence[int]) -> bool:
    """Whether an unexpected entry is a buffer that files of 2019 to 2023 store and today's models compute.

    The name and the shape identify them:

    - `attn.bias`, `attn.attention.bias`, `attention.bias`, `causal_mask`: the causal mask, (1, 1, n, n)
    - `masked_bias`: the value of masked scores, one number
    - `rotary_emb.inv_freq`: frequencies of the rotary positions, one dimension

    A weight with such a name has another shape.
    """
    *ones, rows, columns = shape if len(shape) == 4 else (0, 0, 0)
    if re.search(r"(^|\.)(attn|attention)\.(bias|causal_mask)$", name):
        return ones == [1, 1] and rows == columns
    if re.search(r"(^|\.)(attn|attention)\.masked_bias$", name):
        return len(shape) == 0
    return re.search(r"(^|\.)rotary_emb\.inv_freq$", name) is not None and len(shape) == 1


def model_fingerprint(folder: str | Path) -> str:
    """SHA-256 of a model folder, 64 hex digits: its settings, its tokenizer and a sample of its weights.

    The sample of a weight file is its name, its size and `BLOCKS` blocks of `BLOCK_BYTES`, spread evenly from the first
    byte to the last; smaller files are read whole. Training changes nearly every weight, so another model differs in
    any block. A change of a few weights in a large file may lie between two blocks.

    Raises:
        OSError: a file cannot be read.
    """
    digest = hashlib.sha256()
    for patterns, sampled in ((_READ_WHOLE, False), (_WEIGHTS, True)):
        for path in sorted({path for pattern in patterns for path in Path(folder).glob(pattern) if path.is_file()}):
            size = path.stat().st_size
            digest.update(f"{path.name}\0{size}\0".encode())
            with path.open("rb", buffering=0) as file:
                if not sampled or size <= BLOCKS * BLOCK_BYTES:
                    digest.update(file.read())
                    heartbeat()
                    continue
                for number in range(BLOCKS):
                    file.seek(number * (size - BLOCK_BYTES) // (BLOCKS - 1))
                    digest.update(file.read(BLOCK_BYTES))
                    heartbeat()
    return digest.hexdigest()
