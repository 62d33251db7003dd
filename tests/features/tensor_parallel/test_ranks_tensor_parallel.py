"""Layers divided over two real ranks."""

import json

import numpy as np
import pytest
from launch import forked, succeed

pytestmark = [pytest.mark.ranks, pytest.mark.slow]


@pytest.fixture(scope="module")
def found(assets, tmp_path_factory):
    """What each of the two ranks reports."""
    folder = tmp_path_factory.mktemp("divided")
    (assets / "partition_all.json").write_text(
        '{"zero_optimization": {"stage3_param_persistence_threshold": 0}}'
    )
    script = "tests/features/tensor_parallel/divided_ranks.py"
    succeed(forked(2, script, assets, folder / "out", timeout=600))
    return [json.loads((folder / f"out.{rank}").read_text()) for rank in range(2)]


def test_answers_and_updates_differ_by_rounding_alone(found):
    for rank in found:
        whole, divided = rank["whole"], rank["divided"]
        assert divided["partitioned"] == whole["partitioned"] == 21, "all"
        assert whole["answers"][0] != whole["answers"][1]
        assert divided["answers"] == whole["answers"]
        np.testing.assert_allclose(divided["metrics"], whole["metrics"], rtol=1e-4, atol=1e-6)


def test_divided_layers_compute_what_whole_layers_do_and_are_restored(found):
    for rank in found:
        assert len(rank["models"]) == 7
        for name, report in rank["models"].items():
            assert report["difference"] < 1e-4 and report["freed"] >= 0.5 and report["restored"], (
                name
            )
