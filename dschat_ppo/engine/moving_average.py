"""An exponential moving average of an engine's weights, each rank holding what it holds of the weights themselves."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dschat_ppo.common import dist


class MovingAverage:
    """`average = decay * average + (1 - decay) * weights` after each update, in fp32 in host memory (Polyak averaging).

    Under ZeRO-3 a rank averages its partition of each tensor, else the whole tensor.

    Args:
        model: whose parameters are averaged; the average starts from them as they are.
        decay: at least 0, below 1.
    """

    def __init__(self, model: nn.Module, decay: float):
        self._decay = decay
        self._parameters: dict[str, Any] = dict(model.named_parameters())
        self._parts = dict[str, Tensor]()
        self.begin()

    def begin(self) -> None:
        """Let the average be the weights as they are now."""
        self._parts = {name: _held(weight).float().cpu().clone() for name, weight in self._parameters.items()}

    @torch.no_grad()
    def update(self) -> None:
        """After an optimizer step."""
        for name, part in self._parts.items():
            part.lerp_(_held(self._parameters[name]).float().cpu(), 1 - self._decay)

    def gathered(self) -> dict[str, Tensor]:
        """The whole average of each tensor in the dtype of its weights, on rank 0; {} elsewhere. Collective."""
        whole = {}
        for name, part in self._parts.items():
            weight = self._parameters[name]
            flat = part
            if _is_partitioned(weight):
                flat = dist.gather_cat(part.to(dist.device())).cpu()
            if dist.is_main():
                whole[name] = flat.flatten()[: _numel(weight)].view(_shape(weight)).to(weight.dtype)
        return whole

    def state_dict(self) -> dict[str, Tensor]:
        """This rank's parts."""
        return dict(self._parts)

    def load_state_dicts(self, ranks: list[dict[str, Tensor]]) -> None:
        """Go on from the parts of all ranks of the saved run, however many they were and however they were divided."""
        for name, weight in self._parameters.items():
            parts, numel = [state[name].flatten() for state in ranks], _numel(weight)
            flat = parts[0] if len(parts[0]) >= numel else torch.cat(parts)
            whole = flat[:numel]
            mine = self._parts[name]
            if _is_partitioned(weight):
                size = mine.numel()
                piece = whole[dist.rank() * size : (dist.rank() + 1) * size]
                mine.zero_().flatten()[: len(piece)] = piece  # what fills up the last rank's partition is of no meaning
            else:
                mine.copy_(whole.view_as(mine))


def _is_partitioned(weight: Any) -> bool:
    return hasattr(weight, "ds_id")


def _held(weight: Any) -> Tensor:
    """What this rank keeps of a parameter between two steps."""
    return weight.ds_tensor.detach() if _is_partitioned(weight) else weight.detach()


def _numel(weight: Any) -> int:
    return int(weight.ds_numel if _is_partitioned(weight) else weight.numel())


def _shape(weight: Any) -> torch.Size:
    return torch.Size(weight.ds_shape if _is_partitioned(weight) else weight.shape)
