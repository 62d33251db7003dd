"""Sleep on two real ranks."""

import json

import pytest
from launch import forked, succeed

pytestmark = [pytest.mark.ranks, pytest.mark.slow]


def test_generating_in_between_and_sleep_change_no_bit(assets, tmp_path):
    (assets / "partition_all.json").write_text(
        '{"zero_optimization": {"stage3_param_persistence_threshold": 0}}'
    )
    out = tmp_path / "out"
    succeed(forked(2, "tests/features/sleep/sleep_ranks.py", assets, out, timeout=600))
    for rank in range(2):
        found = json.loads((tmp_path / f"out.{rank}").read_text())
        for stage in (2, 3):
            assert found[f"asleep {stage}"] == found[f"awake {stage}"]
