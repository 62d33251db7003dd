"""A calculator as a tool of the model, and the reward of a right sum."""

import re


def calculate(expression: str) -> int:
    """Add numbers.

    Args:
        expression: the sum, such as 12+7+30.
    """
    return sum(int(number) for number in expression.split("+"))


def right_sum(response: str, answer: str) -> bool:
    """Whether the episode ends with the right answer; a result of the tool alone is none."""
    said = re.search(r"The sum is (\d+)\.$", response.strip())
    return said is not None and said[1] == answer
