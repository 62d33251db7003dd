"""The files of a model folder, read without building the model: `config.json` and shapes of weights.

Settings of a folder that name code or other files, or belong to a run, are not its to choose. transformers lets
`config.json` name an attention or experts kernel, which it fetches from the hub and runs where the package `kernels` is
installed; Python files (`auto_map`); another file of weights; and a quantisation, whose back ends fetch kernels too.
Flags of this project choose the attention, and all models are loaded unquantised.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import safe_open
from transformers import PretrainedConfig

from dschat_ppo.common.logging import logger
from dschat_ppo.errors import UserError, reading

KERNELS = ("attn_implementation", "experts_implementation")
# Left out, with a note. transformers reads some of them with an underscore too. A fusion replaces modules of the whole
# process; a model with a `distributed_config` that is not an object of transformers cannot be saved.
IGNORED = (
    *KERNELS, "auto_map", "custom_generate", "custom_pipelines", "distributed_config", "fusion_config", "kernel_config",
    "use_kernels",
)  # fmt: skip
# Settings of a run that some folders keep from the run that wrote them; flags and forward passes of this one set them.
# (RWKV divides its weights in place for `rescale_every` when it begins to evaluate.)
OF_A_RUN = {
    "gradient_checkpointing": False, "output_attentions": False, "output_hidden_states": False,
    "output_router_logits": False, "return_dict": True, "torchscript": False, "use_cache": True,
    "chunk_size_feed_forward": 0, "rescale_every": 0,
}  # fmt: skip


# Ends of the names of settings -> their largest values.
LARGEST = {
    ("layer", "layers", "label", "labels"): 10_000,
    ("size", "dim", "heads", "embd", "d_model", "positions", "embeddings"): 50_000_000,
}


def check_settings(folder: str, refused: str) -> None:
    """Refuse settings of a folder's `config.json` whose weights this project cannot read, and note those that it
    ignores. `refused` begins the error message."""
    with reading(refused):
        settings = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    if not isinstance(settings, dict):
        raise UserError(f"{refused}: it is not a JSON object")
    found = list(_all_settings(settings))
    for name, value in found:  # before transformers builds so many parts, or tensors of such sizes
        most = next((most for ends, most in LARGEST.items() if name.endswith(ends)), None)
        if most is not None and isinstance(value, (int, float)) and value > most:
            raise UserError(f"{refused}: '{name}' is above {most}, which no model has")
    for value in (value for name, value in found if name == "quantization_config" and value):
        method = value.get("quant_method", "unnamed") if isinstance(value, dict) else value
        raise UserError(
            f"{refused}: its weights are quantised ('quantization_config', method {method}); use the model with "
            "unquantised weights, and --load_in_4bit for QLoRA"
        )
    names = sorted({name for name, value in found if name.strip("_") in IGNORED and value})
    if names:
        _note(folder, ", ".join(names), "a model folder does not choose code")
    names = sorted({name for name, value in found if name in OF_A_RUN and value != OF_A_RUN[name]})
    if names:
        _note(folder, ", ".join(names), "this run sets it")


@cache
def _note(folder: str, names: str, reason: str) -> None:
    """Once for a folder, which is read several times."""
    logger().warning(f"{folder}: {names} in config.json is ignored; {reason}")


def _all_settings(settings: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Names and values, those of nested configurations such as `text_config` too."""
    for name, value in settings.items():
        yield name, value
        if isinstance(value, dict):
            yield from _all_settings(value)


def without_code(config: PretrainedConfig) -> PretrainedConfig:
    """`config`, changed in place: transformers chooses its kernels, and no setting names code or belongs to a run. The
    model is saved with this configuration, so the names do not reach later users of the saved folder either."""
    config._attn_implementation = None  # those of nested configurations too
    config._experts_implementation = None
    nested = [value for value in vars(config).values() if isinstance(value, PretrainedConfig)]
    for part in (config, *nested):
        for name in IGNORED:
            if name in vars(part):
                delattr(part, name)
        for name, value in OF_A_RUN.items():
            if getattr(part, name, value) != value:
                setattr(part, name, value)
    return config


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


def weight_files(folder: str) -> list[Path]:
    """The safetensors files of a model folder, or else its `pytorch_model*.bin` files."""
    root = Path(folder)
    return sorted(root.glob("*.safetensors")) or sorted(root.glob("pytorch_model*.bin"))


def files_of(folder: str) -> tuple[Any, ...]:
    """A key for what is kept of a folder while its files stay as they are."""
    found = [(path.name, path.stat()) for path in sorted(Path(folder).iterdir()) if path.is_file()]
    return folder, *((name, stat.st_size, stat.st_mtime_ns) for name, stat in found)


def checkpoint_shapes(folder: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the weights in a checkpoint, without reading the weights."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in weight_files(folder):
        with reading(f"{file}: cannot be read, copy the model again"):
            if file.suffix == ".bin":
                shapes |= {name: tuple(x.shape) for name, x in load_pickled(file, "meta", mmap=True).items()}
            else:
                with safe_open(file, framework="pt") as weights:
                    shapes |= {name: tuple(weights.get_slice(name).get_shape()) for name in list(weights.keys())}
    return shapes


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
