"""Which engines sleep in a rollout."""

import pytest
from command_lines import config_of
from one_rank import one_rank  # noqa: F401
from role_engines import engines_of

from dschat_ppo.features.sleep.generation import generation_change

pytestmark = pytest.mark.usefixtures("one_rank")


def test_all_engines_sleep_with_the_flag_and_none_without(assets):
    engines = engines_of(assets, "--sleep_in_rollout")
    change = generation_change(config_of("ppo", "--sleep_in_rollout"), engines)
    models = [engines.actor, engines.reference, engines.critic, engines.reward]
    assert change.around.__self__.sleeping == models and change.originals_on_host
    assert len(engines.hybrid.around) == 1
    assert generation_change(config_of("ppo"), engines) is None
