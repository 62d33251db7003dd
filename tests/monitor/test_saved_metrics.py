"""Metric sums and `metrics.jsonl` continue from a checkpoint."""

import json

import torch

from dschat_ppo.monitor.metric_sums import MetricSums
from dschat_ppo.monitor.writers import MetricsWriter

CPU = torch.device("cpu")


def test_sums_of_several_ranks_become_those_of_one():
    parts = [MetricSums() for _ in range(3)]
    for number, part in enumerate(parts):
        part.add_mean("mean", torch.arange(number + 1.0))  # 0 | 0 1 | 0 1 2
        part.add_max("most", torch.tensor([number * (-1.0) ** number]))  # 0, -1, 2
    alone = MetricSums.restored([parts[1].state_dict()], CPU)
    assert alone.reduce() == {"mean": 0.5, "most": -1.0}
    together = MetricSums.restored([part.state_dict() for part in parts], CPU)
    assert together.reduce() == {"mean": 4 / 6, "most": 2.0}
    together.add_mean("mean", torch.tensor([10.0]))
    assert together.reduce()["mean"] == 14 / 7
    assert MetricSums.restored([], CPU).reduce() == {}


def test_a_rank_that_is_new_has_all_names_and_changes_no_value():
    saved = MetricSums()
    saved.add_mean("mean", torch.tensor([-2.0, -4.0]))
    saved.add_max("most", torch.tensor([-7.0]))
    new = MetricSums.restored([saved.state_dict()], CPU).emptied()
    assert new.reduce() == {"mean": 0.0, "most": 0.0}, "all names, nothing counted"
    both = MetricSums.restored([saved.state_dict(), new.state_dict()], CPU)
    assert both.reduce() == {"mean": -3.0, "most": -7.0}
    new.add_mean("mean", torch.tensor([5.0]))
    new.add_max("most", torch.tensor([-9.0]))
    assert new.reduce() == {"mean": 5.0, "most": -9.0}
    assert saved.reduce() == {"mean": -3.0, "most": -7.0}


def test_metrics_continue_after_the_lines_of_the_checkpoint(tmp_path):
    with MetricsWriter(tmp_path, None) as writer:
        writer.write(1, {"a": 1.0})
        offset = writer.saved_offset()
        writer.write(2, {"a": 2.0})
    with MetricsWriter(tmp_path, None, (offset, 2)) as writer:
        writer.write(2, {"a": 3.0})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 2 and '"step": 2' in lines[1] and '"a": 3.0' in lines[1]
    with MetricsWriter(tmp_path, None, (10**6, 2)) as writer:  # somebody has cut the file
        writer.write(3, {"a": 4.0})
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").open()] == [1, 2, 3]
    with MetricsWriter(tmp_path, None):
        assert (tmp_path / "metrics.jsonl").read_bytes() == b""
