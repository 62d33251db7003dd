"""An exponential moving average of an engine's weights, held once over all ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from dschat_ppo.common import dist


class MovingAverage:
    """`average = decay * average + (1 - decay) * weights` after each update, in fp32 in host memory (Polyak averaging).

    Under ZeRO-3 a rank averages its partition of each tensor; else rank 0 averages the whole tensors, and the others
    hold nothing.

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
        kept = {name: weight for name, weight in self._parameters.items() if _is_partitioned(weight) or dist.is_main()}
        layout = torch.contiguous_format
        self._parts = {name: _held(weight).float().cpu().clone(memory_format=layout) for name, weight in kept.items()}

    @torch.no_grad()
    def update(self) -> None:
        """After an optimizer step."""
        for name, part in self._parts.items():
            part.lerp_(_held(self._parameters[name]).float().cpu(), 1 - self._decay)

    def gathered(self) -> dict[str, Tensor]:
        """The whole average of each tensor in the dtype of its weights, on rank 0; {} elsewhere. Collective."""
        whole = {}
        for name, weight in self._parameters.items():
            part = self._parts.get(name)
            if _is_partitioned(weight):
                part = dist.gather_cat(self._parts[name].to(dist.device())).cpu()
            if dist.is_main():
                assert part is not None
                whole[name] = part.flatten()[: _numel(weight)].view(_shape(weight)).to(weight.dtype)
        return whole

    def state_dict(self) -> dict[str, Tensor]:
        """This rank's parts; {} where it holds none."""
        return dict(self._parts)

    def has_layout_of(self, part: dict[str, Tensor]) -> bool:
        """Whether the part of this rank in a run on as many ranks is a part of the same tensors, divided alike."""
        return _shapes(part) == _shapes(self._parts)

    def load_state_dict(self, part: dict[str, Tensor]) -> None:
        """Go on from what `state_dict` gave on this rank in a run of this layout."""
        for name, mine in self._parts.items():
            mine.copy_(part[name])

    def load_parts(self, ranks: Iterable[dict[str, Tensor]]) -> bool:
        """Go on from the parts of all ranks of a saved run, in their order, however they were divided.

        Args:
            ranks: looked at one after another; {} for a rank that held none.

        Returns:
            Whether any rank held a part. If none did, nothing is changed.
        """
        first = {name: dist.rank() * part.numel() for name, part in self._parts.items()}  # whole ones are on rank 0
        seen = dict.fromkeys(self._parts, 0)
        found = False
        for state in ranks:
            found = found or bool(state)
            for name in state.keys() & self._parts.keys():
                part = state[name].flatten()
                _copy_overlap(self._parts[name].view(-1), first[name], part, seen[name])
                seen[name] += len(part)
        return found


def _shapes(parts: dict[str, Tensor]) -> dict[str, torch.Size]:
    return {name: part.shape for name, part in parts.items()}


def _copy_overlap(mine: Tensor, mine_at: int, part: Tensor, part_at: int) -> None:
    """Copy what two pieces of one flat tensor have in common; each begins at its place there."""
    begin, end = max(mine_at, part_at), min(mine_at + len(mine), part_at + len(part))
    if begin < end:
        mine[begin - mine_at : end - mine_at] = part[begin - part_at : end - part_at]


def _is_partitioned(weight: Any) -> bool:
    return hasattr(weight, "ds_id")


def _held(weight: Any) -> Tensor:
    """What this rank keeps of a parameter between two steps."""
    return weight.ds_tensor.detach() if _is_partitioned(weight) else weight.detach()


def _numel(weight: Any) -> int:
    return int(weight.ds_numel if _is_partitioned(weight) else weight.numel())


def _shape(weight: Any) -> torch.Size:
    return torch.Size(weight.ds_shape if _is_partitioned(weight) else weight.shape)
