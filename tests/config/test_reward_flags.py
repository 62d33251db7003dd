"""Flags of the reward sources: ranges and combinations that are refused."""

import pytest
from command_lines import read

from dschat_ppo.errors import UserError


@pytest.mark.parametrize(
    ("step", "name", "value"),
    [
        ("ppo", "reward_workers", "1025"),
        ("ppo", "reward_timeout", "1e7"),
        ("ppo", "remote_reward_timeout", "1e7"),
    ],
)
def test_values_out_of_range_are_refused(step, name, value):
    with pytest.raises(UserError, match=f"--{name}"):
        read(step, f"--{name}", value)
