"""Trackio."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from typing import Any

from dschat_ppo.monitor.trackers import Start, StepFigures, Tracking, logged_values, save_run_id, saved_run_id


class TrackioTracker:
    """Writes to one Trackio run, which resumed starts continue.

    Trackio finds the run to resume by its name, and several runs may have the same one. So the name ends with six
    random digits. It keeps all points of a step that runs again; so steps that earlier starts wrote (`written`) are not
    written again.
    """

    failures: tuple[type[Exception], ...] = (OSError,)  # Trackio itself turns the others into warnings

    def __init__(self, tracking: Tracking, start: Start):
        import trackio

        self._library: Any = trackio
        saved = saved_run_id(tracking.folder, "trackio") if start.first_step is not None else None
        name = saved or f"{tracking.run_name or tracking.default_run_name}-{secrets.token_hex(3)}"
        project = tracking.project or os.environ.get("TRACKIO_PROJECT") or tracking.default_project
        save_run_id(tracking.folder, "trackio", name)
        self._run: Any = trackio.init(
            project=project, name=name, config=dict(tracking.flags), resume="allow", embed=False
        )
        self._next = start.written + 1 if saved else 0

    def write(self, step: int, metrics: Mapping[str, float], figures: StepFigures) -> None:
        """See `Tracker`."""
        if step < self._next:
            return
        self._run.log(logged_values(self._library, metrics, figures), step=step)

    def close(self, succeeded: bool) -> None:
        """See `Tracker`. Trackio has no mark for a failed run."""
        self._run.finish()
