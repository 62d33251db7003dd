"""Trackio runs in its local database, in a folder of the test, read back by Trackio."""

import json
import sys

import pytest
from tracked_runs import ANSWERS, tracking_in

from dschat_ppo.monitor.trackers import RUN_IDS, Start, WandbTracker

pytest.importorskip("trackio")


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    """Trackio reads TRACKIO_DIR when it is imported."""
    for name in [name for name in sys.modules if name.split(".")[0] == "trackio"]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("TRACKIO_PROJECT", "TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "trackio"]:
        del sys.modules[name]


def id_in(tracking) -> str:
    return json.loads((tracking.folder / RUN_IDS).read_text())["trackio"]


def logs_of(project, tracking) -> list[dict]:
    from trackio.sqlite_storage import SQLiteStorage

    return SQLiteStorage.get_logs(project, id_in(tracking))


def test_a_step_is_in_the_run(tmp_path):
    from trackio.sqlite_storage import SQLiteStorage

    tracking = tracking_in(tmp_path, "trackio")
    tracker = WandbTracker("trackio", tracking, Start())
    tracker.write(1, {"reward/score_mean": 1.5}, ANSWERS)
    tracker.write(2, {"reward/score_mean": 2.5}, ())
    tracker.close(succeeded=True)
    first, second = logs_of("addition", tracking)
    assert (first["step"], first["reward/score_mean"], second["step"]) == (1, 1.5, 2)
    assert first["samples/answers"]["_value"] == [{"prompt": "1 + 1 =", "answer": "2", "score": 0.25, "tokens": 3}]
    name = id_in(tracking)
    assert name.startswith("ppo-") and len(name) == len("ppo-") + 6
    config = SQLiteStorage.get_run_config("addition", name)
    assert config["learning_rate"] == 0.5 and config["data_path"] == ["a", "b"]
