"""Trackers are checked before anything is loaded; names and ids of their runs. What is written is
read back: by TensorBoard, by Trackio from its local database, and of W&B, in offline mode, from its
run and its tables."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from tensorboard.backend.event_processing.event_accumulator import (
    STORE_EVERYTHING_SIZE_GUIDANCE,
    EventAccumulator,
)

from dschat_ppo.common import extras
from dschat_ppo.errors import UserError
from dschat_ppo.monitor import trackers
from dschat_ppo.monitor.trackers import (
    RUN_IDS,
    SampledResponse,
    Start,
    TensorBoardTracker,
    Tracking,
    WandbTracker,
    check_wandb,
    require_trackers,
)

ANSWERS = [SampledResponse("1 + 1 =", "2", 0.25, 3)]


def tracking_in(folder: Path, library: str, **changes) -> Tracking:
    """A run whose output folder is `folder/addition/ppo`."""
    output = folder / "addition/ppo"
    output.mkdir(parents=True, exist_ok=True)
    flags = {
        "learning_rate": 0.5,
        "data_path": ["a", "b"],
        "config": None,
        "dtype": "bf16",
        "packing": True,
    }
    given = {"project": None, "run_name": None, "flags": flags, **changes}
    return Tracking((library,), output, output / "board", **given)


INSTALLED = SimpleNamespace(origin="wandb/__init__.py")


@pytest.fixture
def begun(tmp_path, monkeypatch):
    """A function that begins a run with a stand-in for a library, and writes steps 2 to 5; the file
    of the ids of all runs; the steps that were sent."""
    sent = []

    def logged(data, step):
        sent.append(step)

    library = SimpleNamespace(
        init=lambda **named: SimpleNamespace(**named, log=logged), __name__="trackio"
    )
    monkeypatch.setattr(trackers.importlib, "import_module", lambda name: library)
    tracking = tracking_in(tmp_path, "trackio")

    def begin(start=Start()):  # noqa: B008
        tracker = WandbTracker("trackio", tracking, start)
        for step in range(2, 6):
            tracker.write(step, {}, ())
        return tracker._run, json.loads((tracking.folder / RUN_IDS).read_text())

    return begin, tracking.folder / RUN_IDS, sent


def test_the_id_of_a_run_is_kept_beside_those_of_other_libraries_and_names_follow_from_the_folder(
    begun,
):
    begin, file, sent = begun
    file.write_text('{"wandb": "a"}')
    run, ids = begin()
    assert (
        ids == {"wandb": "a", "trackio": run.name}
        and run.name.startswith("ppo-")
        and run.project == "addition"
    )
    sent.clear()
    assert begin(Start(2, 3))[0].name == run.name, "a resumed run continues it"
    assert sent == [4, 5], "no step is sent twice"
    assert begin()[0].name != run.name


@pytest.mark.parametrize("library", ["wandb", "trackio"])
def test_a_missing_library_names_the_command_that_installs_it(monkeypatch, library):
    monkeypatch.setattr(extras, "find_spec", lambda name: None if name == library else INSTALLED)
    require_trackers(["tensorboard"])
    with pytest.raises(UserError) as raised:
        require_trackers(["tensorboard", library])
    said = str(raised.value)
    assert said.startswith(f"--report_to {library} needs the package {library}")
    assert said.endswith(f': pip install -e ".[{library}]"')


def read(tracking) -> EventAccumulator:
    return EventAccumulator(str(tracking.tensorboard), STORE_EVERYTHING_SIZE_GUIDANCE).Reload()


def test_scalars_texts_and_flags_are_read_back(tmp_path):
    tracking = tracking_in(tmp_path, "tensorboard")
    tracker = TensorBoardTracker(tracking, Start())
    answers = [SampledResponse("1 + 1\n= |?", "*2*\n", 0.25, 3)]
    tracker.write(7, {"reward/score_mean": 1.5, "kl/ref_k1": -0.25}, answers)
    tracker.close(succeeded=True)
    board = read(tracking)
    assert [(event.step, event.value) for event in board.Scalars("reward/score_mean")] == [(7, 1.5)]
    [event] = board.Tensors("samples/answers/text_summary")
    text = event.tensor_proto.string_val[0].decode()
    assert event.step == 7
    [flags] = board.Tensors("flags/text_summary")
    assert (
        "    learning_rate: 0.5\n    data_path: ['a', 'b']\n    config: None\n"
        in flags.tensor_proto.string_val[0].decode()
    )
    assert (
        text == "**score 0.25**, 3 tokens\n\nprompt:\n\n    1 + 1\n    = |?\n\nanswer:\n\n    *2*"
    )


def test_points_of_steps_that_run_again_are_dropped(tmp_path):
    tracking = tracking_in(tmp_path, "tensorboard")
    for start, steps in ((Start(), (1, 2, 3)), (Start(2, 3), (2, 3, 4))):
        tracker = TensorBoardTracker(tracking, start)
        for step in steps:
            tracker.write(step, {"a": float(steps[0])}, ())
        tracker.close(succeeded=True)
    assert [(event.step, event.value) for event in read(tracking).Scalars("a")] == [
        (1, 1),
        (2, 2),
        (3, 2),
        (4, 2),
    ]


@pytest.fixture
def own_folder(tmp_path, monkeypatch):
    """Trackio reads TRACKIO_DIR when it is imported."""
    pytest.importorskip("trackio")
    for name in [name for name in sys.modules if name.split(".")[0] == "trackio"]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("TRACKIO_PROJECT", "TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "trackio"]:
        del sys.modules[name]


def test_a_step_is_in_the_run_of_trackio(tmp_path, own_folder):
    from trackio.sqlite_storage import SQLiteStorage

    tracking = tracking_in(tmp_path, "trackio")
    tracker = WandbTracker("trackio", tracking, Start())
    tracker.write(1, {"reward/score_mean": 1.5}, ANSWERS)
    tracker.write(2, {"reward/score_mean": 2.5}, ())
    tracker.close(succeeded=True)
    name = json.loads((tracking.folder / RUN_IDS).read_text())["trackio"]
    first, second = SQLiteStorage.get_logs("addition", name)
    assert (first["step"], first["reward/score_mean"], second["step"]) == (1, 1.5, 2)
    assert first["samples/answers"]["_value"] == [
        {"prompt": "1 + 1 =", "answer": "2", "score": 0.25, "tokens": 3}
    ]
    assert name.startswith("ppo-") and len(name) == len("ppo-") + 6
    config = SQLiteStorage.get_run_config("addition", name)
    assert config["learning_rate"] == 0.5 and config["data_path"] == ["a", "b"]


@pytest.fixture
def offline(monkeypatch):
    wandb = pytest.importorskip("wandb")
    for name in ("WANDB_PROJECT", "WANDB_NAME", "WANDB_RUN_ID", "WANDB_DIR", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_CONSOLE", "off")
    yield
    wandb.teardown()


def test_a_step_is_one_point_of_the_run_of_wandb(tmp_path, offline, monkeypatch):
    tracking = tracking_in(tmp_path, "wandb")
    tracker = WandbTracker("wandb", tracking, Start())
    run, ended = tracker._run, []
    tracker.write(1, {"reward/score_mean": 1.5, "kl/ref_k1": float("nan")}, ANSWERS)
    # the step is sent, and not kept back until the next one: a killed run keeps it
    assert run.step == 2
    tracker.write(2, {"reward/score_mean": 2.5}, ())
    assert (run.project, run.name, run.step, run.summary["reward/score_mean"]) == (
        "addition",
        "ppo",
        3,
        2.5,
    )
    assert json.loads((tracking.folder / RUN_IDS).read_text()) == {"wandb": run.id}
    assert run.config["learning_rate"] == 0.5 and run.config["data_path"] == ["a", "b"]
    finish = run.finish
    monkeypatch.setattr(
        run, "finish", lambda exit_code: ended.append(exit_code) or finish(exit_code=exit_code)
    )
    tracker.close(succeeded=False)
    assert ended == [1]
    [table] = tracking.folder.glob("wandb/offline-run-*/files/media/table/samples/answers*.json")
    assert json.loads(table.read_text()) == {
        "columns": ["prompt", "answer", "score", "tokens"],
        "data": [["1 + 1 =", "2", 0.25, 3]],
    }


def test_flags_come_before_variables_and_variables_before_the_names_of_folders(
    tmp_path, offline, monkeypatch
):
    monkeypatch.setenv("WANDB_PROJECT", "theirs")
    monkeypatch.setenv("WANDB_NAME", "named")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    found, ids = [], set()
    for changes in ({}, {"project": "mine", "run_name": "first"}):
        tracker = WandbTracker("wandb", tracking_in(tmp_path, "wandb", **changes), Start())
        found.append((tracker._run.project, tracker._run.name))
        ids.add(tracker._run.id)  # both from scratch
        tracker.close(succeeded=True)
    assert found == [("theirs", "named"), ("mine", "first")] and len(ids) == 2
    assert len(list(tmp_path.glob("wandb/offline-run-*"))) == 2


def test_without_an_api_key_only_offline_runs_begin(tmp_path, offline, monkeypatch):
    import wandb

    check_wandb()
    wandb.teardown()
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with pytest.raises(
        UserError, match="--report_to wandb: there is no API key; run `wandb login`"
    ):
        check_wandb()
