"""Which steps a run prints."""

import pytest
from command_lines import NEEDED, read

from dschat_ppo.config.cli import parse
from dschat_ppo.config.run_flags import ConsoleFlags


@pytest.mark.parametrize(("step", "every"), [("sft", 10), ("reward", 10), ("ppo", 1)])
def test_steps_1_and_2_print_every_tenth_step_and_step_3_every_one(step, every):
    assert (read(step)["logging_steps"], read(step)["verbose"]) == (every, False)
    assert parse(step, [*NEEDED[step], "--logging_steps", "3", "--verbose"]).console == ConsoleFlags(3, True)


def test_the_first_and_the_last_step_are_printed():
    flags = ConsoleFlags(logging_steps=4)
    assert [step for step in range(1, 11) if flags.prints(step, 10)] == [1, 4, 8, 10]
