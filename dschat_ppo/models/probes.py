"""Errors of probes, which try a faster way to run a model: whatever the model raises there, it runs the slower way."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dschat_ppo.common.dist import all_reduce
from dschat_ppo.common.exit_codes import ran_out_of_memory
from dschat_ppo.errors import Attempt, NonFiniteError, RolloutCancelled, StopRequested, UserError, in_one_line

# Of the user, of the run, of other ranks and of the device, which stays broken.
_OTHERS = (
    UserError, NonFiniteError, StopRequested, RolloutCancelled, torch.distributed.DistError, torch.AcceleratorError,
)  # fmt: skip

# Arguments of transformers' attention functions that no attention of this project has, and what they are.
_FOREIGN = {
    "attention_mask": "a mask of its own", "position_bias": "a bias", "sinks": "sinks", "indices": "chosen keys",
    "block_indices": "chosen keys",
}  # fmt: skip


class UnsupportedAttentionError(Exception):
    """The model's attention needs something that an attention function of this project does not have."""


def check_attention_call(module: Any, attention_mask: Tensor | None, options: dict[str, Any]) -> None:
    """Refuse a call of attention with what would be ignored: a mask, a bias, ... even if its numbers are 0."""
    given = {**options, "attention_mask": attention_mask}
    for name, what in _FOREIGN.items():
        if given.get(name) is not None:
            raise UnsupportedAttentionError(f"{type(module).__name__} needs {what}")


def unfit(tried: Attempt) -> str:
    """Why a model does not fit the way that was tried, in one line, or "". Models raise almost anything there. The
    exception itself is raised if no other way would help: memory, the device or another rank failed."""
    problem = tried.problem
    if problem is None:
        return ""
    if isinstance(problem, _OTHERS) or ran_out_of_memory(problem):
        raise problem
    problem.__traceback__ = None  # its frames hold tensors
    if isinstance(problem, UnsupportedAttentionError):
        return str(problem)
    return f"it ends with {type(problem).__name__} ({in_one_line(problem)})"


def of_any_rank(reason: str, device: torch.device) -> str:
    """`reason` of this rank; else that others have one; else "". Collective, so that all make the same passes."""
    found = all_reduce(torch.tensor(float(bool(reason)), device=device), "max") > 0
    return reason or ("another rank cannot run it" if found else "")
