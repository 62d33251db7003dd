"""The files of a model folder, read without building the model: `config.json` and shapes of weights."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import safe_open

from dschat_ppo.errors import UserError, reading
from dschat_ppo.models.folder_settings import check_folder_settings

# Names of settings, and their largest values: parts that are built one by one, and sizes of tensors built on the CPU.
_LARGEST = {
    re.compile(r"(layers?|labels)$"): 10_000,  # `num_hidden_layers`, `n_layer`, `num_labels`, ...
    re.compile(r"(size|dim|heads|embd|d_model|positions|position_embeddings)$"): 50_000_000,
}


# As torch and safetensors name them: of weights, and of buffers such as positions. Numbers of 8 bits need scales, which
# nothing here applies.
_PLAIN = {"F64", "F32", "F16", "BF16", "I64", "BOOL"} | {
    f"torch.{name}" for name in ("float64", "float32", "float16", "bfloat16", "int64", "bool")
}

_SETTINGS_ONLY = [False]


@contextmanager
def settings_only() -> Iterator[None]:
    """In the block, models without their weights are judged by their settings (`--dry_run`). `download` fetches
    settings and tokenizers, and the weights of a folder without any are not compared with its `config.json`."""
    _SETTINGS_ONLY[0] = True
    try:
        yield
    finally:
        _SETTINGS_ONLY[0] = False


def wants_settings_only() -> bool:
    """Whether a block of `settings_only` is open."""
    return _SETTINGS_ONLY[0]


def check_settings(folder: str, refused: str) -> None:
    """Check `config.json` of a model folder before transformers builds a model from it, which may exhaust memory.
    `refused` begins the error message."""
    with reading(refused):
        settings = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    if not isinstance(settings, dict):
        raise UserError(f"{refused}: it is not a JSON object")
    _check_sizes(settings, refused)
    check_folder_settings(settings, folder, refused)
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
    """Names and shapes of the weights in a checkpoint, without reading the weights. An index may name no file outside
    the folder. A weight that is no floating-point number is refused: its quantisation is not known."""
    for file in sorted(Path(folder).glob("*.index.json")):
        _check_index(file)
    shapes: dict[str, tuple[int, ...]] = {}
    for file in weight_files(folder):
        with reading(f"{file}: cannot be read, copy the model again"):
            if file.suffix == ".bin":
                loaded = load_pickled(file, "meta", mmap=True)
                found = {name: (tuple(weight.shape), str(weight.dtype)) for name, weight in loaded.items()}
            else:
                with safe_open(file, framework="pt") as weights:
                    parts = {name: weights.get_slice(name) for name in list(weights.keys())}
                    found = {name: (tuple(part.get_shape()), part.get_dtype()) for name, part in parts.items()}
        for name, (shape, dtype) in found.items():
            if len(shape) > 1 and dtype not in _PLAIN and not is_old_buffer(name, shape):
                raise UserError(
                    f"{file}: {name} holds {dtype.removeprefix('torch.')} and no floating-point numbers: a quantised "
                    "checkpoint without its quantisation; use the model with unquantised weights"
                )
            shapes[name] = shape
    return shapes


def _check_index(file: Path) -> None:
    """Refuse an index of weights that names other places than its own folder: transformers would read them."""
    with reading(f"{file}: cannot be read, copy the model again"):
        index = json.loads(file.read_text(encoding="utf-8"))
    weights = index.get("weight_map") if isinstance(index, dict) else None
    for name in set(map(str, weights.values())) if isinstance(weights, dict) else ():
        if Path(name).name != name:
            raise UserError(f"{file}: names a file of weights outside the folder ({name[:80]!r}); get the model again")


def load_pickled(file: Path, device: str, mmap: bool = False) -> dict[str, torch.Tensor]:
    """The tensors of a `.bin` file, by torch's reader that runs no code."""
    try:
        loaded = torch.load(file, map_location=device, weights_only=True, mmap=mmap)
    except UnpicklingError as problem:
        named = re.search(r"(?:GLOBAL|class) ([\w.]+)", str(problem))
        what = f"holds more than weights (it calls {named[1]})" if named else "holds more than weights, or is damaged"
        raise UserError(
            f"{file}: {what}, so it is not loaded; get the model as model.safetensors, or, only if you trust its "
            'author, convert it, which runs its code: python -c "import torch, safetensors.torch as s; '
            f"s.save_file(torch.load('{file}', weights_only=False), 'model.safetensors')\""
        ) from problem
    if not isinstance(loaded, dict) or not all(isinstance(weight, torch.Tensor) for weight in loaded.values()):
        raise UserError(f"{file}: must hold tensors by name; save the model's state_dict()")
    return loaded


def odd_expert(shapes: Mapping[str, tuple[int, ...]]) -> str | None:
    """The first weight of a mixture of experts whose shape is not that of most of its layer, with both shapes, or None.
    transformers joins these weights to one tensor, and fails without a name."""
    layers: dict[str, list[str]] = {}
    for name in sorted(shapes):
        layers.setdefault(re.sub(r"\.experts\.\d+\.", ".experts.*.", name), []).append(name)
    for names in layers.values():
        usual = Counter(shapes[name] for name in names).most_common(1)[0][0]
        for name in names:
            if shapes[name] != usual:
                return f"{name} {list(shapes[name])}, other experts {list(usual)}"
    return None


def is_old_buffer(name: str, shape: Sequence[int]) -> bool:
    """Whether an unexpected entry is a buffer that files of 2019 to 2023 store and today's models compute. The name and
    the shape identify it; a weight with such a name has another shape.

    - `attn.bias`, `attn.attention.bias`, `attention.bias`, `causal_mask`: the causal mask, (1, 1, n, n)
    - `masked_bias`: the value of masked scores, one number
    - `rotary_emb.inv_freq`: frequencies of the rotary positions, one dimension
    """
    *ones, rows, columns = shape if len(shape) == 4 else (0, 0, 0)
    if re.search(r"(^|\.)(attn|attention)\.(bias|causal_mask)$", name):
        return ones == [1, 1] and rows == columns
    if re.search(r"(^|\.)(attn|attention)\.masked_bias$", name):
        return len(shape) == 0
    return re.search(r"(^|\.)rotary_emb\.inv_freq$", name) is not None and len(shape) == 1
