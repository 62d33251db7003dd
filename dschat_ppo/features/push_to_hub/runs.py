"""The repository before a run, and the upload after it."""

from __future__ import annotations

import shlex
from pathlib import Path

from huggingface_hub import HfApi

from dschat_ppo.common import dist
from dschat_ppo.common.heartbeat import watchdog_paused
from dschat_ppo.common.logging import logger
from dschat_ppo.common.paths import CONFIG, MODELS, REPORT, RESULT, shown_path
from dschat_ppo.common.phases import announce
from dschat_ppo.config.step_config import StepConfig
from dschat_ppo.errors import StorageError, attempt, in_one_line, reading
from dschat_ppo.features.push_to_hub.flags import HubFlags
from dschat_ppo.monitor.trackers import RUN_IDS

# In the folder of steps 1 and 2, what is not of the model. The tokenizer may have
# `additional_chat_templates/`.
_NOT_OF_THE_MODEL = (
    "[!a]*/*",
    "a[!d]*/*",
    "*.jsonl",
    CONFIG,
    RESULT,
    MODELS,
    REPORT,
    RUN_IDS,
    ".lock",
)


def begin_training(config: StepConfig) -> None:
    """Check that the run can upload its model, and make the repository if it does not exist.
    Collective."""
    name = config.of(HubFlags).push_to_hub
    if name is not None:
        dist.on_main(lambda: make_repository(name))


def end_training(config: StepConfig) -> None:
    """Upload the model. Collective."""
    name = config.of(HubFlags).push_to_hub
    if name is not None:
        push_to_hub(config, name)


def advice_when_done(config: StepConfig) -> str:
    """How to upload the model of a run that is done, at the end of a sentence."""
    name = config.of(HubFlags).push_to_hub
    if name is None:
        return ""
    return f"; to upload its model: {upload_command(config, name)}"


def make_repository(name: str) -> None:
    """Check that `--push_to_hub` can upload to `name`, and make it if it does not exist. On rank
    0."""
    hub = HfApi(token=True)  # else a missing token would be an answer of the server about passwords
    with reading(
        f"--push_to_hub {name}: no upload to {hub.endpoint} is possible; correct this, or omit the"
        " flag"
    ):
        hub.create_repo(name, private=True, exist_ok=True)
        # to make one that exists, a token that may only read is enough
        hub.auth_check(name, write=True)


def push_to_hub(config: StepConfig, name: str) -> None:
    """Upload the trained model, after everything else is written. Collective: rank 0 uploads, and
    all raise the `StorageError`."""
    folder, ignored = _folder_to_upload(config)

    def upload() -> None:
        logger().info(f"--push_to_hub: uploading {shown_path(folder)}")
        with attempt() as tried:  # huggingface_hub, its HTTP library or hf_xet
            address = HfApi(token=True).upload_folder(
                repo_id=name, folder_path=folder, ignore_patterns=list(ignored)
            )
        if tried.problem is not None:
            raise StorageError(
                f"--push_to_hub {name}: the upload failed ({in_one_line(tried.problem)}). The run"
                f" is done and its model saved; to upload it: {upload_command(config, name)}"
            ) from tried.problem
        logger().info(f"--push_to_hub: uploaded to {address}")

    announce("upload")
    with watchdog_paused():  # on the ranks that wait too
        dist.on_main(upload)


def upload_command(config: StepConfig, name: str) -> str:
    """What uploads the trained model again, for a shell."""
    folder, ignored = _folder_to_upload(config)
    words = ["hf", "upload", "--private", name, shown_path(folder)]
    for pattern in ignored:
        words += ["--exclude", pattern]
    return shlex.join(words)


def _folder_to_upload(config: StepConfig) -> tuple[Path, tuple[str, ...]]:
    """The folder in which the run saves its model, and patterns of the files there that are not the
    model's."""
    folder = Path(config.run.folder)
    if config.kind == "ppo":
        return (folder / "actor", ())
    return (folder, _NOT_OF_THE_MODEL)
