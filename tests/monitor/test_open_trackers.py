"""Trackers are checked before anything is loaded."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from tracked_runs import tracking_in

from dschat_ppo.common import extras
from dschat_ppo.errors import UserError
from dschat_ppo.monitor import open_trackers
from dschat_ppo.monitor.tensorboard_tracker import TensorBoardTracker
from dschat_ppo.monitor.trackers import Start

INSTALLED = SimpleNamespace(origin="wandb/__init__.py")


@pytest.mark.parametrize("library", ["wandb", "mlflow", "trackio"])
def test_a_missing_library_names_the_command_that_installs_it(monkeypatch, library):
    monkeypatch.setattr(extras, "find_spec", lambda name: None if name == library else INSTALLED)
    monkeypatch.setattr(open_trackers, "_CHECKS", {})
    open_trackers.check_trackers(["tensorboard"])
    with pytest.raises(UserError) as raised:
        open_trackers.check_trackers(["tensorboard", library])
    said = str(raised.value)
    assert said.startswith(f"--report_to {library} needs the package {library}")
    assert said.endswith(f': pip install -e ".[{library}]"')


def test_a_folder_of_local_files_is_not_the_library(monkeypatch, tmp_path):
    (tmp_path / "some_tracker").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(extras.EXTRAS, "some_tracker", ("some-tracker", "-e ."))
    with pytest.raises(UserError, match="--report_to some_tracker needs the package some-tracker: pip install"):
        open_trackers.check_trackers(["some_tracker"])


def test_an_installed_library_is_asked_whether_it_can_begin_a_run(monkeypatch):
    def refuse():
        raise UserError("there is no key")

    monkeypatch.setattr(extras, "find_spec", lambda name: INSTALLED)
    monkeypatch.setattr(open_trackers, "_CHECKS", {"wandb": refuse})
    open_trackers.check_trackers(["trackio"])
    with pytest.raises(UserError, match="there is no key"):
        open_trackers.check_trackers(["wandb"])


def test_a_tracker_that_cannot_begin_closes_those_begun_before_it(monkeypatch, tmp_path):
    """Else an MLflow run would stay RUNNING."""
    closed = []

    class Begun:
        def __init__(self, tracking, start):
            pass

        def close(self, succeeded):
            closed.append(succeeded)

    def refuse(tracking, start):
        raise UserError("there is no server")

    monkeypatch.setattr(open_trackers, "_TRACKERS", {"mlflow": Begun, "wandb": refuse, "trackio": Begun})
    tracking = replace(tracking_in(tmp_path, "mlflow"), libraries=("mlflow", "wandb", "trackio"))
    with pytest.raises(UserError, match="there is no server"):
        open_trackers.open_trackers(tracking, Start())
    assert closed == [False]
    assert len(open_trackers.open_trackers(replace(tracking, libraries=("mlflow", "trackio")), Start())) == 2
    assert closed == [False], "trackers that begin stay open"


def test_a_tracker_that_cannot_be_closed_does_not_hide_why_the_run_ends(monkeypatch, tmp_path, said):
    closed = []

    class Begun:
        failures = (OSError,)

        def __init__(self, tracking, start):
            pass

        def close(self, succeeded):
            closed.append(succeeded)
            if len(closed) == 1:
                raise OSError("the network is down")

    def refuse(tracking, start):
        raise UserError("there is no server")

    monkeypatch.setattr(open_trackers, "_TRACKERS", {"mlflow": Begun, "trackio": Begun, "wandb": refuse})
    with pytest.raises(UserError, match="^there is no server$"):
        open_trackers.open_trackers(
            replace(tracking_in(tmp_path, "mlflow"), libraries=("mlflow", "trackio", "wandb")), Start()
        )
    assert closed == [False, False]
    assert said == ["Begun cannot be closed: the network is down"]


def test_the_libraries_that_the_flags_name_are_opened(tmp_path):
    [tracker] = open_trackers.open_trackers(tracking_in(tmp_path, "tensorboard"), Start())
    assert isinstance(tracker, TensorBoardTracker)
    tracker.close(succeeded=True)
