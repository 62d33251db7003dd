"""MLflow runs in a local file store, read back by MLflow's client."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from tracked_runs import FIGURES, tracking_in

from dschat_ppo.errors import UserError
from dschat_ppo.monitor.mlflow_tracker import MlflowTracker, check_mlflow
from dschat_ppo.monitor.trackers import Start, StepFigures, saved_run_id
from dschat_ppo.monitor.writers import MetricsWriter

mlflow = pytest.importorskip("mlflow")


@pytest.fixture(autouse=True)
def client(tmp_path, monkeypatch):
    for name in ("MLFLOW_EXPERIMENT_NAME", "MLFLOW_EXPERIMENT_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    return mlflow.MlflowClient()


def run_of(client, tracking):
    return client.get_run(saved_run_id(tracking.folder, "mlflow"))


def points(client, run, name) -> list[tuple[int, float]]:
    return [(point.step, point.value) for point in client.get_metric_history(run.info.run_id, name)]


def test_a_step_is_in_the_run(tmp_path, client):
    tracking = tracking_in(tmp_path, "mlflow")
    tracker = MlflowTracker(tracking, Start())
    assert run_of(client, tracking).info.status == "RUNNING"
    tracker.write(1, {"eval/pass@1": 0.5, "kl/ref_k1": math.nan}, FIGURES)
    tracker.write(2, {"eval/pass@1": 0.75}, StepFigures())
    tracker.close(succeeded=False)
    run = run_of(client, tracking)
    assert run.info.status == "FAILED" and run.info.run_name == "ppo"
    assert client.get_experiment(run.info.experiment_id).name == "addition"
    assert run.data.params == {"learning_rate": "0.5", "data_path": "['a', 'b']", "config": "None"}
    assert points(client, run, "eval/pass_1") == [(1, 0.5), (2, 0.75)]
    assert math.isnan(points(client, run, "kl/ref_k1")[0][1])
    folder = client.download_artifacts(run.info.run_id, "")
    [answers, histogram] = (
        json.loads(Path(folder, name, "step_000001.json").read_text())
        for name in ("samples", "histograms/policy/ratio")
    )
    assert answers == {"answers": [{"prompt": "1 + 1 =", "answer": "2", "score": 0.25, "tokens": 3}]}
    assert histogram == {"edges": [0.0, 1.0, 3.0], "counts": [2.0, 6.0]}


def test_a_resumed_start_continues_the_run_and_repeats_no_step(tmp_path, client):
    tracking = tracking_in(tmp_path, "mlflow")
    for start, steps in ((Start(), (0, 1, 2, 3)), (Start(2, -1), (2, 3, 4))):  # metrics.jsonl has lost its lines
        tracker = MlflowTracker(tracking, start)
        for step in steps:
            tracker.write(step, {"a": float(steps[0])}, StepFigures())
        tracker.close(succeeded=True)
        tracking = replace(tracking, flags={**tracking.flags, "learning_rate": 0.25, "new": 1})
    run = run_of(client, tracking)
    assert points(client, run, "a") == [(0, 0), (1, 0), (2, 0), (3, 0), (4, 2)]
    assert run.info.status == "FINISHED"
    assert (run.data.params["learning_rate"], run.data.params["new"]) == ("0.5", "1"), "MLflow changes no parameter"
    assert len(client.search_runs([run.info.experiment_id])) == 1


def test_a_run_from_scratch_is_a_new_run(tmp_path, client):
    tracking = tracking_in(tmp_path, "mlflow")
    ids = set()
    for _ in range(2):
        tracker = MlflowTracker(tracking, Start())
        tracker.write(1, {"a": 1.0}, StepFigures())
        tracker.close(succeeded=True)
        ids.add(run_of(client, tracking).info.run_id)
    assert len(ids) == 2


def test_flags_come_before_variables_and_variables_before_the_names_of_folders(tmp_path, client, monkeypatch):
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "theirs")
    names = []
    for changes in ({}, {"project": "mine", "run_name": "first"}):
        tracking = tracking_in(tmp_path, "mlflow", **changes)
        MlflowTracker(tracking, Start()).close(succeeded=True)
        run = run_of(client, tracking)
        names.append((client.get_experiment(run.info.experiment_id).name, run.info.run_name))
    assert names == [("theirs", "ppo"), ("mine", "first")]
    monkeypatch.setenv("MLFLOW_EXPERIMENT_ID", client.create_experiment("by id"))
    tracking = tracking_in(tmp_path, "mlflow")
    MlflowTracker(tracking, Start()).close(succeeded=True)
    assert client.get_experiment(run_of(client, tracking).info.experiment_id).name == "by id"


def test_many_flags_and_long_values_are_logged(tmp_path, client):
    flags = {f"flag_{number}": "x" * 7000 for number in range(250)}
    tracking = tracking_in(tmp_path, "mlflow", flags=flags)
    MlflowTracker(tracking, Start()).close(succeeded=True)
    params = run_of(client, tracking).data.params
    assert set(params) == set(flags) and set(map(len, params.values())) == {6000}


def test_a_store_that_fails_during_the_run_is_reported_once_and_training_continues(tmp_path, monkeypatch, said):
    def fail(*_, **__):
        raise mlflow.exceptions.MlflowException("the server is gone")

    with MetricsWriter(tmp_path, tracking_in(tmp_path, "mlflow")) as writer:
        monkeypatch.setattr(writer._trackers[0]._client, "log_batch", fail)
        writer.write(1, {"a": 1.0})
        writer.write(2, {"a": 1.0})
    assert said == ["MlflowTracker cannot write, and the run continues without it: the server is gone"]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_a_store_that_cannot_be_used_is_named_before_the_run(monkeypatch):
    check_mlflow()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "gopher://x")
    with pytest.raises(UserError, match="--report_to mlflow: gopher://x cannot be used: "):
        check_mlflow()
