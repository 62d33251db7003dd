"""W&B runs in offline mode, read back from the files that `wandb sync` sends."""

import json
import struct

import pytest
from tracked_runs import ANSWERS, tracking_in

from dschat_ppo.errors import UserError
from dschat_ppo.monitor.trackers import RUN_IDS, Start, WandbTracker, check_wandb

wandb = pytest.importorskip("wandb")


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    for name in ("WANDB_PROJECT", "WANDB_NAME", "WANDB_RUN_ID", "WANDB_DIR", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_CONSOLE", "off")
    yield
    wandb.teardown()


def records_of(file) -> list:
    """The records of a `.wandb` file: 7 bytes, then LevelDB's log format, blocks of 32 KiB with parts of records."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, place, records, parts = file.read_bytes(), 7, [], b""
    while place < len(content):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        _, size, kind = struct.unpack_from("<IHB", content, place)
        parts += content[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # whole, last
            records.append(Record.FromString(parts))
            parts = b""
    return records


def starts_of(output) -> list[dict]:
    """For each start of the run in `output`: its record `run`, flags, exit codes, and history, step -> name -> value.

    W&B's process may still write the files when a run has finished.
    """
    wandb.teardown()
    found = []
    for file in output.glob("wandb/offline-run-*/*.wandb"):
        records, history = records_of(file), {}
        for record in records:
            if record.HasField("history"):
                items = {
                    item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item
                }
                history[record.history.step.num] = items
        run = next(record.run for record in records if record.HasField("run"))
        config = {item.key: json.loads(item.value_json) for item in run.config.update}
        exit_codes = [record.exit.exit_code for record in records if record.HasField("exit")]
        found.append({"run": run, "flags": config, "history": history, "exit": exit_codes})
    return sorted(found, key=lambda start: start["run"].start_time.ToNanoseconds())


def test_a_step_is_one_point_of_the_run(tmp_path):
    tracking = tracking_in(tmp_path, "wandb")
    tracker = WandbTracker("wandb", tracking, Start())
    tracker.write(1, {"reward/score_mean": 1.5, "kl/ref_k1": float("nan")}, ANSWERS)
    assert tracker._run.step == 2  # the step is sent, and not kept back until the next one: a killed run keeps it
    tracker.write(2, {"reward/score_mean": 2.5}, ())
    tracker.close(succeeded=False)
    [start] = starts_of(tracking.folder)
    assert (start["run"].project, start["run"].display_name) == ("addition", "ppo")
    assert json.loads((tracking.folder / RUN_IDS).read_text()) == {"wandb": start["run"].run_id}
    assert start["flags"]["learning_rate"] == 0.5 and start["flags"]["data_path"] == ["a", "b"]
    assert start["exit"] == [1]
    first, second = start["history"][1], start["history"][2]
    assert first["reward/score_mean"] == 1.5 and second["reward/score_mean"] == 2.5
    [table] = tracking.folder.glob("wandb/offline-run-*/files/media/table/samples/answers*.json")
    assert json.loads(table.read_text()) == {
        "columns": ["prompt", "answer", "score", "tokens"], "data": [["1 + 1 =", "2", 0.25, 3]],
    }  # fmt: skip


def test_flags_come_before_variables_and_variables_before_the_names_of_folders(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_PROJECT", "theirs")
    monkeypatch.setenv("WANDB_NAME", "named")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    for changes in ({}, {"project": "mine", "run_name": "first"}):
        WandbTracker("wandb", tracking_in(tmp_path, "wandb", **changes), Start()).close(succeeded=True)
    one, other = (start["run"] for start in starts_of(tmp_path))
    assert [(run.project, run.display_name) for run in (one, other)] == [("theirs", "named"), ("mine", "first")]
    assert one.run_id != other.run_id  # both from scratch


def test_without_an_api_key_only_offline_runs_begin(tmp_path, monkeypatch):
    check_wandb()
    wandb.teardown()
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with pytest.raises(UserError, match="--report_to wandb: there is no API key; run `wandb login`"):
        check_wandb()
