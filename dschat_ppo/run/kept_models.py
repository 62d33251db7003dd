"""Models that a run keeps while it trains: `hf/step_N/` every so many steps, and `best/`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dschat_ppo.checkpoint.store import checkpoint_name
from dschat_ppo.common import dist
from dschat_ppo.common.atomic_files import OLD, PARTIAL, remove_folder, replace_folder, sync_entries
from dschat_ppo.common.logging import logger
from dschat_ppo.common.paths import shown_path
from dschat_ppo.monitor.json_lines import storage_errors

BEST, HF = "best", "hf"


@dataclass(frozen=True)
class KeptModels:
    """Writes the models of a run, whole or not at all; `StorageError` on every rank if they cannot be written."""

    output: Path  # `--output_dir`
    every: int  # `--save_hf_steps`; 0 = never
    keeps_best: bool  # whether `best/` is wanted
    save: Callable[[Path], object]  # writes the models as they are now to a new folder. Collective

    @property
    def best(self) -> Path:
        """Folder of the best models."""
        return self.output / BEST

    def is_due(self, step: int) -> bool:
        """Whether the models after `step` steps are kept in `hf/`."""
        return self.every > 0 and step % self.every == 0

    def save_step(self, step: int) -> None:
        """Keep the models after `step` steps; a folder that an interrupted run left is replaced. Collective."""
        folder = self.output / HF / checkpoint_name(step)
        self._replace(folder)
        logger().info(f"models of step {step}: saved to {shown_path(folder)}")

    def save_best(self) -> None:
        """Keep the models as the best ones, in place of those before. Collective."""
        self._replace(self.best)

    def _replace(self, folder: Path) -> None:
        partial = folder.with_name(f"{folder.name}{PARTIAL}")  # what a crash left of it, the start has removed
        self.save(partial)
        dist.on_main(storage_errors(folder)(lambda: replace_folder(folder, partial)))


def best_is_lost(folder: Path, step: int) -> bool:
    """Whether a resumed run does not find in `folder` the models of `step`, its best so far: it had another
    `--output_dir`, or did not keep them. Collective."""
    is_lost = not dist.broadcast_object(folder.is_dir())
    if is_lost:
        logger().info(f"{folder} does not hold the models of step {step}, the best so far; the best is looked for anew")
    return is_lost


def clear_partials(output: Path) -> None:
    """Remove what a crash left incomplete in `best/` and `hf/`; a folder that was being replaced gets its name back.
    Once at the start, on rank 0, with the lock held."""
    for left in [*output.glob(f"{BEST}.*"), *(output / HF).glob("step_*.*")]:
        if left.suffix == OLD and not left.with_suffix("").exists():
            left.rename(left.with_suffix(""))
            sync_entries(left.parent)
        elif left.suffix in (OLD, PARTIAL):
            remove_folder(left)
