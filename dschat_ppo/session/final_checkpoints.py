"""The checkpoints of a finished run: removed once its models are saved, unless `--keep_final_checkpoint` is given."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dschat_ppo.checkpoint.folder import CheckpointFolder
from dschat_ppo.common import dist
from dschat_ppo.common.heartbeat import watchdog_paused
from dschat_ppo.common.logging import logger
from dschat_ppo.config.run_flags import SafetyFlags
from dschat_ppo.errors import UserError
from dschat_ppo.models.model_files import checkpoint_shapes


def remove_checkpoints(output: Path, models: Sequence[Path], flags: SafetyFlags) -> None:
    """Remove the checkpoints of a run whose `result.json` is written. Collective.

    They stay if a saved model cannot be read, or with `--keep_final_checkpoint`. If the run ends in between, the same
    command removes the rest (`check_earlier_outputs`).
    """
    if flags.keep_final_checkpoint:
        return
    if dist.is_main() and all(map(_is_readable, models)):
        discard_checkpoints(output)


def finish_removal(output: Path) -> bool:
    """Remove the checkpoints that a crash left of a finished run, on rank 0. They stay, and False is returned, if a
    saved model cannot be read: only they can give that model again."""
    roles = [role for role in ("actor", "critic", "actor_ema") if (output / role).is_dir()]
    models = [output / role for role in dict.fromkeys(["actor", *roles])] if roles else [output]  # of step 3: the actor
    is_whole = all(map(_is_readable, models))
    if is_whole:
        discard_checkpoints(output)
    return is_whole


def _is_readable(folder: Path) -> bool:
    """Whether a saved model is whole; otherwise a warning says why its run's checkpoints are kept."""
    try:
        found = checkpoint_shapes(str(folder))  # an incomplete file is refused
    except UserError as problem:
        logger().warning(f"checkpoints are kept, because a saved model cannot be read: {problem}")
        return False
    if not found:
        logger().warning(f"checkpoints are kept, because {folder} holds no weights")
    return bool(found)


def discard_checkpoints(output: Path) -> None:
    """Remove all checkpoints in an output folder, and log their size. A failure is only a warning."""
    try:
        with watchdog_paused():
            size = CheckpointFolder(output).remove_all()
    except OSError as problem:
        logger().warning(f"{output / 'checkpoints'} cannot be removed ({problem.strerror or problem})")
        return
    logger().info(f"checkpoints: removed, {size / 2**20:.1f} MiB (--keep_final_checkpoint keeps them, to train longer)")
