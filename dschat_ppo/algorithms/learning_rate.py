"""Learning rate schedules: the factor of the peak rate at each optimizer step.

The formulas and their names are those of `transformers.get_scheduler`, whose import also loads peft.
"""

from __future__ import annotations

from math import cos, pi


def rate_factor(
    step: int, kind: str, warmup: int, total: int, least: float = 0.0, peak: float = 1.0, last: float = 0.0
) -> float:
    """The learning rate of an optimizer step, as a factor of its peak.

    Args:
        step: number of optimizer steps before it.
        kind: "linear", "cosine", "cosine_with_restarts" (one cycle, which ends at the lowest factor), "polynomial" (of
            power 1), "constant_with_warmup", or "constant", which has no warm-up.
        warmup: optimizer steps over which the factor rises linearly from 0 to 1.
        total: optimizer steps of the run; for "polynomial" at least `warmup` + 1.
        least: lowest factor after the warm-up, in [0, 1); "polynomial" and constant kinds ignore it.
        peak, last: peak rate, and the rate at which "polynomial" ends.

    Raises:
        ValueError: there is no such kind.
    """
    if kind == "constant":
        return 1.0
    if step < warmup:
        return step / warmup
    progress = (step - warmup) / max(1, total - warmup)  # above 1 after the run
    if kind == "constant_with_warmup":
        return 1.0
    if kind == "polynomial":
        return ((peak - last) * max(0.0, 1 - progress) + last) / peak
    if kind == "linear":
        shape = max(0.0, (total - step) / max(1, total - warmup))
    elif kind == "cosine":
        shape = (1 + cos(pi * progress)) / 2
    elif kind == "cosine_with_restarts":
        shape = (1 + cos(pi * progress)) / 2 if progress < 1 else 0.0
    else:
        raise ValueError(f"there is no learning rate schedule {kind!r}")
    return least + (1 - least) * shape
