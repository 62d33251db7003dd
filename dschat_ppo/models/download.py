"""Download a model from the hub: its settings, its tokenizer and its weights, in one format."""

from __future__ import annotations

import fnmatch
from contextlib import suppress
from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

from dschat_ppo.errors import UserError, in_one_line, reading
from dschat_ppo.models.model_files import wants_settings_only

ANSWER_SECONDS = 5.0  # how long the hub may take
SETTINGS = ("*.json", "*.jinja", "*.model", "*.txt")
TEMPLATES = "additional_chat_templates/*.jinja"  # besides the default one, such as `tool_use`
# In order of preference. Repositories hold weights twice: as safetensors and pickled, or in the layout of their authors
# (`consolidated.safetensors`, `original/`).
WEIGHTS = (
    ("model.safetensors", "model-*.safetensors", "model.safetensors-*"),
    ("adapter_model.safetensors",),
    ("pytorch_model.bin", "pytorch_model-*.bin"),
    ("adapter_model.bin",),
    ("*.safetensors",),
)


def wanted_files(files: list[str], weights: bool = True) -> list[str]:
    """A repository's files that a model needs: top-level settings, chat templates, and weights of one format.

    Without `weights`, only those of an adapter, which are small and say what it adds.
    """
    top = [name for name in files if "/" not in name]
    settings = [name for name in top if any(fnmatch.fnmatch(name, pattern) for pattern in SETTINGS)]
    settings += fnmatch.filter(files, TEMPLATES)
    for patterns in WEIGHTS if weights or "adapter_config.json" in top else ():
        found = [name for name in top if any(fnmatch.fnmatch(name, pattern) for pattern in patterns)]
        if found:
            return settings + found
    return settings


def download(name: str, revision: str | None = None) -> str:
    """The local folder of the model or adapter `name`, downloaded from the hub, or as an earlier download left it.

    With `settings_only`, the weights of a model are not downloaded, but those of an adapter are. Raises
    `FileNotFoundError` if the hub cannot be reached and there is no earlier download, else almost any exception.
    """
    try:
        with reading("no answer"):  # the errors of its HTTP library are not part of its interface
            found = huggingface_hub.HfApi().model_info(name, revision=revision, timeout=ANSWER_SECONDS)
    except UserError as problem:
        if isinstance(problem.__cause__, (HfHubHTTPError, ValueError)):  # the hub answered, or the name is malformed
            raise problem.__cause__ from None
        return _earlier_download(name, revision, problem)
    files = [entry.rfilename for entry in found.siblings or []]
    wanted = wanted_files(files, weights=not wants_settings_only())
    return str(huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=wanted))


def _earlier_download(name: str, revision: str | None, problem: UserError) -> str:
    """The folder of an earlier download, which holds the weights of one format only, or with `settings_only` none."""
    for patterns in (*WEIGHTS, ("config.json",)) if wants_settings_only() else WEIGHTS:
        with suppress(LocalEntryNotFoundError):  # not downloaded, or a file of this format is missing
            folder = huggingface_hub.snapshot_download(
                name, revision=revision, local_files_only=True, allow_patterns=[*SETTINGS, *patterns]
            )
            if any(next(Path(folder).glob(pattern), None) for pattern in patterns):
                return str(folder)
    reason = in_one_line(problem.__cause__ or problem)
    raise FileNotFoundError(f"it was not downloaded before, and the hub cannot be reached ({reason})") from None
