"""The health rule of agents."""

import pytest

from dschat_ppo.config.health_flags import PPOHealthFlags
from dschat_ppo.monitor.health import HealthWatch


@pytest.mark.parametrize(("share", "events"), [(0.51, ["agents_slow"]), (0.5, [])])
def test_agents_that_let_the_model_wait_are_reported(share, events):
    watch = HealthWatch(PPOHealthFlags())
    assert [each.name for each in watch.check(1, {"agent/idle_share": share})] == events
