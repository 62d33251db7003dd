"""Long series as few points: the mean, minimum and maximum of each stretch of steps."""

from __future__ import annotations

from dataclasses import dataclass

from dschat_ppo.html_report.run_folder import Points

DIGITS = 4  # significant digits of a value in the page: more than a screen can show


@dataclass(frozen=True)
class Series:
    """A series as a figure draws it.

    Attributes:
        steps: step of each point, ascending: the last one of its stretch.
        means: mean of the finite values of the stretch; None if there is none, which interrupts the line.
        lows, highs: their minimum and maximum; None if no stretch has more than one step.
        gaps: steps of the points whose stretch has a value that is NaN or infinite.
    """

    steps: list[int]
    means: list[float | None]
    lows: list[float | None] | None
    highs: list[float | None] | None
    gaps: list[int]


def thin(points: Points, most: int) -> Series:
    """At most `most` points: the given points are split into `most` stretches of nearly equal size.

    Args:
        points: (step, value) in ascending steps; the value is None where it is NaN or infinite.
        most: number of points to keep, at least 1. No more points are returned as they are.
    """
    count = min(most, len(points))
    bounds = [number * len(points) // count for number in range(count + 1)] if count else [0]
    stretches = [points[start:end] for start, end in zip(bounds, bounds[1:], strict=False)]
    finite = [[value for _, value in stretch if value is not None] for stretch in stretches]
    thinned = len(points) > count
    return Series(
        steps=[stretch[-1][0] for stretch in stretches],
        means=[rounded(sum(values) / len(values)) if values else None for values in finite],
        lows=[rounded(min(values)) if values else None for values in finite] if thinned else None,
        highs=[rounded(max(values)) if values else None for values in finite] if thinned else None,
        gaps=[
            stretch[-1][0]
            for stretch, values in zip(stretches, finite, strict=True) if len(values) < len(stretch)
        ],
    )  # fmt: skip


def rounded(value: float) -> float | int:
    """The value with `DIGITS` significant digits; whole numbers below a million as an integer, unrounded."""
    if abs(value) < 1e6 and value == int(value):
        return int(value)
    return float(f"{value:.{DIGITS}g}")
