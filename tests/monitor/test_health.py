"""The watch: what becomes an event, what is recorded, when the run stops, and its state in checkpoints."""

import json
import logging
from types import SimpleNamespace

import pytest
from health_steps import PPO_STEP, ppo_watch

from dschat_ppo.checkpoint.state_files import load_state, save_state
from dschat_ppo.common.logging import logger
from dschat_ppo.errors import StorageError

CLIPPED = {**PPO_STEP, "policy/clip_fraction": 0.5}
NEGATIVE = {**PPO_STEP, "kl/ref_k1": -0.5}  # an error


def lines(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "health.jsonl").read_text().splitlines()]


@pytest.fixture
def logged(caplog, monkeypatch):
    monkeypatch.setattr(logger(), "propagate", True)
    caplog.set_level(logging.INFO, "dschat_ppo")
    return caplog


def test_a_warning_that_persists_is_one_event_until_three_steps_without_it():
    shape = "cc.c..c...c"  # c: clipped
    watch = ppo_watch()
    found = [bool(watch.check(step, CLIPPED if mark == "c" else PPO_STEP)) for step, mark in enumerate(shape)]
    assert "".join("x" if fresh else "-" for fresh in found) == "x---------x"


def test_an_event_and_its_end_are_logged(logged):
    watch = ppo_watch()
    for step, metrics in enumerate([CLIPPED, PPO_STEP, PPO_STEP, PPO_STEP], 1):
        watch.check(step, metrics)
    first, last = [record.getMessage() for record in logged.records]
    assert (
        first.startswith("health: step 1: clip_fraction_high: policy/clip_fraction is 0.5") and "--ppo_epochs" in first
    )
    assert last == "health: step 4: clip_fraction_high is over"


def test_a_resumed_run_has_the_events_up_to_its_checkpoint(tmp_path):
    watch = ppo_watch()
    with pytest.raises(StorageError, match=r"health\.jsonl: cannot be written .*; free space"):
        watch.begin(tmp_path / "missing")
    watch.begin(tmp_path)
    assert lines(tmp_path) == []
    watch.check(1, CLIPPED)
    assert list(lines(tmp_path)[0]) == ["step", "name", "level", "seen", "cause", "change"]
    save_state(tmp_path / "state", watch.state_dict())
    watch.check(2, {**CLIPPED, "reward/score_std": 0.0})  # after the checkpoint: runs again
    assert len(lines(tmp_path)) == 2

    resumed = ppo_watch()
    resumed.load_state_dict(load_state(tmp_path / "state"))
    resumed.begin(tmp_path)
    assert [event["name"] for event in lines(tmp_path)] == ["clip_fraction_high"]
    [event] = resumed.check(2, {**CLIPPED, "reward/score_std": 0.0})
    assert event.name == "scores_equal"
    assert [event["step"] for event in lines(tmp_path)] == [1, 2]


@pytest.mark.parametrize(("stop", "metrics", "stops"), [
    ("off", NEGATIVE, None),
    ("error", CLIPPED, False),
    ("error", NEGATIVE, True),
    ("warning", NEGATIVE, True),
    ("warning", PPO_STEP, False),
])  # fmt: skip
def test_an_event_of_the_chosen_level_stops_the_run(stop, metrics, stops):
    watch, reasons = ppo_watch(stop_on_health=stop), []
    checkpointer = SimpleNamespace(stop_if=reasons.append)
    watch.check(7, metrics)
    watch.stop_if_due(checkpointer)
    assert [reason is not None for reason in reasons] == ([] if stops is None else [stops])
    if stops:
        assert reasons[0].startswith(f"--stop_on_health {stop}: step 7: {watch.events[0].name}: ")
    watch.check(8, metrics)  # resumed: it stands, and does not stop again
    watch.stop_if_due(checkpointer)
    assert reasons[1:] == ([] if stops is None else [None])
