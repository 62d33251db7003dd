"""Whether this is the run that saved a checkpoint, and from which checkpoint a run resumes.

The identity of a run is its flags, its derived batch sizes, and fingerprints of the data, models
and files it reads. A run resumes only from a checkpoint of the same identity, except for
differences that do not change what it computes.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow
import pyarrow.compute
from datasets import Dataset

from dschat_ppo.checkpoint.store import CheckpointFolder, Manifest, damage
from dschat_ppo.common import dist
from dschat_ppo.common.atomic_files import checksum
from dschat_ppo.common.heartbeat import heartbeat
from dschat_ppo.common.logging import logger
from dschat_ppo.config.feature_flags import feature_notes
from dschat_ppo.config.run_flags import AUTO, NEVER, WITHOUT_EFFECT, SafetyFlags
from dschat_ppo.config.step_config import StepConfig, defaults_of, flatten
from dschat_ppo.data.lazy_rows import LazyRows, TrainingRows
from dschat_ppo.errors import UserError
from dschat_ppo.models.model_folders import CONFIG_FILES
from dschat_ppo.monitor.writers import is_finished

# Flags that may change when a run resumes. A flag that is not here matters: a new flag stops a
# resumed run until its author adds it.
HARMLESS = frozenset(
    {
        # where and when something is written, and how long something may take
        "output_dir",
        "overwrite_output_dir",
        "local_rank",
        "config",
        "dry_run",
        "dry_run_ranks",
        "measure",
        "save_steps",
        "save_minutes",
        "save_total_limit",
        "keep_final_checkpoint",
        "save_best",
        "resume",
        "resume_force",
        "save_hf_steps",
        "save_dtype",
        "metric_for_best",
        "collective_timeout",
        "on_nonfinite",
        "max_nonfinite_skips",
        "report_to",
        "tracker",
        "run_name",
        "project",
        "enable_tensorboard",
        "tensorboard_path",
        "print_answers",
        "print_answers_interval",
        "sample_interval",
        "validate_only",
        "logging_steps",
        "verbose",
        "metrics",
        "profile",
        "data_output_path",
        "preprocessing_num_workers",
        "reward_workers",
        "reward_timeout",
        "allow_weak_sandbox",
        "remote_reward_timeout",
        "stop_on_health",
        "health",
        # how the work is laid out on the machine: the result is the same up to rounding
        # (`--per_device_eval_batch_size` also decides where an evaluation bounded by `--eval_iters`
        # ends, but no training)
        "zero_stage",
        "actor_zero_stage",
        "critic_zero_stage",
        "offload",
        "offload_reference_model",
        "offload_reward_model",
        "offload_optimizer",
        "zero_hpz_partition_size",
        "gradient_checkpointing",
        "actor_gradient_checkpointing",
        "critic_gradient_checkpointing",
        "micro_batch_tokens",
        "per_device_eval_batch_size",
        "eval_batch_size",
        "rollout_rows",
        "rollout_engine",
        "unpin_actor_parameters",
        "deterministic",
        "offload_activations",
        "attn_implementation",
        # a model that needs it is refused without it; for others it has no effect
        "resize_vocabulary",
        *WITHOUT_EFFECT,
        *chain.from_iterable(notes.harmless for notes in feature_notes()),
    }
)

# Flag -> derived batch size of which it is a factor. While that is the same, the flag may change:
# with twice the ranks, half the rows on each give the same step.
PRODUCTS = {
    "per_device_train_batch_size": "rows_per_update",
    "per_device_training_batch_size": "rows_per_update",
    "gradient_accumulation_steps": "rows_per_update",
    "per_device_generation_batch_size": "rows_per_step",
    "generation_batches": "rows_per_step",
}
DERIVED = frozenset({*PRODUCTS.values(), "ranks"})  # settings of an identity that are no flags

# How long a run is. With rates that do not depend on it, the steps so far are those of the longer
# run.
LENGTH = frozenset({"num_train_epochs", "max_steps", "enable_test_mode", "test_stop_step"})
_CONSTANT = ("constant", "constant_with_warmup")
# When a run ends early, which changes no step before.
EARLY_END = frozenset({"early_stop_patience", "early_stop_min_delta"})

MOST_LINES, MOST_CHARACTERS = 12, 100  # of a diff: changes, and characters of a value
# before the flag that names a model or a file, in the names of fingerprints
CONTENTS = "contents of "
_ABSENT = object()

EVAL_ROWS = "evaluation rows (SHA-256)"
MANY_ROWS, DIGEST = 50_000, "digest"
_SHORT = 16  # hex digits, enough to detect an accidental change
SAMPLES, SAMPLE_BYTES = 64, 2**16  # read of each large file of weights
_WEIGHTS = ("*.safetensors", "*.bin")
_READ_WHOLE = (
    *CONFIG_FILES,
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "vocab*",
    "merges.txt",
    "*.model",
    "*.jinja",
)


@dataclass(frozen=True)
class RunIdentity:
    """What a run computes. `config`: flags, `input_fingerprints`, and the derived batch sizes
    `rows_per_update` (rows of an optimizer step over all ranks), in step 3 `rows_per_step` (prompts
    of a PPO step over all ranks) and, where it affects more than rounding, `ranks`. `data`: the
    fingerprint of the training rows. `defaults`: of the flags."""

    kind: Literal["sft", "reward", "ppo"]
    config: dict[str, Any]
    data: str
    defaults: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RunInputs:
    """What a run reads. The keys and flags name an input in a diff; None: the run has no such
    input. `rows`: name -> further token rows. `models` and `files`: (flag, local folder or path) of
    each."""

    train: TrainingRows
    rows: dict[str, Dataset | None] = field(default_factory=dict)
    models: Sequence[tuple[str, str | None]] = ()
    files: Sequence[tuple[str, str | None]] = ()


def identify_run(config: StepConfig, inputs: RunInputs, derived: Mapping[str, int]) -> RunIdentity:
    """The identity of a run. `derived`: derived batch sizes, see `PRODUCTS`. Only rank 0 reads the
    inputs: other ranks have no fingerprints."""
    settings = flatten(config) | dict(derived)
    defaults = defaults_of(type(config))
    if not dist.is_main():
        return RunIdentity(config.kind, settings, "", defaults)
    settings |= input_fingerprints(inputs)
    return RunIdentity(config.kind, settings, rows_fingerprint(inputs.train), defaults)


def input_fingerprints(inputs: RunInputs) -> dict[str, str]:
    """Name -> first hex digits of the SHA-256 of each input, except the training rows. Evaluation
    rows are included although no step trains on them: they decide which model is the best."""
    digests = {}
    for name, rows in inputs.rows.items():
        if rows is not None:
            digests[name] = rows_fingerprint(rows)
    for flag, folder in inputs.models:
        if folder is not None:
            digests[CONTENTS + flag] = model_fingerprint(folder)
    for flag, path in inputs.files:
        if path is not None:
            digests[CONTENTS + flag] = checksum(Path(path))
    return {name: digest[:_SHORT] for name, digest in digests.items()}


def is_fingerprinted_model(config: Mapping[str, Any], flag: str, folder: str) -> bool:
    """Whether `folder` holds the model that `flag` named in a saved run; True if the run recorded
    no fingerprint."""
    saved = config.get(CONTENTS + flag)
    return saved is None or saved == model_fingerprint(folder)[:_SHORT]


def rows_fingerprint(rows: TrainingRows) -> str:
    """SHA-256 of the content of all rows in order, as 64 hex digits, independent of how they are
    stored. From `MANY_ROWS` on it covers the column `digest`, if there is one, in which
    `data.prepare` stores a hash of each row: reading a million shuffled rows takes minutes."""
    if isinstance(rows, LazyRows):
        return rows.fingerprint
    digest = hashlib.sha256()
    if len(rows) >= MANY_ROWS and DIGEST in rows.column_names:
        digests = np.concatenate([chunk.to_numpy() for chunk in rows.data.column(DIGEST).chunks])
        if rows._indices is not None:
            digests = digests[rows._indices.column(0).to_numpy()]
        digest.update(digests.astype("<i8").tobytes())
        heartbeat()
        return digest.hexdigest()
    left_out = (DIGEST, "source", "prompt_spans", "untrained_spans")
    columns = [name for name in rows.column_names if name not in left_out]
    for table in rows.select_columns(columns).with_format("arrow").iter(batch_size=4096):
        if "row" in columns:  # its second line holds what is not a column of the data row
            texts = pyarrow.compute.replace_substring_regex(table.column("row"), r",?\n.*", "}")
            table = table.set_column(columns.index("row"), table.schema.field("row"), texts)
        table = table.replace_schema_metadata(None).combine_chunks()
        sink = pyarrow.BufferOutputStream()
        with pyarrow.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        digest.update(sink.getvalue())
        heartbeat()  # only rank 0 does this, for any number of rows
    return digest.hexdigest()


def model_fingerprint(folder: str | Path) -> str:
    """SHA-256 of a model folder, as 64 hex digits: of its configuration and tokenizer, and of each
    file of weights the name, the size and `SAMPLES` blocks of `SAMPLE_BYTES`, spread evenly from
    the first byte to the last. Training changes nearly every weight, so any block detects another
    model."""
    digest = hashlib.sha256()
    for patterns in (_READ_WHOLE, _WEIGHTS):
        paths = set[Path]()
        for pattern in patterns:
            paths.update(path for path in Path(folder).glob(pattern) if path.is_file())
        for path in sorted(paths):
            size = path.stat().st_size
            digest.update(f"{path.name}\0{size}\0".encode())
            if patterns is _READ_WHOLE or size <= SAMPLES * SAMPLE_BYTES:
                digest.update(path.read_bytes())
                heartbeat()
                continue
            with path.open("rb", buffering=0) as file:
                for sample in range(SAMPLES):
                    file.seek(sample * (size - SAMPLE_BYTES) // (SAMPLES - 1))
                    digest.update(file.read(SAMPLE_BYTES))
                    heartbeat()
    return digest.hexdigest()


def differences(
    saved: dict[str, Any], now: dict[str, Any], defaults: Mapping[str, Any]
) -> dict[str, str]:
    """The settings by which this run would compute something else than the run that saved, or in
    another order; each with its values, "before -> after". `saved`, `now`: each a
    `RunIdentity.config`; `defaults`: those of the flags."""
    now = json.loads(json.dumps(now))  # tuples become lists, as they did in the manifest
    now = {_with_absolute_path(name): value for name, value in now.items()}
    saved = {_with_absolute_path(name): value for name, value in saved.items()}
    changes = {}
    for name in {**now, **saved}:
        before = saved.get(name, _ABSENT)
        after = now.get(name, _ABSENT)
        if before == after or name in HARMLESS or _resolved(before) == _resolved(after):
            continue
        product = PRODUCTS.get(name)
        if product in saved and saved[product] == now.get(product):
            continue
        # the checkpoint is older than the flag
        if before is _ABSENT and after == defaults.get(name, _ABSENT):
            continue
        changes[name] = f"{_as_text(before)} -> {_as_text(after)}"
    return changes


def _with_absolute_path(name: str) -> str:
    """The name of a setting; a file after the flag, as in `contents of --reward_function FILE`, as
    an absolute path."""
    flag, _, path = name.removeprefix(CONTENTS).partition(" ")
    if name.startswith(CONTENTS) and path:
        return f"{CONTENTS}{flag} {_resolved(path)}"
    return name


def _resolved(value: Any) -> Any:
    """The value of a flag, with its files and folders that exist as absolute paths. What follows a
    path stays, as `:column` or `@revision` does."""
    if isinstance(value, list):
        return [_resolved(item) for item in value]
    if not isinstance(value, str):
        return value
    text = os.path.expanduser(value)
    for end in range(len(text), 0, -1):  # the longest beginning of the text that is a path
        if end < len(text) and text[end] not in ":@[?":
            continue
        if os.path.lexists(text[:end]):
            return os.path.realpath(text[:end]) + text[end:]
    return value


def format_diff(changes: Mapping[str, str]) -> str:
    """The differences, one per line: `  --flag: before -> after`; of many the first
    `MOST_LINES`."""
    lines = []
    for name, text in changes.items():
        is_flag = " " not in name and name not in DERIVED
        if is_flag:
            lines.append(f"  --{name}: {text}")
        else:
            lines.append(f"  {name}: {text}")
    if len(lines) > MOST_LINES:
        lines = [*lines[:MOST_LINES], f"  and {len(lines) - MOST_LINES} more"]
    return "\n".join(lines)


def _as_text(value: Any) -> str:
    """A value as one would type it; a list in JSON, so that its items are separated."""
    if value is _ABSENT:
        return "(absent)"
    if isinstance(value, list) or value == "":
        text = json.dumps(value, ensure_ascii=False)
    else:
        text = str(value)
    if len(text) <= MOST_CHARACTERS:
        return text
    return f"{text[:MOST_CHARACTERS]}..."


def find_checkpoint(
    output: Path, flags: SafetyFlags, identity: RunIdentity, overwrite: bool = False
) -> Path | None:
    """The checkpoint folder from which the run resumes; None: it starts from scratch. On rank 0.

    Damaged checkpoints are reported. Checkpoints in `output` that are later than the one found
    (damaged, or not the one named by `--resume`) are set aside: renamed, so that no later run
    resumes from them. With `overwrite`, `--resume auto` resumes only from an interrupted run of the
    same identity, so that the same command resumes after a crash and starts from scratch otherwise.
    """
    may_start_from_scratch = overwrite and flags.resume == AUTO
    if flags.resume == NEVER or (may_start_from_scratch and is_finished(output)):
        return None
    try:
        if flags.resume == AUTO:
            newest = _newest_checkpoint(output)
            if newest is None:
                return None
            checkpoint = newest
        else:
            checkpoint = _checkpoint_by_name(flags.resume)
        _require_same_run(checkpoint, flags, identity)
    except UserError as problem:
        if not may_start_from_scratch:
            raise
        logger().warning(f"starting from scratch, because of --overwrite_output_dir: {problem}")
        return None
    if lies_in_output(checkpoint, output):  # if it is elsewhere, those in `output` are removed
        CheckpointFolder(output).set_aside_after(checkpoint)
    return checkpoint


def _newest_checkpoint(output: Path) -> Path | None:
    """The newest intact checkpoint in an output folder, with a warning for each damaged one after
    it; None: none was ever saved there. `UserError`: all are damaged."""
    folder = CheckpointFolder(output)
    name, complaints = folder.newest_intact()
    if name is None and complaints:
        raise UserError(
            f"--output_dir {output} has no intact checkpoint to resume from:"
            f" {'; '.join(complaints)}. Repair one, or start from scratch with"
            " --overwrite_output_dir or another --output_dir"
        )
    for complaint in complaints:
        logger().warning(complaint)
    if name is None:
        return None
    return folder.root / name


def _checkpoint_by_name(resume: str) -> Path:
    """The checkpoint folder that `--resume` names. `UserError`: it is missing or damaged."""
    checkpoint = Path(resume)
    fault: str | None = "there is no such folder"
    if checkpoint.is_dir():
        fault = damage(checkpoint)
    if fault is not None:
        raise UserError(
            f"--resume {checkpoint}: {fault}; name a folder such as OUTPUT/checkpoints/step_000012"
        )
    return checkpoint


def lies_in_output(checkpoint: Path, output: Path) -> bool:
    """Whether a checkpoint lies in this output folder, so that the other outputs there belong to
    the same run."""
    return checkpoint.resolve().is_relative_to(output.resolve())


def _rates_depend_on_length(config: Mapping[str, Any]) -> bool:
    """Whether the learning rates of a run with these settings depend on how long it is."""
    return config.get("lr_scheduler_type") not in _CONSTANT or bool(config.get("warmup_ratio"))


def _require_same_run(checkpoint: Path, flags: SafetyFlags, identity: RunIdentity) -> None:
    """Refuse a checkpoint of another run; with `--resume_force` only one whose state this run
    cannot use."""
    manifest = Manifest.read(checkpoint)
    if manifest.kind != identity.kind:
        raise UserError(
            f"{checkpoint} is a checkpoint of the step '{manifest.kind}', not of '{identity.kind}'"
        )
    changes = differences(manifest.config, identity.config, identity.defaults)
    changes = {name: text for name, text in changes.items() if name not in EARLY_END}
    if not any(map(_rates_depend_on_length, (manifest.config, identity.config))):
        changes = {name: text for name, text in changes.items() if name not in LENGTH}
    if manifest.data != identity.data:
        changed_rows = f"{manifest.data[:12]} -> {identity.data[:12]}"
        changes = {"training rows (SHA-256)": changed_rows, **changes}
    if changes and not flags.resume_force:
        raise UserError(
            f"{checkpoint} was saved under settings that compute something else; use the saved"
            " settings to resume, or --resume_force to resume under the new ones, or start from"
            " scratch with --overwrite_output_dir or another --output_dir. What"
            f" changed:\n{format_diff(changes)}"
        )
    saved_rows = manifest.config.get("rows_per_update")
    rows = identity.config.get("rows_per_update")
    if manifest.update and saved_rows != rows:
        raise UserError(
            f"{checkpoint} was saved inside a PPO step, whose updates have {saved_rows} rows each,"
            f" not {rows}: keep them, or name an earlier checkpoint by --resume"
        )
    if changes:
        logger().info(
            f"settings that changed since {checkpoint.name} was saved:\n{format_diff(changes)}"
        )
