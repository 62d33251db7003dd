"""The length limit: what is cut from a row that is too long, and the lengths of a data set for the log."""

from __future__ import annotations

from dataclasses import replace
from enum import IntEnum

import numpy as np

from dschat_ppo.data.encode import EncodedExample

_RAMP, _BINS = " .:-=+*#%@", 32  # of the text histogram, from few rows to many


class Fitted(IntEnum):
    """What the length limit did to a row; stored in one byte per row."""

    WHOLE = 0
    PROMPT_CUT = 1
    ANSWER_CUT = 2
    DROPPED = 3
    UNUSABLE = 4  # a bad row, which has no tokens


FITTED_NAMES = {
    Fitted.WHOLE: "kept whole",
    Fitted.PROMPT_CUT: "prompt cut",
    Fitted.ANSWER_CUT: "answer cut",
    Fitted.DROPPED: "left out",
}


def fit_row(row: EncodedExample, limit: int, policy: str) -> tuple[EncodedExample, Fitted]:
    """Apply the length limit to prompt + longest answer of one row.

    Args:
        row: token ids (no answers for PPO prompts).
        limit: most tokens.
        policy: see `--truncation`. "left", "right" and "middle" cut the start, the end or the middle of the prompt, but
            keep one token of it; only then do they cut answers at their end. No answer becomes empty. "drop" and
            "error" cut nothing.

    Returns:
        (the row, what was done). `prompt_spans` mark the same tokens as before, without those that were cut.
    """
    longest = max((len(answer) for answer in row.answers), default=0)
    count = len(row.prompt)
    if count + longest <= limit:
        return row, Fitted.WHOLE
    if policy in ("drop", "error"):
        return row, Fitted.DROPPED
    kept = min(count, max(1, limit - longest))
    head = {"left": 0, "right": kept, "middle": kept // 2}[policy]  # tokens kept before the cut
    tail = count - (kept - head)  # first token kept after it
    room_for_answer = max(1, limit - kept)
    spans = [(_moved(start, head, tail), _moved(end, head, tail)) for start, end in row.prompt_spans]
    fitted = replace(
        row,
        prompt=row.prompt[:head] + row.prompt[tail:],
        answers=[answer[:room_for_answer] for answer in row.answers],
        prompt_spans=[(start, end) for start, end in spans if start < end],
    )
    return fitted, Fitted.ANSWER_CUT if longest > room_for_answer else Fitted.PROMPT_CUT


def _moved(place: int, head: int, tail: int) -> int:
    """Where a boundary between tokens lies after the tokens `head .. tail - 1` are cut."""
    return min(place, head) + max(0, place - tail)


def describe_lengths(lengths: np.ndarray) -> str:
    """Percentiles and a histogram of (N,) token counts, N at least 1, in one line.

    The histogram has equal steps from 0 to the longest row; a denser character stands for more rows, and any row shows.
    """
    low, median, high, highest, most = (
        int(value) for value in np.percentile(lengths, [0, 50, 90, 99, 100], method="inverted_cdf")
    )
    counts, _ = np.histogram(lengths, bins=_BINS, range=(0, max(1, most)))
    heights = np.ceil(counts / counts.max() * (len(_RAMP) - 1)).astype(int)
    bars = "".join(_RAMP[height] for height in heights)
    return f"min {low}, median {median}, 90% {high}, 99% {highest}, max {most}  0 [{bars}] {most}"


def describe_counts(fitted: np.ndarray) -> str:
    """How many rows the length limit kept, cut and left out; `fitted` are (N,) values of `Fitted`."""
    counts = ((int((fitted == code).sum()), name) for code, name in FITTED_NAMES.items())
    return ", ".join(f"{count} {name}" for count, name in counts if count)
