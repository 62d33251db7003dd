"""Check and open the trackers that the flags name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack

from dschat_ppo.common.extras import require_extra
from dschat_ppo.common.logging import logger
from dschat_ppo.errors import in_one_line
from dschat_ppo.monitor.mlflow_tracker import MlflowTracker, check_mlflow
from dschat_ppo.monitor.tensorboard_tracker import TensorBoardTracker
from dschat_ppo.monitor.trackers import Start, Tracker, Tracking
from dschat_ppo.monitor.trackio_tracker import TrackioTracker
from dschat_ppo.monitor.wandb_tracker import WandbTracker, check_wandb

_TRACKERS: dict[str, Callable[[Tracking, Start], Tracker]] = {
    "tensorboard": TensorBoardTracker,
    "wandb": WandbTracker,
    "mlflow": MlflowTracker,
    "trackio": TrackioTracker,
}
_CHECKS: dict[str, Callable[[], None]] = {"wandb": check_wandb, "mlflow": check_mlflow}


def check_trackers(libraries: Sequence[str]) -> None:
    """Check, before a model is loaded, that these libraries can be used. Call it on rank 0, which alone uses them.

    Raises:
        UserError: one is not installed, or cannot begin a run.
    """
    for library in libraries:
        require_extra(library, f"--report_to {library}")
        if library in _CHECKS:
            _CHECKS[library]()


def open_trackers(tracking: Tracking, start: Start) -> list[Tracker]:
    """Begin the run in each library, or continue it. Call it on rank 0.

    Raises:
        UserError: a library does not begin the run. The runs that the libraries before it began are closed as failed.
    """
    opened: list[Tracker] = []
    with ExitStack() as begun:
        for library in tracking.libraries:
            tracker = _TRACKERS[library](tracking, start)
            opened.append(tracker)
            begun.callback(_close_as_failed, tracker)
        begun.pop_all()
    return opened


def _close_as_failed(tracker: Tracker) -> None:
    """Close the run of a tracker. A failure is only a warning, because it must not hide why the run ends."""
    try:
        tracker.close(succeeded=False)
    except tracker.failures as problem:
        logger().warning(f"{type(tracker).__name__} cannot be closed: {in_one_line(problem)}")
