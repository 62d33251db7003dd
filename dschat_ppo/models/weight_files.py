"""What the files of a checkpoint hold, read without the weights themselves."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import safe_open

from dschat_ppo.errors import reading


def weight_files(folder: str) -> list[Path]:
    root = Path(folder)
    return sorted(root.glob("*.safetensors")) or sorted(root.glob("pytorch_model*.bin"))


def checkpoint_shapes(folder: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the weights in a checkpoint, read without the weights themselves."""
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
    """Whether an entry that the model does not know is one of the buffers that files of 2019 to 2023 hold beside the
    weights, and that today's models compute. Its name and its shape say so:

    - `attn.bias`, `attn.attention.bias`, `attention.bias`, `causal_mask`: the causal mask, (1, 1, n, n)
    - `masked_bias`: what masked scores were set to, one number
    - `rotary_emb.inv_freq`: frequencies of the rotary positions, one dimension

    A weight of such a name has another shape and is none of them.
    """
    *ones, rows, columns = shape if len(shape) == 4 else (0, 0, 0)
    if re.search(r"(^|\.)(attn|attention)\.(bias|causal_mask)$", name):
        return ones == [1, 1] and rows == columns
    if re.search(r"(^|\.)(attn|attention)\.masked_bias$", name):
        return len(shape) == 0
    return re.search(r"(^|\.)rotary_emb\.inv_freq$", name) is not None and len(shape) == 1
