"""Weights & Biases."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from typing import Any

from dschat_ppo.errors import UserError, in_one_line
from dschat_ppo.monitor.trackers import Start, StepFigures, Tracking, logged_values, save_run_id, saved_run_id


def check_wandb() -> None:
    """Check that a run can begin.

    Raises:
        UserError: runs are sent to a server, and there is no API key, or the server does not accept it or not answer.
    """
    import wandb

    try:
        ready = wandb.setup().settings.mode != "online" or wandb.login(prompt=False)
    except wandb.errors.Error as problem:
        raise UserError(f"--report_to wandb: {in_one_line(problem)}; or set WANDB_MODE=offline") from problem
    if not ready:
        raise UserError(
            "--report_to wandb: there is no API key; run `wandb login`, set WANDB_API_KEY, or set WANDB_MODE=offline"
        )


class WandbTracker:
    """Writes to one W&B run, which resumed starts continue under the same id.

    W&B takes steps in ascending order only. A step that it has already is not sent again: W&B knows the last one that
    its server has, and `written` is the last one of earlier starts, each of which writes a separate file offline.

    Raises:
        UserError: W&B does not begin the run.
    """

    def __init__(self, tracking: Tracking, start: Start):
        import wandb
        from wandb.sdk import mailbox

        ended = (mailbox.MailboxClosedError, mailbox.HandleAbandonedError)  # the process that sends to the server
        self.failures: tuple[type[Exception], ...] = (OSError, wandb.errors.Error, *ended)
        self._library: Any = wandb
        saved = saved_run_id(tracking.folder, "wandb") if start.first_step is not None else None
        run_id = saved or os.environ.get("WANDB_RUN_ID") or secrets.token_hex(4)
        save_run_id(tracking.folder, "wandb", run_id)  # before: a run that crashes in `init` exists already
        resume: Any = os.environ.get("WANDB_RESUME", "allow")
        try:
            self._run: Any = wandb.init(
                id=run_id,
                resume=resume,
                project=tracking.project or os.environ.get("WANDB_PROJECT") or tracking.default_project,
                name=tracking.run_name or os.environ.get("WANDB_NAME") or tracking.default_run_name,
                dir=os.environ.get("WANDB_DIR", str(tracking.folder)),
                config=dict(tracking.flags),
                allow_val_change=True,
            )
        except wandb.errors.Error as problem:
            raise UserError(f"--report_to wandb: {problem}") from problem
        self._next = max(start.written + 1, self._run.step) if saved else 0

    def write(self, step: int, metrics: Mapping[str, float], figures: StepFigures) -> None:
        """See `Tracker`."""
        if step < self._next:
            return
        self._run.log(logged_values(self._library, metrics, figures), step=step, commit=True)

    def close(self, succeeded: bool) -> None:
        """See `Tracker`."""
        self._run.finish(exit_code=0 if succeeded else 1)
