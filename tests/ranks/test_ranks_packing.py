"""`--packing` on two ranks: the same steps and the same bits as on one."""

import json

import pytest
from launch import forked, succeed
from one_rank import one_rank  # noqa: F401
from packed_runs import packed_run


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.usefixtures("one_rank")
def test_packed_training_has_the_same_bits_on_one_rank_and_on_two(tmp_path):
    succeed(forked(2, "tests/workers/packing.py", tmp_path / "two", tmp_path / "found.json"))
    two = json.loads((tmp_path / "found.json").read_text())
    for task in ("sft", "reward"):
        folder = tmp_path / task
        folder.mkdir()
        one = json.loads(json.dumps(packed_run(task, folder)))
        assert one == two[task]
        assert one["packed"] % 2 == 1, "the last step of an epoch has a rank with a filler alone"
        lines, by_source = one["lines"][1:], {"loss/even", "loss/odd"}
        assert all({"loss", "samples", "tokens", "grad_norm"} <= set(line) for line in lines)
        assert all(by_source & set(line) for line in lines), "a step without rows of a data set has no number for it"
        assert any(by_source <= set(line) for line in lines)
        assert one["lines"][1]["loss"] > one["lines"][-1]["loss"]
