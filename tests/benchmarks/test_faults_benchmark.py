"""The benchmark of faults, apart from its runs: which faults, what counts as survived, what is compared."""

import json
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from launch import forked
from safetensors.torch import save_file

from dschat_ppo.common.atomic_files import write_file

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import fault_kinds  # noqa: E402
import faults  # noqa: E402
import faulty_main  # noqa: E402
import power_loss  # noqa: E402

LOG = """checkpoint step_000001: copied in 0.0 s, being written
checkpoint step_000001: saved, 0.9 MiB
checkpoint step_000002_update_0003: saved, 0.9 MiB
checkpoint step_000003: copied in 0.0 s, being written
"""


def test_twenty_kills_are_drawn_from_a_seed_and_with_the_others_hit_every_place(monkeypatch):
    monkeypatch.setattr(fault_kinds, "may_mount", lambda: True)
    places = {fault.inject.get("place") for fault in faults.others() if fault.inject.get("act") == "kill"}
    drawn = faults.kills(0, 20)
    assert len({fault.name for fault in drawn}) == 20
    assert [fault.inject for fault in drawn] == [fault.inject for fault in faults.kills(0, 20)]
    assert [fault.inject for fault in drawn] != [fault.inject for fault in faults.kills(1, 20)]
    assert {fault.inject["place"] for fault in drawn} | places == set(faulty_main.PLACES)
    assert {fault.inject["rank"] for fault in drawn} == {0, 1}


@pytest.mark.parametrize("code", [0, 5])
@pytest.mark.parametrize(("finished", "resumed", "lost"), [(False, 2, 0), (False, 1, 1), (False, 0, 2), (True, 0, 0)])
def test_steps_are_lost_whatever_code_an_unfinished_run_gives(tmp_path, monkeypatch, code, finished, resumed, lost):
    starts = []

    def start(self, inject, output):
        starts.append(inject)
        output.mkdir(exist_ok=True)
        log = (
            LOG
            if inject
            else f"resuming from /out/checkpoints/step_{resumed:06d}: so many steps are done\n" * bool(resumed)
        )
        with self.log_of(output).open("a") as file:
            file.write(log)
        if finished:
            (output / "result.json").write_text("{}")
        return SimpleNamespace(wait=lambda: code if inject else 0)

    monkeypatch.setattr(faults, "make_models", lambda folder: None)
    monkeypatch.setattr(faults.Bench, "start", start)
    monkeypatch.setattr(faults, "same_outputs", lambda one, other: True)
    outcome = faults.Bench(tmp_path).meet(faults.Fault("f", {"place": "x"}, silent=True))
    assert starts == [{"place": "x"}, {}]
    assert (outcome.code, outcome.steps_lost, outcome.met) == (code, lost, code != 0 or not finished)
    assert outcome.survived is (outcome.met and lost == 0)


def outputs(folder: Path, loss: float, weight: float) -> Path:
    for role in ("actor", "critic"):
        (folder / role).mkdir(parents=True)
        save_file({"w": torch.tensor([weight])}, folder / role / "model.safetensors")
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 1, "time": torch.rand(1).item(), "loss": loss}) + "\n")
    return folder


def test_outputs_are_equal_in_metrics_and_weights_but_not_in_times(tmp_path):
    one = outputs(tmp_path / "one", 0.5, 1.0)
    assert faults.same_outputs(one, outputs(tmp_path / "same", 0.5, 1.0))
    assert not faults.same_outputs(one, outputs(tmp_path / "loss", 0.6, 1.0))
    assert not faults.same_outputs(one, outputs(tmp_path / "weight", 0.5, 1.0 + 2**-23))


def test_a_fault_comes_at_its_call_and_not_before(monkeypatch):
    calls = []
    monkeypatch.setattr(faulty_main.loop, "update", lambda ppo, minibatch, step: calls.append(minibatch))
    faulty_main.break_at("update", 3, "raise")
    broken = faulty_main.loop.update
    broken(None, 1, 1), broken(None, 2, 1)
    with pytest.raises(RuntimeError, match="injected"):
        broken(None, 3, 1)
    broken(None, 4, 1)
    assert calls == [1, 2, 4]


def test_every_place_of_a_fault_exists():
    for holder, name in faulty_main.PLACES.values():
        assert callable(getattr(holder, name))


def test_a_cut_takes_what_is_not_synced_and_nothing_else(tmp_path):
    if not power_loss.may_cut():
        pytest.skip("file systems cannot be mounted and shut down here")
    disk = power_loss.Disk(tmp_path / "image", tmp_path / "disk", "data=ordered")
    try:
        write_file(disk.place / "synced", b"x" * 9000)
        (disk.place / "not_synced").write_bytes(b"x" * 9000)
        disk.cut()
        disk.unmount()
        disk.mount()
        left = disk.content()
    finally:
        disk.unmount()
    assert left.pop(str(disk.place / "synced")) == b"x" * 9000
    assert left.get(str(disk.place / "not_synced"), b"") == b""


@pytest.mark.ranks
@pytest.mark.slow
def test_one_of_the_faults_with_real_ranks(tmp_path, monkeypatch):
    """In two steps in place of four, by forked ranks. The others are for `python benchmarks/faults.py`."""

    def started(bench, words, settings, log):
        ended = forked(2, *words, env=settings)
        with log.open("a") as file:
            file.write(ended.stdout + ended.stderr)
        return SimpleNamespace(wait=lambda: ended.returncode)

    monkeypatch.setattr(faults.Bench, "_launch", started)
    monkeypatch.setattr(faults, "FLAGS", f"{faults.FLAGS} --test_stop_step 2")
    bench = faults.Bench(tmp_path)
    bench.run_whole()
    outcome = bench.meet(faults.Fault("killed", {"rank": 1, "place": "saving", "count": 5, "act": "kill"}))
    assert outcome.survived, outcome
    assert outcome.code == 256 - signal.SIGKILL, outcome
