"""Names and ids of the runs in trackers."""

import errno
import os

import pytest
from tracked_runs import tracking_in

from dschat_ppo.errors import StorageError
from dschat_ppo.monitor import trackers
from dschat_ppo.monitor.trackers import RUN_IDS, save_run_id, saved_run_id


def test_ids_are_kept_for_each_library(tmp_path):
    assert saved_run_id(tmp_path, "wandb") is None
    save_run_id(tmp_path, "wandb", "a")
    save_run_id(tmp_path, "mlflow", "b")
    save_run_id(tmp_path, "wandb", "c")
    assert [saved_run_id(tmp_path, name) for name in ("wandb", "mlflow", "trackio")] == ["c", "b", None]
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
