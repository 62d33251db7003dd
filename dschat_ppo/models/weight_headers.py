"""The files of weights of a folder: what they hold, read without their numbers."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError

import torch
from safetensors import safe_open

from dschat_ppo.errors import UserError, reading

# Formats of weights, and their names in safetensors. All others are refused.
FORMATS = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
}


def weight_files(folder: str) -> list[Path]:
    """The safetensors files of a model folder, or else its `pytorch_model*.bin` files."""
    root = Path(folder)
    return sorted(root.glob("*.safetensors")) or sorted(root.glob("pytorch_model*.bin"))


@dataclass(frozen=True)
class WeightHeader:
    """What a checkpoint says about a weight, besides its numbers."""

    file: Path
    shape: tuple[int, ...]
    number_format: str  # in the terms of safetensors, such as BF16, or else of torch


def checkpoint_headers(folder: str) -> dict[str, WeightHeader]:
    """The weights in a checkpoint by their names, without reading their numbers."""
    headers: dict[str, WeightHeader] = {}
    for file in weight_files(folder):
        with reading(f"{file}: cannot be read, copy the model again"):
            if file.suffix == ".bin":
                for name, weight in load_pickled(file, "meta", mmap=True).items():
                    headers[name] = WeightHeader(file, tuple(weight.shape), format_of(weight.dtype))
            else:
                with safe_open(file, framework="pt") as weights:
                    for name in list(weights.keys()):
                        entry = weights.get_slice(name)
                        headers[name] = WeightHeader(
                            file, tuple(entry.get_shape()), entry.get_dtype()
                        )
    return headers


def checkpoint_shapes(folder: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the weights in a checkpoint, without reading the weights."""
    return {name: header.shape for name, header in checkpoint_headers(folder).items()}


def checkpoint_dtype(folder: str) -> torch.dtype | None:
    """The number format of the largest weight in a checkpoint, if it is one in which a run can
    compute; else, and without weights, None."""
    headers = checkpoint_headers(folder).values()
    if not headers:
        return None
    largest = max(headers, key=lambda header: math.prod(header.shape))
    usable = (torch.float32, torch.float16, torch.bfloat16)
    return next((dtype for dtype in usable if FORMATS[dtype] == largest.number_format), None)


def format_of(dtype: torch.dtype) -> str:
    """The name of a dtype in a `WeightHeader`."""
    return FORMATS.get(dtype, str(dtype).removeprefix("torch."))


def require_floating_point(
    folder: str, headers: Mapping[str, WeightHeader], integer_buffers: Collection[str] = ()
) -> None:
    """Refuse weights in a format whose numbers are no weights by themselves: integers and 8-bit
    floats need the scales of a quantisation, and a cast would train without them.

    Buffers that count or mask are integers by right: those of files of 2019 to 2023
    (`is_old_buffer`), and `integer_buffers`, the names of the model's own.
    """
    buffer_names = tuple(integer_buffers)
    for name, header in headers.items():
        is_buffer = is_old_buffer(name, header.shape) or name.endswith(buffer_names)
        if header.number_format not in FORMATS.values() and not is_buffer:
            raise UserError(
                f"{folder}: {name} in {header.file.name} holds numbers of the format"
                f" {header.number_format}, which cannot be trained as they are: the model is"
                " quantised, or was saved wrongly; get it with weights in BF16, F16 or F32 (for"
                " QLoRA, --load_in_4bit quantises those)"
            )


def load_pickled(file: Path, device: str, mmap: bool = False) -> dict[str, torch.Tensor]:
    """The tensors of a `.bin` file, by torch's reader that runs no code."""
    try:
        loaded = torch.load(file, map_location=device, weights_only=True, mmap=mmap)
    except UnpicklingError as problem:
        called = re.search(r"(?:GLOBAL|class) ([\w.]+)", str(problem))
        fault = "holds more than weights, or is damaged"
        if called:
            fault = f"holds more than weights (it calls {called[1]})"
        raise UserError(
            f"{file}: {fault}, so it is not loaded; get the model as model.safetensors, or, only if"
            ' you trust its author, convert it, which runs its code: python -c "import torch,'
            f" safetensors.torch as s; s.save_file(torch.load('{file}', weights_only=False),"
            " 'model.safetensors')\""
        ) from problem
    if not isinstance(loaded, dict) or not all(
        isinstance(weight, torch.Tensor) for weight in loaded.values()
    ):
        raise UserError(f"{file}: must hold tensors by name; save the model's state_dict()")
    return loaded


def is_old_buffer(name: str, shape: Sequence[int]) -> bool:
    """Whether an unexpected entry is a buffer that files of 2019 to 2023 store and today's models
    compute. The name and the shape identify it; a weight with such a name has another shape.

    - `attn.bias`, `attn.attention.bias`, `attention.bias`, `causal_mask`: the causal mask, (1, 1,
      n, n)
    - `masked_bias`: the value of masked scores, one number
    - `rotary_emb.inv_freq`: frequencies of the rotary positions, one dimension
    """
    dimensions = len(shape)
    if re.search(r"(^|\.)(attn|attention)\.(bias|causal_mask)$", name):
        return dimensions == 4 and shape[0] == shape[1] == 1 and shape[2] == shape[3]
    if re.search(r"(^|\.)(attn|attention)\.masked_bias$", name):
        return dimensions == 0
    return re.search(r"(^|\.)rotary_emb\.inv_freq$", name) is not None and dimensions == 1
