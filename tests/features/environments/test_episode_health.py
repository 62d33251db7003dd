"""The health rule of episodes."""

import pytest

from dschat_ppo.config.health_flags import PPOHealthFlags
from dschat_ppo.monitor.health import HealthWatch


@pytest.mark.parametrize(("share", "events"), [(0.11, ["observations_invented"]), (0.1, [])])
def test_a_model_that_invents_observations_is_reported(share, events):
    found = HealthWatch(PPOHealthFlags()).check(1, {"episode/invented_observations": share})
    assert [each.name for each in found] == events
