"""Learning rate schedules: the factor of the peak rate at each optimizer step. The formulas and their names are those
of `transformers.get_scheduler`, whose import also loads peft."""

from __future__ import annotations

from math import cos, pi


def rate_factor(
    step: int, kind: str, warmup: int, total: int, least: float = 0.0, peak: float = 1.0, last: float = 0.0
) -> float:
    """The learning rate of an optimizer step (counted from 0), as a factor of its peak.

    The factor rises from 0 to 1 over `warmup` steps. From there `kind` brings it down to `least` at step `total`:
    "linear", "cosine", "cosine_with_restarts" (one cycle, which ends at the lowest factor) or "polynomial" (of power 1,
    from `peak` to `last` in place of `least`; `total` at least `warmup` + 1). It stays 1 with "constant_with_warmup",
    and with "constant", which has no warm-up.
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
    else:
        shape = (1 + cos(pi * progress)) / 2 if progress < 1 else 0.0
    return least + (1 - least) * shape
