"""Flags of checkpoints and failures: ranges."""

import pytest
from command_lines import read

from dschat_ppo.errors import UserError


@pytest.mark.parametrize(
    ("step", "name", "value"),
    [
        ("sft", "collective_timeout", "0.9"),
        ("sft", "collective_timeout", "1e9"),
    ],
)
def test_values_out_of_range_are_refused(step, name, value):
    with pytest.raises(UserError, match=f"--{name}"):
        read(step, f"--{name}", value)
