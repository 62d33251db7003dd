"""What goes into a checkpoint beside the engines comes back as it was."""

import json

import torch
from datasets import Dataset
from test_group_pool import clipped, rows
from test_mini_dataset import experience

from dschat_ppo.checkpoint.run_identity import rows_fingerprint
from dschat_ppo.data.sampler import IndexStream
from dschat_ppo.monitor.health import HealthWatch
from dschat_ppo.monitor.metric_sums import MetricSums
from dschat_ppo.monitor.writers import MetricsWriter
from dschat_ppo.ppo.collect import ExperienceCollector
from dschat_ppo.ppo.group_pool import GroupPool
from dschat_ppo.ppo.state import PPOState

CPU = torch.device("cpu")


def test_a_stream_of_rows_goes_on_inside_and_across_epochs():
    whole = IndexStream(7, seed=3)
    expected = [whole.take(3) for _ in range(8)]
    for cut in range(8):
        before, after = IndexStream(7, seed=3), IndexStream(7, seed=3)
        first = [before.take(3) for _ in range(cut)]
        after.load_state_dict(before.state_dict())
        before.take(5)  # what is saved does not change with the stream
        assert after.taken == 3 * cut
        assert first + [after.take(3) for _ in range(8 - cut)] == expected


def test_groups_that_wait_come_back():
    pool, other = GroupPool(4, clipped), GroupPool(4, clipped)
    pool.add(rows([0, 0, 1, 1, 2, 2], [0.0, 1.0, 2.0, 1.0, 5.0, 3.0]))
    pool.take()
    other.load_state_dict(pool.state_dict(), CPU)
    assert other.missing == pool.missing == 2
    for kept in (pool, other):
        kept.add(rows([7, 7], [1.0, 0.0]))
    (mine, _), (theirs, _) = pool.take(), other.take()
    assert theirs.groups.tolist() == mine.groups.tolist() == [2, 2, 7, 7]
    assert theirs.scores.tolist() == [5.0, 3.0, 1.0, 0.0]
    other.load_state_dict(pool.state_dict(), CPU)
    assert other.missing == 4


def test_a_collector_goes_on_with_its_prompts_and_with_the_groups_if_any_wait():
    def collector(pool: GroupPool | None) -> ExperienceCollector:
        made = object.__new__(ExperienceCollector)
        made.stream, made.pool = IndexStream(7, seed=3), pool
        return made

    waiting = GroupPool(4, clipped)
    waiting.add(rows([0, 0, 1, 1, 2, 2], [0.0, 1.0, 2.0, 1.0, 5.0, 3.0]))
    waiting.take()
    for before, after, missing in ((waiting, GroupPool(4, clipped), 2), (None, GroupPool(4, clipped), 4)):
        saved, other = collector(before), collector(after)
        saved.stream.take(3)
        other.load_state_dict(saved.state_dict(), CPU)
        assert (other.stream.taken, other.pool.missing) == (3, missing)
        assert other.stream.take(9) == saved.stream.take(9)
    other = collector(None)
    other.load_state_dict(collector(waiting).state_dict(), CPU)
    assert other.pool is None


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


def test_a_warning_that_stands_is_not_given_again():
    metrics = {"reward/score_std": 0.0, "answers/count": 8, "answers/distinct_share": 1.0, "answers/ended_share": 1.0}
    watch, other = HealthWatch(), HealthWatch()
    assert len(watch.check(metrics)) == 1
    other.load_state_dict(watch.state_dict())
    assert other.check(metrics) == []
    assert other.check({**metrics, "reward/score_std": 1.0}) == []
    assert len(other.check(metrics)) == 1
    for _ in range(20):
        watch.check(metrics)
    assert len(watch.state_dict()["past"]) == 10


def test_a_step_in_flight_comes_back():
    progress = PPOState(steps=4, evaluated={"eval/score": 1.0}, first={"a": 1.0}, last={"a": 2.0})
    progress.begin_step(experience(range(3)), {"coef/kl": 0.5})
    progress.updates, progress.applied, progress.ended = 2, 1, True
    progress.sums.add_mean("loss", torch.tensor([3.0]))
    state, sums = progress.state_dict(), MetricSums.restored([progress.sums.state_dict()], CPU)
    other = PPOState()
    other.load_state_dict(state, sums, CPU)
    assert other.state_dict().keys() == state.keys()
    for name in ("steps", "updates", "applied", "ended", "metrics", "evaluated", "first", "last"):
        assert getattr(other, name) == getattr(progress, name), name
    assert other.sums.reduce() == {"loss": 3.0}
    assert other.experience is not None and other.experience.selected is None
    for name, value in state["experience"].items():
        assert torch.equal(getattr(other.experience, name), value), name
    progress.end_step({"a": 3.0})
    assert (progress.steps, progress.updates, progress.experience, progress.ended) == (5, 0, None, False)
    assert (progress.first, progress.last) == ({"a": 1.0}, {"a": 3.0})
    assert progress.applied == 0 and progress.metrics == progress.sums.reduce() == {}
    other.load_state_dict(progress.state_dict(), MetricSums(), CPU)
    assert other.experience is None


def test_metrics_go_on_after_the_lines_of_the_checkpoint(tmp_path):
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


def test_a_fingerprint_tells_rows_apart_however_they_are_stored(tmp_path):
    content = {"ids": [[1, 2], [3], []], "row": ["a", "b", "c"]}
    rows = Dataset.from_dict(content)
    expected = rows_fingerprint(rows)
    assert len(expected) == 64 and rows_fingerprint(Dataset.from_dict(content)) == expected
    rows.save_to_disk(str(tmp_path / "rows"), num_shards=2)
    assert rows_fingerprint(Dataset.load_from_disk(str(tmp_path / "rows"))) == expected
    assert rows_fingerprint(rows.select([0, 1, 2])) == expected
    assert rows_fingerprint(rows.select([2, 1, 0]).select([2, 1, 0])) == expected
    for other in ({**content, "ids": [[1, 2], [4], []]}, {**content, "ids": [[1], [2, 3], []]}):
        assert rows_fingerprint(Dataset.from_dict(other)) != expected
    assert rows_fingerprint(rows.select([1, 0, 2])) != expected
    assert rows_fingerprint(rows.select([0, 1])) != expected
