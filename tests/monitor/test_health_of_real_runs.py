"""No rule fires on healthy runs: the metrics of `quickstart.sh` and `run_grpo_addition.sh`, rounded to three digits."""

import json
from pathlib import Path

import pytest

from dschat_ppo.config.health_flags import FitHealthFlags, PPOHealthFlags
from dschat_ppo.monitor.health import HealthWatch

RUNS = json.loads((Path(__file__).parent / "healthy_runs.json").read_text())


def watched(columns: dict[str, list[float | None]]) -> list[str]:
    """The events of a run, as text."""
    is_ppo = "reward/score_mean" in columns
    watch = HealthWatch(PPOHealthFlags() if is_ppo else FitHealthFlags())
    for number in range(len(next(iter(columns.values())))):
        step = {name: values[number] for name, values in columns.items() if values[number] is not None}
        watch.check(number + 1, step)
    return [f"step {event.step}: {event.name}: {event.seen}" for event in watch.events]


@pytest.mark.parametrize("run", RUNS)
def test_a_healthy_run_has_no_events(run):
    assert watched(RUNS[run]) == []
