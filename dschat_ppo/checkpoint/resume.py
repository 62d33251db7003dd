"""Which checkpoint a run goes on from."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Literal

from dschat_ppo.checkpoint.config_diff import WHERE_AND_WHEN, Change, compare, refuse, report
from dschat_ppo.checkpoint.folder import CheckpointFolder
from dschat_ppo.checkpoint.manifest import Manifest, damage
from dschat_ppo.common import dist
from dschat_ppo.common.atomic_files import sync_entries
from dschat_ppo.common.logging import logger
from dschat_ppo.config.safety_flags import AUTO, NEVER, SafetyFlags
from dschat_ppo.errors import UserError
from dschat_ppo.monitor.writers import is_finished

SET_ASIDE = ".set_aside"
UPDATE_ROWS = "rows_per_update"


@dataclass(frozen=True)
class RunIdentity:
    """What a run computes. `kind`: the step; `config`: flag -> value, with what the flags amount to (see `changes`);
    `data`: fingerprint of the token rows."""

    kind: Literal["sft", "reward", "ppo"]
    config: dict[str, Any]
    data: str


def choose(output: Path, flags: SafetyFlags, about: RunIdentity, overwrite: bool = False) -> Path | None:
    """The checkpoint folder that the run goes on from; None: it begins at the beginning. Collective.

    What is damaged on the way is said. Checkpoints later than the chosen one (damaged, or not what `--resume` names)
    are set aside under another name, so that no later run goes on from them.

    Args:
        output: `--output_dir`.
        flags: `--resume` and `--resume_force`.
        about: the run that begins.
        overwrite: `--overwrite_output_dir`: what `--resume auto` finds counts only where it is of this very run, which
            was interrupted. So the same command goes on after a crash, and does anything else anew.

    Raises:
        UserError: the one that is named cannot be used, or there are some but none is intact, or its settings mean
            something else; the same on every rank.
    """
    if flags.resume == NEVER:
        return None
    chosen, problem = dist.broadcast_object(_choose(output, flags, about, overwrite) if dist.is_main() else None)
    if problem is not None:
        raise UserError(problem)
    return None if chosen is None else Path(chosen)


def _choose(output: Path, flags: SafetyFlags, about: RunIdentity, overwrite: bool) -> tuple[str | None, str | None]:
    """(the checkpoint or None, why the run must not begin or None)."""
    may_begin_anew = overwrite and flags.resume == AUTO
    if may_begin_anew and is_finished(output):
        return None, None
    try:
        folder = _newest(output) if flags.resume == AUTO else _named(Path(flags.resume))
        if folder is not None:
            _check(folder, flags, about)
            _set_aside_later_ones(output, folder)
    except UserError as problem:
        if not may_begin_anew:
            return None, str(problem)
        logger().warning(f"beginning anew, as --overwrite_output_dir says: {problem}")
        return None, None
    return (None if folder is None else str(folder)), None


def _newest(output: Path) -> Path | None:
    folder = CheckpointFolder(output)
    name, complaints = folder.newest_intact()
    if name is None and complaints:
        raise UserError(
            f"--output_dir {output} has no intact checkpoint to go on from: {'; '.join(complaints)}. Repair one, or "
            "begin anew with --overwrite_output_dir or another --output_dir"
        )
    for complaint in complaints:
        logger().warning(complaint)
    return None if name is None else folder.root / name


def _named(path: Path) -> Path:
    fault = damage(path) if path.is_dir() else "there is no such folder"
    if fault is not None:
        raise UserError(f"--resume {path}: {fault}; name a folder such as OUTPUT/checkpoints/step_000012")
    return path


def _check(folder: Path, flags: SafetyFlags, about: RunIdentity) -> None:
    manifest = Manifest.read(folder)
    if manifest.kind != about.kind:
        raise UserError(f"{folder} is a checkpoint of the step '{manifest.kind}', not of '{about.kind}'")
    changes = compare(manifest.config, about.config)
    if manifest.data != about.data:
        changes.insert(0, Change("training rows (SHA-256)", manifest.data[:12], about.data[:12], matters=True))
    refuse(folder, changes, flags.resume_force)
    if manifest.update and manifest.config.get(UPDATE_ROWS) != about.config.get(UPDATE_ROWS):
        raise UserError(
            f"{folder} was saved inside a PPO step, whose updates have {manifest.config.get(UPDATE_ROWS)} rows each, "
            f"not {about.config.get(UPDATE_ROWS)}: keep them, or name an earlier checkpoint by --resume"
        )
    shown = [change for change in changes if change.name not in WHERE_AND_WHEN]
    if shown:
        logger().info(f"settings that changed since {folder.name} was saved:\n{report(shown)}")


def _set_aside_later_ones(output: Path, chosen: Path) -> None:
    if not lies_in(chosen, output):
        return  # nothing of this run is here: `open_outputs` clears the folder
    folder, manifest = CheckpointFolder(output), Manifest.read(chosen)
    for name in folder.names(since=(manifest.step, manifest.update + 1)):
        places = (folder.root / f"{name}{SET_ASIDE}{number or ''}" for number in count())
        place = next(place for place in places if not place.exists())
        (folder.root / name).rename(place)
        logger().warning(f"{folder.root / name} is later than {chosen.name}: set aside as {place.name}")
    sync_entries(folder.root)  # a later start must not find them under their names


def lies_in(checkpoint: Path, output: Path) -> bool:
    """Whether a checkpoint lies in this output folder, so that the other outputs there go with it."""
    return checkpoint.resolve().is_relative_to(output.resolve())
