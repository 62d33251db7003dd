"""NaN diagnostics: which numbers of a record, which weights, gradients and module outputs are not finite."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dschat_ppo.types import tensors_of

# Fields that are not checked: a reward source of weight 0 may return anything, and what a loss uses of the recorded
# log-probs is in `old_logprobs` or in the weights of the importance correction. Rows without `old_logprobs` use them.
UNUSED = ("source_scores", "rollout_logprobs")


def bad_places(record: Any) -> dict[str, list[list[int]]]:
    """Field -> index ([row] or [row, token]) of each NaN or infinity in a dataclass of tensors. If it has a
    `response_mask` (B, R), fields of that shape are checked only where the mask is True."""
    unused = UNUSED if getattr(record, "old_logprobs", None) is not None else UNUSED[:1]
    values = {name: value for name, value in tensors_of(record).items() if name not in unused}
    mask = values.get("response_mask")
    bad: dict[str, Tensor] = {}
    for name, value in values.items():
        if value.is_floating_point():
            bad[name] = ~value.isfinite()
            if mask is not None and value.shape == mask.shape:
                bad[name] &= mask
    if not bad or not bool(torch.stack([places.any() for places in bad.values()]).any()):  # one read for all fields
        return {}
    found = {name: torch.nonzero(places).tolist() for name, places in bad.items()}
    return {name: places for name, places in found.items() if places}


def bad_weights(model: nn.Module) -> list[str]:
    """Names of the parameters that are not finite."""
    return [name for name, parameter in model.named_parameters() if not bool(parameter.isfinite().all())]


def bad_gradients(model: nn.Module) -> list[str]:
    """Names of the parameters whose gradients are not finite."""
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return [name for name, gradient in gradients.items() if not bool(gradient.isfinite().all())]


@contextmanager
def first_bad_output(model: nn.Module) -> Iterator[list[str]]:
    """Yields a list that receives a description of the first module output of `model` that is not finite."""
    found: list[str] = []

    def check(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        if not found and not _is_finite(output):
            state = "its inputs are finite" if _is_finite(inputs) else "so are its inputs"
            found.append(f"{name or 'the model'} ({type(module).__name__}; {state})")

    hooks = [module.register_forward_hook(partial(check, name)) for name, module in model.named_modules()]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _is_finite(value: Any) -> bool:
    """Whether every number is finite in a tensor, or in the tensors of nested tuples, lists and dicts."""
    tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return all(bool(tensor.isfinite().all()) for tensor in tensors)
