"""The ways out that a message names for rows that are not read as they are."""

import re

import pytest
from form_fixtures import read

from dschat_ppo.errors import UserError


def ways_of(message: str) -> list[dict]:
    """The flags of each way out of a message, whatever the condition before them."""
    ways = []
    for part in message.split("; ")[1:]:
        match = re.search(r"(?:^|: )(--.*?)(?: reads .*)?$", part)
        if match is None or "FILE.py:FUNCTION" in part:
            continue
        flags: dict = {}
        for flag in match.group(1).removeprefix("--").split(" --"):
            name, *values = flag.split(" ")
            flags[name] = values if name == "ignore_columns" else values[0]
        ways.append(flags)
    return ways


def read_by_ways(rows: list[dict], use: str) -> list[list[tuple[str, list]]]:
    """For each way out of the message that refuses rows: the last message of the prompt and the
    answers, row by row, that it reads."""
    with pytest.raises(UserError) as caught:
        read(rows, use)
    found = []
    for flags in ways_of(str(caught.value)):
        examples = read(rows, use, **flags)
        found.append(
            [
                (
                    one.prompt if isinstance(one.prompt, str) else one.prompt[-1]["content"],
                    list(one.answers),
                )
                for one in examples
            ]
        )
    return found
