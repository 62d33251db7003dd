"""The health rules of judges."""

import pytest

from dschat_ppo.config.health_flags import PPOHealthFlags
from dschat_ppo.monitor.health import HealthWatch


@pytest.mark.parametrize(
    ("metric", "value", "event"),
    [
        ("judge/my-judge/unscored_share", 0.11, "judge_silent"),
        ("judge/my-judge/unscored_share", 0.1, None),
        ("judge/J_2/flip_share", 0.6, "judge_flips"),
        ("judge/J_2/flip_share", 0.5, None),
        ("judge/J_2/asked", 9.0, None),
    ],
)
def test_a_judge_that_says_nothing_or_sees_the_place_is_reported(metric, value, event):
    watch = HealthWatch(PPOHealthFlags())
    events = watch.check(1, {metric: value})
    assert [each.name for each in events] == ([event] if event else [])
