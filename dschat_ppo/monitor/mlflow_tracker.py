"""MLflow."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from dschat_ppo.errors import UserError
from dschat_ppo.monitor.trackers import Start, StepFigures, Tracking, save_run_id, saved_run_id

LAST_STEP = "dschat_ppo.last_step"  # tag of a run: the last step that it has
_MOST_IN_A_BATCH = 100  # parameters in one request
_MOST_CHARACTERS = 6000  # of a parameter
_NOT_IN_NAMES = re.compile(r"[^\w\-. :/]", re.ASCII)


def check_mlflow() -> None:
    """Check that the tracking store of MLFLOW_TRACKING_URI answers.

    Raises:
        UserError: it does not.
    """
    import mlflow

    try:
        mlflow.MlflowClient().search_experiments(max_results=1)
    except mlflow.exceptions.MlflowException as problem:
        first = str(problem).splitlines()[0]
        raise UserError(f"--report_to mlflow: {mlflow.get_tracking_uri()} cannot be used: {first}") from problem


class MlflowTracker:
    """Writes to one MLflow run, which resumed starts continue.

    MLflow keeps all points of a metric, those of a step that runs again too. So the run has a tag with its last step,
    written in the same request as the step's metrics, and earlier steps are not written again. Histograms and answers
    are artifacts, because MLflow has no type for them.

    Raises:
        UserError: MLflow does not begin the run.
    """

    def __init__(self, tracking: Tracking, start: Start):
        import mlflow
        from mlflow import entities

        self._entities: Any = entities
        self.failures: tuple[type[Exception], ...] = (mlflow.exceptions.MlflowException, OSError)  # OSError: artifacts
        saved = saved_run_id(tracking.folder, "mlflow") if start.first_step is not None else None
        try:
            self._client: Any = mlflow.MlflowClient()
            self._run_id = saved or self._begin_run(tracking)
            save_run_id(tracking.folder, "mlflow", self._run_id)
            self._client.update_run(self._run_id, status="RUNNING")
            run = self._client.get_run(self._run_id)
            self._add_flags(tracking.flags, run.data.params)
        except mlflow.exceptions.MlflowException as problem:
            raise UserError(f"--report_to mlflow: {str(problem).splitlines()[0]}") from problem
        self._next = int(run.data.tags.get(LAST_STEP, -1)) + 1

    def _begin_run(self, tracking: Tracking) -> str:
        """Begin a run in the experiment, which is made if there is none of its name; return its id."""
        client, environment = self._client, os.environ
        experiment = None if tracking.project else environment.get("MLFLOW_EXPERIMENT_ID")
        if experiment is None:
            name = tracking.project or environment.get("MLFLOW_EXPERIMENT_NAME") or tracking.default_project
            known = client.get_experiment_by_name(name)
            experiment = client.create_experiment(name) if known is None else known.experiment_id
        run = client.create_run(experiment, run_name=tracking.run_name or tracking.default_run_name)
        return str(run.info.run_id)

    def _add_flags(self, flags: Mapping[str, Any], known: Mapping[str, str]) -> None:
        """Log flags as parameters. MLflow never changes a parameter: a flag keeps the value of the first start."""
        texts = {name: str(value)[:_MOST_CHARACTERS] for name, value in flags.items() if name not in known}
        params = [self._entities.Param(name, value) for name, value in texts.items()]
        for first in range(0, len(params), _MOST_IN_A_BATCH):
            self._client.log_batch(self._run_id, params=params[first : first + _MOST_IN_A_BATCH])

    def write(self, step: int, metrics: Mapping[str, float], figures: StepFigures) -> None:
        """See `Tracker`. Characters that MLflow does not accept in names become `_`, as in `eval/pass_1`."""
        if step < self._next:
            return
        now, entities = int(1000 * time.time()), self._entities
        points = [entities.Metric(_NOT_IN_NAMES.sub("_", name), value, now, step) for name, value in metrics.items()]
        for name, histogram in figures.histograms.items():
            self._client.log_dict(self._run_id, asdict(histogram), f"histograms/{name}/step_{step:06d}.json")
        if figures.answers:
            answers = [asdict(answer) for answer in figures.answers]
            self._client.log_dict(self._run_id, {"answers": answers}, f"samples/step_{step:06d}.json")
        self._client.log_batch(self._run_id, metrics=points, tags=[entities.RunTag(LAST_STEP, str(step))])

    def close(self, succeeded: bool) -> None:
        """See `Tracker`."""
        self._client.set_terminated(self._run_id, "FINISHED" if succeeded else "FAILED")
