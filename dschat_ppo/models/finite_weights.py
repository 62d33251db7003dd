"""Weights that are not finite are never saved: neither in a checkpoint nor as a model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dschat_ppo.common import dist
from dschat_ppo.errors import NonFiniteError
from dschat_ppo.types import Engine


def require_finite_weights(role: str, engine: Engine) -> None:
    """Look through all weights, each rank through those that it holds. Collective; to be called between two updates.

    No update is made from gradients that are not finite, but an update from finite ones can overflow. The weights that
    are looked at are those in the number format of training: an fp32 master weight that is not finite, or beyond what
    fp16 holds, makes them so.

    Args:
        role: of the model, for the message.
        engine: DeepSpeed engine around it; its weights are whole or divided by ZeRO-3.

    Raises:
        NonFiniteError: some rank has found a weight that is NaN or infinite; the same text on every rank.
    """
    bad = [name for name, weight in engine.module.named_parameters() if not _is_finite(_held(weight))]
    problem = None
    if bad:
        problem = f"rank {dist.rank()}: {bad[0]}" + (f" and {len(bad) - 1} more" if len(bad) > 1 else "")
    first = dist.first_problem(problem)
    if first is not None:
        raise NonFiniteError(
            f"{role}: weights are not finite ({first}): an update overflowed although its gradients were finite. They "
            "are not saved. Lower the learning rate or raise --adam_epsilon; --resume_force resumes from the newest "
            "checkpoint"
        )


def _is_finite(part: Tensor) -> bool:
    """Without a copy of it: the least and the largest number are NaN if any is."""
    return part.numel() == 0 or bool(torch.stack(torch.aminmax(part)).isfinite().all())


def _held(weight: Any) -> Tensor:
    """This rank's part of a parameter. ZeRO-3 fills the last partition up with whatever was in memory; not that."""
    if not hasattr(weight, "ds_id"):
        return weight.detach()
    part = weight.ds_tensor.detach().flatten()
    return part[: max(0, weight.ds_numel - dist.rank() * part.numel())]
