"""One run on its output folder: what it goes on from, what it leaves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from dschat_ppo.checkpoint.folder import CheckpointFolder, checkpoint_name
from dschat_ppo.checkpoint.manager import CheckpointManager, restore
from dschat_ppo.checkpoint.resumable import Checkpointer, Resumable
from dschat_ppo.checkpoint.resume import RunIdentity, choose, lies_in
from dschat_ppo.checkpoint.run_identity import RunInputs, input_fingerprints
from dschat_ppo.common import dist
from dschat_ppo.common.logging import logger
from dschat_ppo.config.cli import flatten
from dschat_ppo.config.safety_flags import AUTO, SafetyFlags
from dschat_ppo.config.schema import RunFlags
from dschat_ppo.data.fingerprint import fingerprint
from dschat_ppo.errors import StopRequested
from dschat_ppo.monitor.writers import MetricsWriter
from dschat_ppo.runtime import stop_requests
from dschat_ppo.session.begin_run import open_outputs, tensorboard_folder

Result = TypeVar("Result")


@dataclass(frozen=True)
class Session:
    """A run. `chosen` is the checkpoint that it goes on from, or None."""

    output: Path
    about: RunIdentity
    run: RunFlags
    safety: SafetyFlags
    chosen: Path | None

    def train(self, trainer: Resumable, train: Callable[[MetricsWriter, Checkpointer], Result]) -> Result:
        """Restore the trainer if there is something to go on from, and train with checkpoints, the last one at the end.

        Raises:
            StopRequested: the run was asked to stop, and is saved.
        """
        _stop_if_asked()
        manifest = None if self.chosen is None else restore(self.chosen, trainer, self.run.seed)
        resumed = saved = None
        if self.chosen is not None and manifest is not None:
            logger().info(f"going on from {self.chosen}: {manifest.step} steps are done")
            resumed = (manifest.metrics_offset if lies_in(self.chosen, self.output) else 0, manifest.step + 1)
            place = CheckpointFolder(self.output).root / checkpoint_name(manifest.step, manifest.update)
            saved = (manifest.step, manifest.update) if self.chosen.resolve() == place.resolve() else None
        with MetricsWriter(self.output, tensorboard_folder(self.run), resumed) as writer:
            keeper = CheckpointManager(self.output, trainer, self.safety, self.about, writer, saved, self._to_go_on())
            result = train(writer, keeper)
            keeper.finish()
        return result

    def _to_go_on(self) -> str:
        if self.safety.resume == AUTO:
            return "run the same command again to go on"
        return "run the command again with --resume auto to go on"


def open_session(
    kind: Literal["sft", "reward", "ppo"], output: Path, config: Any, inputs: RunInputs, amounts: dict[str, int]
) -> Session:
    """Choose what the run goes on from, and make the output folder ready. Collective; before any model is loaded.

    Args:
        kind: the step.
        output: locked by this run.
        config: of the step.
        inputs: what it reads; looked through on rank 0.
        amounts: what the flags amount to, see `checkpoint.changes`.

    Raises:
        StopRequested: the run was asked to stop meanwhile; nothing is changed.
        UserError: see `choose` and `open_outputs`.
    """
    _stop_if_asked()
    settings = flatten(config) | amounts
    about = RunIdentity(kind, settings, "")
    if dist.is_main():
        about = RunIdentity(kind, settings | input_fingerprints(inputs), fingerprint(inputs.train))
    chosen = choose(output, config.safety, about, config.run.overwrite_output_dir)
    resumed = chosen if chosen is not None and lies_in(chosen, output) else None
    open_outputs(output, config, config.run, resumed)
    return Session(output, about, config.run, config.safety, chosen)


def _stop_if_asked() -> None:
    """Before training there is nothing to save. Collective."""
    if dist.all_reduce(torch.tensor([stop_requests.noticed()], dtype=torch.int32, device=dist.device()), "max"):
        raise StopRequested("stopped as asked before training began; run the same command again")
