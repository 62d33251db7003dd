"""Find the checkpoint from which a run resumes."""

from __future__ import annotations

from pathlib import Path

from dschat_ppo.checkpoint.config_diff import WHERE_AND_WHEN, ConfigChange, compare_configs, format_diff, refuse_changes
from dschat_ppo.checkpoint.folder import CheckpointFolder
from dschat_ppo.checkpoint.manifest import Manifest, damage
from dschat_ppo.checkpoint.run_identity import RunIdentity
from dschat_ppo.common import dist
from dschat_ppo.common.logging import logger
from dschat_ppo.config.retired_flags import note_on_retired
from dschat_ppo.config.run_flags import AUTO, NEVER, SafetyFlags
from dschat_ppo.errors import UserError
from dschat_ppo.monitor.writers import is_finished

UPDATE_ROWS = "rows_per_update"


def find_checkpoint(output: Path, flags: SafetyFlags, identity: RunIdentity, overwrite: bool = False) -> Path | None:
    """The checkpoint folder from which the run resumes; None: it starts from scratch. Collective.

    Damaged checkpoints are reported. Checkpoints in `output` that are later than the one found (damaged, or not the one
    named by `--resume`) are quarantined: renamed, so that no later run resumes from them. With `overwrite`, `--resume
    auto` resumes only from an interrupted run of the same identity, so that the same command resumes after a crash and
    starts from scratch otherwise. Every rank raises the same `UserError`.
    """
    if flags.resume == NEVER:
        return None
    first = _find(output, flags, identity, overwrite) if dist.is_main() else None
    found, problem = dist.broadcast_object(first)
    if problem is not None:
        raise UserError(problem)
    checkpoint = None if found is None else Path(found)
    if checkpoint is not None and is_inside(checkpoint, output) and dist.is_main():
        CheckpointFolder(output).quarantine_after(checkpoint)  # if it is elsewhere, those in `output` are removed
    return checkpoint


def _find(output: Path, flags: SafetyFlags, identity: RunIdentity, overwrite: bool) -> tuple[str | None, str | None]:
    """(the checkpoint or None, why the run must not start or None)."""
    may_start_from_scratch = overwrite and flags.resume == AUTO
    if may_start_from_scratch and is_finished(output):
        return None, None
    try:
        if flags.resume == AUTO:
            checkpoint = _newest_intact(output)
        else:
            checkpoint = Path(flags.resume)
            fault = damage(checkpoint) if checkpoint.is_dir() else "there is no such folder"
            if fault is not None:
                raise UserError(f"--resume {checkpoint}: {fault}; name a folder such as OUTPUT/checkpoints/step_000012")
        if checkpoint is not None:
            _require_same_run(checkpoint, flags, identity)
    except UserError as problem:
        if not may_start_from_scratch:
            return None, str(problem)
        logger().warning(f"starting from scratch, because of --overwrite_output_dir: {problem}")
        return None, None
    return (None if checkpoint is None else str(checkpoint)), None


def _newest_intact(output: Path) -> Path | None:
    folder = CheckpointFolder(output)
    name, complaints = folder.newest_intact()
    if name is None and complaints:
        raise UserError(
            f"--output_dir {output} has no intact checkpoint to resume from: {'; '.join(complaints)}. Repair one, or "
            "start from scratch with --overwrite_output_dir or another --output_dir"
        )
    for complaint in complaints:
        logger().warning(complaint)
    return None if name is None else folder.root / name


def _require_same_run(checkpoint: Path, flags: SafetyFlags, identity: RunIdentity) -> None:
    """Compare the identity of the run with that in the manifest, and log the differences that are allowed."""
    manifest = Manifest.read(checkpoint)
    if manifest.kind != identity.kind:
        raise UserError(f"{checkpoint} is a checkpoint of the step '{manifest.kind}', not of '{identity.kind}'")
    changes = compare_configs(manifest.config, identity.config)
    if manifest.data != identity.data:
        change = ConfigChange("training rows (SHA-256)", manifest.data[:12], identity.data[:12], matters=True)
        changes.insert(0, change)
    refuse_changes(checkpoint, changes, flags.resume_force)
    saved_rows, rows = manifest.config.get(UPDATE_ROWS), identity.config.get(UPDATE_ROWS)
    if manifest.update and saved_rows != rows:
        raise UserError(
            f"{checkpoint} was saved inside a PPO step, whose updates have {saved_rows} rows each, not {rows}: keep "
            "them, or name an earlier checkpoint by --resume"
        )
    if left := note_on_retired(manifest.config):
        logger().info(f"note: {checkpoint.name} was saved by an earlier version; {left}")
    shown = [change for change in changes if change.name not in WHERE_AND_WHEN]
    if shown:
        logger().info(f"settings that changed since {checkpoint.name} was saved:\n{format_diff(shown)}")


def is_inside(checkpoint: Path, output: Path) -> bool:
    """Whether a checkpoint lies in this output folder, so that the other outputs there belong to the same run."""
    return checkpoint.resolve().is_relative_to(output.resolve())
