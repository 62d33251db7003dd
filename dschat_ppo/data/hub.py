"""Data sets of the Hugging Face hub: from the network, or from the cache of an earlier download."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import datasets
import huggingface_hub
from datasets.naming import camelcase_to_snakecase
from huggingface_hub import constants

from dschat_ppo.common.atomic_files import sync_folder
from dschat_ppo.common.logging import logger
from dschat_ppo.errors import UserError, in_one_line, nearest_path, reading

ANSWER_SECONDS = 5.0  # for the hub to answer before it counts as unreachable


def hub_dataset(
    spec: str, config_name: str | None, root: str | None, flag: str = "--data_path"
) -> datasets.DatasetDict | Path:
    """The splits of a hub data set, through the cache of `datasets`; or, if the hub cannot be reached, the folder with
    its files that `hf download` has made.

    Without network, and with `HF_HUB_OFFLINE`, only the cache is used. If the cached files cannot be read, or hold
    fewer rows than the data set declares, they are made again from the downloaded files. `root` is the folder of the
    cache; None for that of `datasets`. Data sets that are scripts are refused.
    """
    unreachable = _why_unreachable(spec)
    cached = _cached_configs(spec, root)
    if unreachable and config_name is None and len(cached) > 1:  # `datasets` would take the latest one
        raise UserError(
            f"{flag} {spec}: the configurations {', '.join(cached)} were downloaded, and the hub cannot be reached "
            f"({unreachable}); name one, as in {spec}:{cached[0]}"
        )
    load = partial(datasets.load_dataset, spec, config_name, cache_dir=root)
    with _offline(unreachable != ""):
        try:
            with reading(f"{flag} {spec}"):
                splits = _load_intact(load)
        except UserError as problem:
            if unreachable and not cached and (folder := _downloaded_folder(spec)) is not None:
                logger().info(f"data: {spec}: the hub cannot be reached; an earlier download is used: {folder}")
                return folder
            cause = problem.__cause__ or problem
            explained = _explain(cause, spec, config_name, unreachable)
            raise UserError(f"{flag} {spec}: {explained}{nearest_path(spec)}") from cause
    if unreachable:
        names = ", ".join(sorted({str(rows.info.config_name) for rows in splits.values()}))
        logger().info(f"data: {spec}: the hub cannot be reached; an earlier download is used (configuration {names})")
    for rows in splits.values():
        for file in rows.cache_files:
            sync_folder(Path(file["filename"]).parent)
    return splits


def hub_stream(
    spec: str, config_name: str | None, flag: str = "--data_path"
) -> tuple[str, dict[str, datasets.IterableDataset]]:
    """(what identifies the revision of a hub data set, its splits, to be read from the hub row by row)."""
    unreachable = _why_unreachable(spec)
    if unreachable:
        raise UserError(
            f"{flag} {spec}: is no local file or folder, and the hub, from which --streaming would read it, cannot be "
            f"reached ({unreachable}); give a local folder, or if it was downloaded before, omit --streaming"
        )
    try:
        with reading(f"{flag} {spec}"):
            builder = datasets.load_dataset_builder(spec, config_name)
            splits = builder.as_streaming_dataset()
    except UserError as problem:
        cause = problem.__cause__ or problem
        raise UserError(f"{flag} {spec}: {_explain(cause, spec, config_name, unreachable)}") from cause
    return str(builder.hash), {str(name): rows for name, rows in splits.items()}


def _load_intact(load: partial[datasets.DatasetDict]) -> datasets.DatasetDict:
    try:
        splits = load()
        is_intact = all(
            len(rows) == rows.info.splits[name].num_examples for name, rows in splits.items() if rows.info.splits
        )
    except ValueError:  # pyarrow and JSON errors; any other cause is raised again by the second attempt
        is_intact = False
    return splits if is_intact else load(download_mode=datasets.DownloadMode.REUSE_CACHE_IF_EXISTS)


def _why_unreachable(spec: str) -> str:
    """Why the hub does not answer, or "". `datasets` alone would try for half a minute to find out."""
    if datasets.config.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    try:
        with reading("no answer"):  # the errors of its HTTP library are not part of its interface
            huggingface_hub.HfApi().dataset_info(spec, timeout=ANSWER_SECONDS)
    except UserError as problem:
        answers = (huggingface_hub.errors.HfHubHTTPError, ValueError)  # what is wrong with the name, `datasets` says
        return "" if isinstance(problem.__cause__, answers) else in_one_line(problem)
    return ""


def _cached_configs(spec: str, root: str | None) -> list[str]:
    """Configurations of a data set in the cache of `datasets`."""
    *owner, name = spec.split("/")
    place = Path(root or datasets.config.HF_DATASETS_CACHE) / "___".join([*owner, camelcase_to_snakecase(name)])
    return sorted({path.parent.parent.name for path in place.glob("*/*/*") if path.is_dir()})


def _downloaded_folder(spec: str) -> Path | None:
    """The files of a data set in the cache of the hub, as `hf download` leaves them; None if they are not there."""
    try:
        return Path(huggingface_hub.snapshot_download(spec, repo_type="dataset", local_files_only=True))
    except (huggingface_hub.errors.LocalEntryNotFoundError, huggingface_hub.errors.HFValidationError):
        return None


@contextmanager
def _offline(wanted: bool) -> Iterator[None]:
    """Let `datasets` use its cache alone. It offers this only as a setting of the process."""
    before = datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE
    if wanted:
        datasets.config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE = before


def _explain(problem: BaseException, spec: str, config_name: str | None, unreachable: str) -> str:
    """What is wrong and what to do, in one line."""
    if isinstance(problem, datasets.exceptions.DatasetGenerationError):  # its own text names no cause
        problem = problem.__cause__ or problem
    text = in_one_line(problem)
    if "scripts are no longer supported" in text or "trust_remote_code" in text:
        return (
            "is a loading script, which would run code of others; download the files of its revision "
            "refs/convert/parquet and give the local folder"
        )
    if "Available configs in the cache" in text and unreachable:
        return f"its configuration '{config_name}' was not downloaded, and the hub cannot be reached ({text})"
    if "onfig name is missing" in text or "BuilderConfig" in text:
        chosen = f"has no configuration '{config_name}'" if config_name else "has several configurations"
        return f"{chosen}; name one, as in {spec}:NAME ({text})"
    if unreachable:
        return (
            f"is no local file or folder, was not downloaded before, and the hub cannot be reached ({unreachable}); "
            "download it on a machine with network and give the local folder"
        )
    return f"neither a local file or folder nor a readable hub data set: {text}"
