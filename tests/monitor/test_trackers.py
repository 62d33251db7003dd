"""Trackers are checked before anything is loaded; names and ids of their runs."""

import errno
import os
from types import SimpleNamespace

import pytest
from tracked_runs import tracking_in

from dschat_ppo.common import extras
from dschat_ppo.errors import StorageError, UserError
from dschat_ppo.monitor import trackers
from dschat_ppo.monitor.trackers import RUN_IDS, Start, TensorBoardTracker, save_run_id, saved_run_id

INSTALLED = SimpleNamespace(origin="wandb/__init__.py")


def test_ids_are_kept_for_each_library(tmp_path):
    assert saved_run_id(tmp_path, "wandb") is None
    save_run_id(tmp_path, "wandb", "a")
    save_run_id(tmp_path, "trackio", "b")
    save_run_id(tmp_path, "wandb", "c")
    assert [saved_run_id(tmp_path, name) for name in ("wandb", "trackio", "other")] == ["c", "b", None]
    assert [path.name for path in tmp_path.iterdir()] == [RUN_IDS]


@pytest.mark.parametrize("content", ["", "{", "[]"])
def test_a_damaged_file_has_no_ids_and_is_replaced(tmp_path, content):
    (tmp_path / RUN_IDS).write_text(content)
    assert saved_run_id(tmp_path, "wandb") is None
    save_run_id(tmp_path, "wandb", "a")
    assert saved_run_id(tmp_path, "wandb") == "a"


def test_ids_that_cannot_be_written_are_a_storage_error(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(trackers, "write_file", refuse)
    with pytest.raises(StorageError, match=r"trackers\.json: cannot be written \(No space left on device\)"):
        save_run_id(tmp_path, "wandb", "a")


def test_names_follow_from_the_output_folder(tmp_path):
    tracking = tracking_in(tmp_path, "wandb")
    assert (tracking.default_project, tracking.default_run_name) == ("addition", "ppo")


@pytest.mark.parametrize("library", ["wandb", "trackio"])
def test_a_missing_library_names_the_command_that_installs_it(monkeypatch, library):
    monkeypatch.setattr(extras, "find_spec", lambda name: None if name == library else INSTALLED)
    trackers.check_trackers(["tensorboard"])
    with pytest.raises(UserError) as raised:
        trackers.check_trackers(["tensorboard", library])
    said = str(raised.value)
    assert said.startswith(f"--report_to {library} needs the package {library}")
    assert said.endswith(f': pip install -e ".[{library}]"')


def test_a_folder_of_local_files_is_not_the_library(monkeypatch, tmp_path):
    (tmp_path / "some_tracker").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(extras.EXTRAS, "some_tracker", ("some-tracker", "-e ."))
    with pytest.raises(UserError, match="--report_to some_tracker needs the package some-tracker: pip install"):
        trackers.check_trackers(["some_tracker"])


def test_an_installed_library_is_asked_whether_it_can_begin_a_run(monkeypatch):
    def refuse():
        raise UserError("there is no key")

    monkeypatch.setattr(extras, "find_spec", lambda name: INSTALLED)
    monkeypatch.setattr(trackers, "check_wandb", refuse)
    trackers.check_trackers(["trackio"])
    with pytest.raises(UserError, match="there is no key"):
        trackers.check_trackers(["wandb"])


def test_the_libraries_that_the_flags_name_are_opened(tmp_path):
    [tracker] = trackers.open_trackers(tracking_in(tmp_path, "tensorboard"), Start())
    assert isinstance(tracker, TensorBoardTracker)
    tracker.close(succeeded=True)
