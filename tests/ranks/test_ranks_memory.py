"""Memory flags on real ranks: none changes a number, and each has its effect."""

import json

import numpy as np
import pytest
from launch import forked, succeed

pytestmark = [pytest.mark.ranks, pytest.mark.slow]


def reports(assets, folder, ranks: int) -> list[dict]:
    succeed(forked(ranks, "tests/workers/memory.py", assets, folder / "found"))
    return [json.loads((folder / f"found.{rank}").read_text()) for rank in range(ranks)]


@pytest.fixture(scope="module")
def found(assets, tmp_path_factory):
    """What each of two ranks reports."""
    return reports(assets, tmp_path_factory.mktemp("memory"), 2)


def near(one: dict, other: dict) -> None:
    assert one["answers"] == other["answers"]
    np.testing.assert_allclose(one["metrics"], other["metrics"], rtol=1e-4, atol=1e-6)


def test_the_second_step_depends_on_the_updates_of_the_first(found):
    for rank in found:
        answers = rank["stage 3"]["answers"]
        assert answers[0] != answers[1]
        assert min(rank["stage 3"]["metrics"][0][-2:]) > 1e-3
        near(rank["stage 3"], rank["stage 2"])
        assert rank["stage 3"]["partitioned"] == rank["tensor parallel"]["partitioned"] == 21, "all weights"


@pytest.mark.parametrize("stage", [2, 3])
def test_sleep_in_rollout_changes_no_bit(found, stage):
    for rank in found:
        assert rank[f"sleep {stage}"] == rank[f"stage {stage}"]


@pytest.mark.parametrize("how", ["offload_optimizer", "offload_reference and reward"])
def test_offload_changes_numbers_by_rounding_alone(found, how):
    for rank in found:
        near(rank[how], rank["stage 3"])


def test_a_second_copy_of_the_weights_changes_no_bit(assets, tmp_path):
    for rank in reports(assets, tmp_path, 4):  # two groups of two
        assert rank["hpZ"]["ranks of a copy"] == [2] and rank["stage 3"]["ranks of a copy"] == [4]
        assert rank["hpZ"]["answers"] == rank["stage 3"]["answers"]
        assert rank["hpZ"]["metrics"] == rank["stage 3"]["metrics"]


def test_divided_layers_compute_what_whole_layers_do_and_are_restored(found):
    for rank in found:
        assert len(rank["divided"]) == 7
        for name, report in rank["divided"].items():
            assert report["difference"] < 1e-4, name
            assert report["freed"] >= report["layers"] // 2 > 0, name
            assert report["restored"] and report["forwards"] == 0, name


def test_answers_and_updates_do_not_depend_on_tensor_parallel_generation(found):
    for rank in found:
        near(rank["tensor parallel"], rank["stage 3"])
