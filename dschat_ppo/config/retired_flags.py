"""The flags that left: what to use in place of each, and what a configuration of an earlier version means now."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

# Flag without dashes -> one line that says what to use. Giving such a flag is refused with "--flag: " and this line.
RETIRED: dict[str, str] = {
    "rollout_graphs": "left: a GPU always replays decode steps as graphs; --unpin_actor_parameters runs without them",
}

# Of these, the flags that decided what a run computes -> the value that every run has now: a checkpoint that was saved
# under another value is not resumed without --resume_force.
NOW_FIXED: dict[str, Any] = {}


def note_on_retired(names: Iterable[str]) -> str | None:
    """The note about a configuration that an earlier version saved, which holds flags that left; None if it has none.

    `names`: its flags, without dashes.
    """
    left = [f"--{name}" for name in names if name in RETIRED]
    return f"flags that this version does not have are ignored: {', '.join(left)}" if left else None
