"""Local folders of models and of adapters, which hold LoRA matrices and the name of their base
model; their files, read without building the model: `config.json` and shapes of weights.

Settings of a folder that name code or other files, or belong to a run, are not its to choose.
transformers lets `config.json` name an attention or experts kernel, which it fetches from the hub
and runs where the package `kernels` is installed; Python files (`auto_map`); another file of
weights; and a quantisation, whose back ends fetch kernels too. Flags of this project choose the
attention, and all models are loaded unquantised.
"""

from __future__ import annotations

import fnmatch
import json
import logging
import math
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from safetensors.torch import load_file
from torch import Tensor
from transformers import PretrainedConfig

from dschat_ppo.common.dist import main_rank_of_node_first
from dschat_ppo.common.logging import log_once
from dschat_ppo.errors import UserError, in_one_line, nearest_path, reading
from dschat_ppo.models.weight_headers import (
    WeightHeader,
    format_of,
    load_pickled,
    require_floating_point,
)

SCORE = "score"  # name of the scalar head in the classifiers of decoders
KERNELS = ("attn_implementation", "experts_implementation")
# Left out, with a note. transformers reads some of them with an underscore too. A fusion replaces
# modules of the whole process; a model with a `distributed_config` that is not an object of
# transformers cannot be saved.
IGNORED = (
    *KERNELS,
    "auto_map",
    "custom_generate",
    "custom_pipelines",
    "distributed_config",
    "fusion_config",
    "kernel_config",
    "use_kernels",
)
# Settings of a run that some folders keep from the run that wrote them; flags and forward passes of
# this one set them. (RWKV divides its weights in place for `rescale_every` when it begins to
# evaluate.)
OF_A_RUN = {
    "gradient_checkpointing": False,
    "output_attentions": False,
    "output_hidden_states": False,
    "output_router_logits": False,
    "return_dict": True,
    "torchscript": False,
    "use_cache": True,
    "chunk_size_feed_forward": 0,
    "rescale_every": 0,
}
MOST_PARTS = 10_000  # layers or labels


def check_settings(folder: str, refused: str) -> None:
    """Refuse what this project cannot read in a folder's `config.json`, and note what it
    ignores."""
    with reading(refused):
        settings = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    if not isinstance(settings, dict):
        raise UserError(f"{refused}: it is not a JSON object")
    found = list(_all_settings(settings))
    for name, value in found:  # before transformers builds so many parts
        if (
            name.endswith(("layer", "layers", "labels"))
            and isinstance(value, (int, float))
            and value > MOST_PARTS
        ):
            raise UserError(f"{refused}: '{name}' is above {MOST_PARTS}, which no model has")
    for value in (value for name, value in found if name == "quantization_config" and value):
        if isinstance(value, dict):
            method = value.get("quant_method", "unnamed")
        else:
            method = value
        raise UserError(
            f"{refused}: its weights are quantised ('quantization_config', method {method}); use"
            " the model with unquantised weights, and --load_in_4bit for QLoRA"
        )
    ignored = {
        "a model folder does not choose code": {
            n for n, value in found if n.strip("_") in IGNORED and value
        },
        "this run sets it": {n for n, value in found if n in OF_A_RUN and value != OF_A_RUN[n]},
    }
    for reason, names in ignored.items():
        if names:
            log_once(
                f"{folder}: {', '.join(sorted(names))} in config.json is ignored; {reason}",
                logging.WARNING,
            )


