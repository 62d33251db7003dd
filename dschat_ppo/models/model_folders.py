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
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from transformers import PretrainedConfig

from dschat_ppo.common.dist import main_rank_of_node_first
from dschat_ppo.common.logging import log_once
from dschat_ppo.errors import UserError, in_one_line, nearest_path, reading
from dschat_ppo.models.adapters.folders import ADAPTER_CONFIG, read_adapter_config

CONFIG_FILES = ("config.json", ADAPTER_CONFIG)  # of which a folder of a model has one
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
MOST_LAYERS_OR_LABELS = 10_000


def check_settings(folder: str, refused: str) -> None:
    """Refuse what this project cannot read in a folder's `config.json`, and note what it
    ignores."""
    with reading(refused):
        settings = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    if not isinstance(settings, dict):
        raise UserError(f"{refused}: it is not a JSON object")
    all_settings = list(_all_settings(settings))
    for name, value in all_settings:  # before transformers builds so many layers
        is_count = name.endswith(("layer", "layers", "labels")) and isinstance(value, (int, float))
        if is_count and value > MOST_LAYERS_OR_LABELS:
            raise UserError(
                f"{refused}: '{name}' is above {MOST_LAYERS_OR_LABELS}, which no model has"
            )
    code_names = set()
    run_names = set()
    for name, value in all_settings:
        if name == "quantization_config" and value:
            method = value
            if isinstance(value, dict):
                method = value.get("quant_method", "unnamed")
            raise UserError(
                f"{refused}: its weights are quantised ('quantization_config', method {method});"
                " use the model with unquantised weights, and --load_in_4bit for QLoRA"
            )
        if name.strip("_") in IGNORED and value:
            code_names.add(name)
        if name in OF_A_RUN and value != OF_A_RUN[name]:
            run_names.add(name)
    for names, reason in (
        (code_names, "a model folder does not choose code"),
        (run_names, "this run sets it"),
    ):
        if names:
            log_once(
                f"{folder}: {', '.join(sorted(names))} in config.json is ignored; {reason}",
                logging.WARNING,
            )


def _all_settings(settings: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The name and value of each setting, those of nested objects too."""
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
    for each_config in (config, *nested):
        for name in IGNORED:
            if name in vars(each_config):
                delattr(each_config, name)
        for name, value in OF_A_RUN.items():
            if getattr(each_config, name, value) != value:
                setattr(each_config, name, value)
    return config


_SETTINGS_ONLY = [False]  # whether a block of `settings_only` is open


@contextmanager
def settings_only() -> Iterator[None]:
    """In the block, models without their weights are judged by their settings (`--dry_run`).
    `download` fetches settings and tokenizers, and the weights of a folder without any are not
    compared with its `config.json`."""
    before = _SETTINGS_ONLY[0]
    _SETTINGS_ONLY[0] = True
    try:
        yield
    finally:
        _SETTINGS_ONLY[0] = before


def wants_settings_only() -> bool:
    """Whether a block of `settings_only` is open."""
    return _SETTINGS_ONLY[0]


def files_key(folder: str) -> tuple[Any, ...]:
    """A dictionary key that changes with the folder's files: its path, and the name, size and time
    of each file."""
    entries = []
    for path in sorted(Path(folder).iterdir()):
        if path.is_file():
            stat = path.stat()
            entries.append((path.name, stat.st_size, stat.st_mtime_ns))
    return folder, *entries


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
        if not is_model_folder(name):
            # as in the output of step 3
            inner = sorted(str(path.parent) for path in Path(name).glob("*/config.json"))
            hint = ""
            if inner:
                hint = f"; did you mean {' or '.join(inner)}?"
            raise UserError(
                f"{flag} {name}: the folder has no config.json, so it is not a Hugging Face"
                f" model{hint}"
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
    in_hub_cache = re.search(r"models--([^/]+)/snapshots/([0-9a-f]+)/?$", folder)
    if in_hub_cache is None:
        return str(Path(folder).resolve()), None
    repository, revision = in_hub_cache.groups()
    return repository.replace("--", "/"), revision


def is_adapter_folder(folder: str) -> bool:
    """Whether a local folder holds an adapter; transformers decides by the same file."""
    return (Path(folder) / ADAPTER_CONFIG).is_file()


def is_model_folder(folder: str | Path) -> bool:
    """Whether a local folder holds a model or an adapter."""
    return any((Path(folder) / name).is_file() for name in CONFIG_FILES)


def named_base(folder: str, flag: str) -> str | None:
    """Folder or hub name of the model that an adapter folder was trained on; None if the folder
    holds no adapter, or does not name it."""
    if not is_adapter_folder(folder):
        return None
    named = read_adapter_config(folder, flag).get("base_model_name_or_path")
    if isinstance(named, str) and named:
        return named
    return None


def base_folder(folder: str, flag: str) -> str:
    """The folder of the model, no adapter, that an adapter folder was trained on; `folder` itself
    if it is none."""
    if not is_adapter_folder(folder):
        return folder
    named = named_base(folder, flag)
    way_out = f"correct base_model_name_or_path in {Path(folder) / ADAPTER_CONFIG}"
    if named is None:
        raise UserError(f"{flag} {folder}: the adapter does not name its base model; {way_out}")
    try:
        revision = read_adapter_config(folder, flag).get("revision")
        base = model_folder(named, flag, revision)
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
    folders = {folder for _, folder in models}
    bases = []
    for flag, folder in models:
        if folder is not None:
            base = base_folder(folder, flag)
            if base not in folders:
                bases.append((f"the base of {flag}", base))
    return [*models, *bases]


def files_to_download(files: list[str], weights: bool = True) -> list[str]:
    """A repository's files that a model needs: top-level settings, chat templates, and weights of
    one format. Without `weights`, only those of an adapter, which are small and say what it
    adds."""
    top_level = [name for name in files if "/" not in name]
    needed = _matching(top_level, SETTINGS) + fnmatch.filter(files, TEMPLATES)
    if weights or ADAPTER_CONFIG in top_level:
        for patterns in WEIGHTS:
            weight_names = _matching(top_level, patterns)
            if weight_names:
                return needed + weight_names
    return needed


def _matching(names: list[str], patterns: Sequence[str]) -> list[str]:
    """The names that match one of the patterns, in their order."""

    def matches(name: str) -> bool:
        return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)

    return [name for name in names if matches(name)]


def download(name: str, revision: str | None = None) -> str:
    """The local folder of the model or adapter `name`, downloaded from the hub, or as an earlier
    download left it. With `settings_only`, the weights of a model are not downloaded, but those of
    an adapter are. Raises `FileNotFoundError` if the hub cannot be reached and there is no earlier
    download, else almost any exception."""
    try:
        with reading("no answer"):  # the errors of its HTTP library are not part of its interface
            repository = huggingface_hub.HfApi().model_info(
                name, revision=revision, timeout=ANSWER_SECONDS
            )
    except UserError as problem:
        # the hub answered, or the name is malformed
        if isinstance(problem.__cause__, (HfHubHTTPError, ValueError)):
            raise problem.__cause__ from None
        return _earlier_download(name, revision, problem)
    files = [entry.rfilename for entry in repository.siblings or []]
    needed = files_to_download(files, weights=not wants_settings_only())
    return str(huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=needed))


def _earlier_download(name: str, revision: str | None, problem: UserError) -> str:
    """The folder of an earlier download, which holds the weights of one format only, or with
    `settings_only` none."""
    choices = list(WEIGHTS)
    if wants_settings_only():
        choices.append(("config.json",))
    for patterns in choices:
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
