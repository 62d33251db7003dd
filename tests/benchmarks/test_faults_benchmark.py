"""The benchmark of faults, apart from its runs: which faults, what is lost, what is compared."""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import fault_outcomes  # noqa: E402
import faults  # noqa: E402

FIRST = """checkpoint step_000001: copied in 0.0 s, being written
checkpoint step_000001: saved, 0.9 MiB
checkpoint step_000002_update_0003: saved, 0.9 MiB
checkpoint step_000003: copied in 0.0 s, being written
"""


def test_forty_kills_of_a_seed_meet_every_run_at_every_moment():
    drawn = faults.kills(0, 40)
    names = [fault.name for fault in drawn]
    assert len(names) == 40 and names == [fault.name for fault in faults.kills(0, 40)]
    assert names != [fault.name for fault in faults.kills(1, 40)]
    assert {(fault.run, fault.moment) for fault in drawn} == {(r, m) for r in faults.RUNS for m in faults.MOMENTS}
    assert all(any(victim in name for name in names) for victim in ("rank 0", "rank 1", "launcher", "child of"))


@pytest.mark.parametrize(("resumed", "lost"), [(2, 0), (1, 1), (None, 2)])
def test_saved_steps_that_are_computed_again_are_lost(resumed, lost):
    again = "" if resumed is None else f"resuming from /out/checkpoints/step_{resumed:06d}: so many steps are done\n"
    assert fault_outcomes.lost_steps(FIRST, FIRST + again) == lost


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