def _all_settings(settings: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        yield name, value
        if isinstance(value, dict):
            yield from _all_settings(value)


def without_code(config: PretrainedConfig) -> PretrainedConfig:
    """`config`, changed in place: transformers chooses its kernels, and no setting names code or
    belongs to a run. The model is saved with this configuration, so the names do not reach later
    users of the saved folder either."""
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
    """In the block, models without their weights are judged by their settings (`--dry_run`).
    `download` fetches settings and tokenizers, and the weights of a folder without any are not
    compared with its `config.json`."""
    before, _SETTINGS_ONLY[0] = _SETTINGS_ONLY[0], True
    try:
        yield
    finally:
        _SETTINGS_ONLY[0] = before


def wants_settings_only() -> bool:
    """Whether a block of `settings_only` is open."""
    return _SETTINGS_ONLY[0]


def files_of(folder: str) -> tuple[Any, ...]:
    """A key for what is kept of a folder while its files stay as they are."""
    found = [(path.name, path.stat()) for path in sorted(Path(folder).iterdir()) if path.is_file()]
    return folder, *((name, stat.st_size, stat.st_mtime_ns) for name, stat in found)


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
ANSWER_SECONDS = 5.0  # how long the hub may take
# Files of a repository on the hub:
SETTINGS = ("*.json", "*.jinja", "*.model", "*.txt")
TEMPLATES = "additional_chat_templates/*.jinja"  # besides the default one, such as `tool_use`
# In order of preference. Repositories hold weights twice: as safetensors and pickled, or in the
# layout of their authors (`consolidated.safetensors`, `original/`).
WEIGHTS = (
    ("model.safetensors", "model-*.safetensors", "model.safetensors-*"),
    ("adapter_model.safetensors",),
    ("pytorch_model.bin", "pytorch_model-*.bin"),
    ("adapter_model.bin",),
    ("*.safetensors",),
)


def model_folder(name: str, flag: str, revision: str | None = None) -> str:
    """The local folder of the model or adapter that `flag` names: itself, or that revision's files
    from the hub."""
    name = os.path.expanduser(name)  # a shell does not expand the `~` of `--flag=~/model`
    if Path(name).is_file():
        raise UserError(
            f"{flag} {name}: is a file; name the folder of a model, or a model on the hub"
        )
    if Path(name).is_dir():
        if not (Path(name) / "config.json").exists() and not is_adapter_folder(name):
            # as in the output of step 3
            inner = sorted(str(path.parent) for path in Path(name).glob("*/config.json"))
            meant = f"; did you mean {' or '.join(inner)}?" if inner else ""
            raise UserError(
                f"{flag} {name}: the folder has no config.json, so it is not a Hugging Face"
                f" model{meant}"
            )
        return name
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise UserError(f"{flag} {name}: no such folder{nearest_path(name)}")
    refused = (
        f"{flag} {name}: neither a local folder nor a model that can be downloaded from the hub"
    )
    try:
        with main_rank_of_node_first(), reading(refused):
            return download(name, revision)
    except UserError as problem:
        raise UserError(f"{problem}{nearest_path(name)}") from problem.__cause__


def base_name(folder: str) -> tuple[str, str | None]:
    """The name under which other programs find the model of a local folder, and its revision on the
    hub. `models--org--name/snapshots/revision`, in the hub's cache, is `org/name`; other folders
    are absolute paths."""
    found = re.search(r"models--([^/]+)/snapshots/([0-9a-f]+)/?$", folder)
    if found is not None:
        return found[1].replace("--", "/"), found[2]
    return str(Path(folder).resolve()), None


def is_adapter_folder(folder: str) -> bool:
    """Whether a local folder holds an adapter; transformers decides by the same file."""
    return (Path(folder) / ADAPTER_CONFIG).is_file()


def base_folder(folder: str, flag: str) -> str:
    """The folder of the model, no adapter, that an adapter folder was trained on; `folder` itself
    if it is none."""
    if not is_adapter_folder(folder):
        return folder
    config = read_adapter_config(folder, flag)
    named = config.get("base_model_name_or_path")
    way_out = f"correct base_model_name_or_path in {Path(folder) / ADAPTER_CONFIG}"
    if not isinstance(named, str) or not named:
        raise UserError(f"{flag} {folder}: the adapter does not name its base model; {way_out}")
    try:
        base = model_folder(named, flag, config.get("revision"))
    except UserError as problem:
        reason = str(problem).removeprefix(f"{flag} {named}: ")
        raise UserError(
            f"{flag} {folder}: base model of the adapter, {named}: {reason}; {way_out}"
        ) from None
    if is_adapter_folder(base):
        raise UserError(
            f"{flag} {folder}: its base model {named} is an adapter too; merge that one first;"
            f" {way_out}"
        )
    return base


def with_bases(models: Sequence[tuple[str, str | None]]) -> list[tuple[str, str | None]]:
    """(flag, local folder) of models, and of bases of adapter folders. Collective: one may have to
    be downloaded."""
    bases = [
        (f"the base of {flag}", base_folder(folder, flag))
        for flag, folder in models
        if folder is not None
    ]
    own = {folder for _, folder in models}
    return [*models, *((flag, base) for flag, base in bases if base not in own)]


def read_adapter_config(folder: str, flag: str) -> dict[str, Any]:
    """The settings in `adapter_config.json`, which must describe LoRA matrices of linear layers,
    that peft gets: a closed list, so that a folder names no code."""
    file = Path(folder) / ADAPTER_CONFIG
    with reading(f"{flag} {file}: cannot be used"):
        config = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(config, dict):
        raise UserError(f"{flag} {file}: must be a JSON object")
    kind = config.get("peft_type")
    start = config.get("init_lora_weights", True)
    others = sorted(
        name for name, value in config.items() if value and name not in _USED | _NO_EFFECT
    )
    unusable = {
        f"an adapter of type {kind}": kind != "LORA",
        "LoRA with trained biases": config.get("bias", "none") != "none",
        f"LoRA that changed the weights of its base (init_lora_weights {start})": (
            isinstance(start, str) and start not in ("gaussian", "eva", "orthogonal")
        ),
        f"LoRA with {', '.join(others)}": bool(others),
    }
    for what, holds in unusable.items():
        if holds:
            raise UserError(
                f"{flag} {folder}: holds {what}; merge it into its base with peft"
                " (merge_and_unload) and save that"
            )
    scales = {"lora_alpha": config.get("lora_alpha", 1)}
    if isinstance(config.get("alpha_pattern"), dict):
        scales |= config["alpha_pattern"]
    for name, scale in scales.items():
        if not isinstance(scale, (int, float)) or not math.isfinite(scale):
            raise UserError(
                f"{flag} {file}: the scale {name} must be a finite number and is {scale!r}; copy"
                " the file again, or write the lora_alpha that the adapter was trained with"
            )
    return {name: value for name, value in config.items() if name in _USED}


def saves_head(folder: str) -> bool:
    """Whether an adapter folder holds the score head of a reward model or critic."""
    return f"{SCORE}.weight" in adapter_weights(folder)


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


def wanted_files(files: list[str], weights: bool = True) -> list[str]:
    """A repository's files that a model needs: top-level settings, chat templates, and weights of
    one format. Without `weights`, only those of an adapter, which are small and say what it
    adds."""
    top = [name for name in files if "/" not in name]
    settings = [name for name in top if any(fnmatch.fnmatch(name, pattern) for pattern in SETTINGS)]
    settings += fnmatch.filter(files, TEMPLATES)
    for patterns in WEIGHTS if weights or "adapter_config.json" in top else ():
        found = [
            name for name in top if any(fnmatch.fnmatch(name, pattern) for pattern in patterns)
        ]
        if found:
            return settings + found
    return settings


def download(name: str, revision: str | None = None) -> str:
    """The local folder of the model or adapter `name`, downloaded from the hub, or as an earlier
    download left it. With `settings_only`, the weights of a model are not downloaded, but those of
    an adapter are. Raises `FileNotFoundError` if the hub cannot be reached and there is no earlier
    download, else almost any exception."""
    try:
        with reading("no answer"):  # the errors of its HTTP library are not part of its interface
            found = huggingface_hub.HfApi().model_info(
                name, revision=revision, timeout=ANSWER_SECONDS
            )
    except UserError as problem:
        # the hub answered, or the name is malformed
        if isinstance(problem.__cause__, (HfHubHTTPError, ValueError)):
            raise problem.__cause__ from None
        return _earlier_download(name, revision, problem)
    files = [entry.rfilename for entry in found.siblings or []]
    wanted = wanted_files(files, weights=not wants_settings_only())
    return str(huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=wanted))


def _earlier_download(name: str, revision: str | None, problem: UserError) -> str:
    """The folder of an earlier download, which holds the weights of one format only, or with
    `settings_only` none."""
    for patterns in (*WEIGHTS, ("config.json",)) if wants_settings_only() else WEIGHTS:
        # not downloaded, or a file of this format is missing
        with suppress(LocalEntryNotFoundError):
            folder = huggingface_hub.snapshot_download(
                name,
                revision=revision,
                local_files_only=True,
                allow_patterns=[*SETTINGS, *patterns],
            )
            if any(next(Path(folder).glob(pattern), None) for pattern in patterns):
                return str(folder)
    reason = in_one_line(problem.__cause__ or problem)
    raise FileNotFoundError(
        f"it was not downloaded before, and the hub cannot be reached ({reason})"
    ) from None
