"""Trackers are checked before anything is loaded; names and ids of their runs."""

import json
from types import SimpleNamespace

import pytest
from tracked_runs import tracking_in

from dschat_ppo.common import extras
from dschat_ppo.errors import UserError
from dschat_ppo.monitor import trackers
from dschat_ppo.monitor.trackers import RUN_IDS, Start, WandbTracker

INSTALLED = SimpleNamespace(origin="wandb/__init__.py")


@pytest.fixture
def begun(tmp_path, monkeypatch):
    """A function that begins a run with a stand-in for a library, and writes steps 2 to 5; the file of the ids of all
    runs; the steps that were sent."""
    sent = []

    def logged(data, step):
        sent.append(step)

    library = SimpleNamespace(init=lambda **named: SimpleNamespace(**named, log=logged), __name__="trackio")
    monkeypatch.setattr(trackers.importlib, "import_module", lambda name: library)
    tracking = tracking_in(tmp_path, "trackio")

    def begin(start=Start()):  # noqa: B008
        tracker = WandbTracker("trackio", tracking, start)
        for step in range(2, 6):
            tracker.write(step, {}, ())
        return tracker._run, json.loads((tracking.folder / RUN_IDS).read_text())

    return begin, tracking.folder / RUN_IDS, sent


def test_the_id_of_a_run_is_kept_beside_those_of_other_libraries_and_names_follow_from_the_folder(begun):
    begin, file, sent = begun
    file.write_text('{"wandb": "a"}')
    run, ids = begin()
    assert ids == {"wandb": "a", "trackio": run.name} and run.name.startswith("ppo-") and run.project == "addition"
    sent.clear()
    assert begin(Start(2, 3))[0].name == run.name, "a resumed run continues it"
    assert sent == [4, 5], "no step is sent twice"
    assert begin()[0].name != run.name


@pytest.mark.parametrize("library", ["wandb", "trackio"])
def test_a_missing_library_names_the_command_that_installs_it(monkeypatch, library):
    monkeypatch.setattr(extras, "find_spec", lambda name: None if name == library else INSTALLED)
    trackers.check_trackers(["tensorboard"])
    with pytest.raises(UserError) as raised:
        trackers.check_trackers(["tensorboard", library])
    said = str(raised.value)
    assert said.startswith(f"--report_to {library} needs the package {library}")
    assert said.endswith(f': pip install -e ".[{library}]"')
