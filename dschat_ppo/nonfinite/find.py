"""Which numbers of a record are not finite."""

from __future__ import annotations

from typing import Any

import torch

from dschat_ppo.types import tensors_of

# A source of weight 0 may give anything; of what was recorded while sampling, `old_logprobs` or the weights of the
# importance correction hold what is used.
UNUSED = ("source_scores", "rollout_logprobs")


def bad_places(record: Any) -> dict[str, list[list[int]]]:
    """Field -> index ([row] or [row, token]) of each number that is not finite; {} where all are.

    Args:
        record: a dataclass of tensors. Where it has a `response_mask` (B, R), only what stands inside it counts.
    """
    values = {name: value for name, value in tensors_of(record).items() if name not in UNUSED}
    mask = values.get("response_mask")
    found = {}
    for name, value in values.items():
        if value.is_floating_point():
            bad = ~value.isfinite()
            if mask is not None and value.shape == mask.shape:
                bad &= mask
            if bool(bad.any()):
                found[name] = torch.nonzero(bad).tolist()
    return found
