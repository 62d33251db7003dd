"""A session: one run in its output folder, from scratch or resumed, with its checkpoints and metrics."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from dschat_ppo.checkpoint.identity import (
    FLAGS,
    RunIdentity,
    RunInputs,
    find_checkpoint,
    identify_run,
    is_inside,
    require_same_on_machines,
)
from dschat_ppo.checkpoint.manager import CheckpointManager, Resumable, package_versions, restore
from dschat_ppo.checkpoint.store import CheckpointFolder, Manifest, checkpoint_name
from dschat_ppo.common import dist
from dschat_ppo.common.logging import logger
from dschat_ppo.common.paths import shown_path
from dschat_ppo.config.run_flags import AUTO, RunFlags, SafetyFlags
from dschat_ppo.config.steps import StepConfig
from dschat_ppo.errors import NonFiniteError, StopRequested, UnhealthyRun, UserError
from dschat_ppo.html_report.page import report_run
from dschat_ppo.monitor.step_trace import StepTrace
from dschat_ppo.monitor.trackers import Tracking
from dschat_ppo.monitor.writers import METRICS, MetricsWriter, record_start
from dschat_ppo.runtime import stop_requests
from dschat_ppo.session.output_folder import prepare_output_folder


@dataclass(frozen=True)
class Session:
    """A run in its output folder. `checkpoint`: the folder of the checkpoint from which it resumes, or None."""

    output: Path
    identity: RunIdentity
    run: RunFlags
    safety: SafetyFlags
    checkpoint: Path | None

    @property
    def trace(self) -> StepTrace:
        """Records the step of `--profile`, if it is given."""
        return StepTrace(self.output, self.run.profile)

    @property
    def is_resumed(self) -> bool:
        """Whether this start of the run resumes from a checkpoint."""
        return self.checkpoint is not None

    @contextmanager
    def training(self, trainer: Resumable) -> Iterator[tuple[MetricsWriter, CheckpointManager]]:
        """Restore the trainer if the run resumes; inside the block it trains, with metrics and checkpoints. Collective.

        The end of the block saves the last checkpoint. If a stop, a health event or a number that is not finite ends
        the block, the report of the run so far is written first, if there are metrics.
        """
        _raise_if_stop_requested()
        resumed = saved = None
        if self.checkpoint is not None:
            manifest = restore(self.checkpoint, trainer, self.run.seed)
            logger().info(f"resuming from {shown_path(self.checkpoint)}: {manifest.step} steps are done")
            resumed = (manifest.metrics_offset if is_inside(self.checkpoint, self.output) else 0, manifest.step + 1)
            place = CheckpointFolder(self.output).root / checkpoint_name(manifest.step, manifest.update)
            saved = (manifest.step, manifest.update) if self.checkpoint.resolve() == place.resolve() else None
        if dist.is_main():
            record_start(self.output, resumed[1] if resumed else 1, dist.world_size())
        command = "the same command again" if self.safety.resume == AUTO else "the command again with --resume auto"
        with MetricsWriter(self.output, self._tracking(), resumed) as metrics:
            checkpoints = CheckpointManager(
                self.output, trainer, self.safety, self.identity, metrics, saved, f"run {command} to resume"
            )
            try:
                yield metrics, checkpoints
            except (StopRequested, UnhealthyRun, NonFiniteError) as ended:
                try:
                    if dist.is_main() and (self.output / METRICS).stat().st_size > 0:
                        report_run(self.output)
                finally:
                    if sys.exc_info()[1] is not ended:
                        traceback.print_exc()  # a bug of the report does not hide why the run ended
                    raise ended
            checkpoints.finish()

    def _tracking(self) -> Tracking | None:
        """What the trackers receive; None without any."""
        run, given = self.run, self.identity.config.items()
        if not run.trackers:
            return None
        flags = {name: value for name, value in given if name in FLAGS}
        return Tracking(run.trackers, self.output, run.tensorboard_folder, run.project, run.run_name, flags)


def open_session(
    kind: Literal["sft", "reward", "ppo"], output: Path, config: StepConfig, inputs: RunInputs, derived: dict[str, int],
    steps: int,
) -> Session:  # fmt: skip
    """Find the checkpoint to resume from, and prepare the locked output folder. Collective; before any model is loaded.
    `derived`: batch sizes, see `checkpoint.identity.PRODUCTS`; `steps`: planned ones, in step 3 PPO steps."""
    _raise_if_stop_requested()
    identity = identify_run(kind, config, inputs, derived)
    require_same_on_machines(identity, package_versions())
    checkpoint = find_checkpoint(output, config.safety, identity, config.run.overwrite_output_dir)
    if checkpoint is not None:
        saved = Manifest.read(checkpoint)
        if saved.step > steps or (saved.step == steps and saved.update > 0):
            raise UserError(
                f"{checkpoint} is beyond the end of this run, which has {steps} steps: raise --num_train_epochs or "
                "--max_steps, or name an earlier checkpoint by --resume"
            )
        if (profiled := config.run.profile) is not None and profiled <= saved.step:
            logger().info(
                f"note: --profile {profiled} has no effect: the run resumes from {checkpoint}, where step {saved.step} "
                "is done"
            )
    resumed = checkpoint if checkpoint is not None and is_inside(checkpoint, output) else None
    prepare_output_folder(output, config, config.run, resumed)
    return Session(output, identity, config.run, config.safety, checkpoint)


def _raise_if_stop_requested() -> None:
    """Before training there is nothing to save. Collective."""
    flag = torch.tensor([stop_requests.flag_is_set()], dtype=torch.int32, device=dist.device())
    if dist.all_reduce(flag, "max"):
        raise StopRequested("stopped as asked before training began; run the same command again")
