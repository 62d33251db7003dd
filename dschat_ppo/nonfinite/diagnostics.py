"""NaN diagnostics: which numbers of a record, which weights, gradients and module outputs are not finite."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

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
    pairs = [(name, parameter.grad) for name, parameter in model.named_parameters()]
    return [name for name, gradient in pairs if gradient is not None and not bool(gradient.isfinite().all())]


class FirstBadOutput:
    """Watches the outputs of a model's modules; `first` describes the first one that is not finite, or is None."""

    def __init__(self, model: nn.Module):
        self.first: str | None = None
        self._model = model
        self._hooks: list[Any] = []

    def __enter__(self) -> FirstBadOutput:
        for name, module in self._model.named_modules():

            def check(module: nn.Module, inputs: Any, output: Any, name: str = name) -> None:
                if self.first is None and not _is_finite(output):
                    state = "its inputs are finite" if _is_finite(inputs) else "so are its inputs"
                    self.first = f"{name or 'the model'} ({type(module).__name__}; {state})"

            self._hooks.append(module.register_forward_hook(check))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for hook in self._hooks:
            hook.remove()


def _is_finite(value: Any) -> bool:
    """Whether every number is finite in a tensor, or in the tensors of nested tuples, lists and dicts."""
    if isinstance(value, Tensor):
        return not value.is_floating_point() or bool(value.isfinite().all())
    if isinstance(value, tuple | list):
        return all(_is_finite(part) for part in value)
    return all(_is_finite(part) for part in value.values()) if isinstance(value, dict) else True
