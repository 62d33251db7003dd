"""Less memory for activations: MLPs in pieces of the sequence, and activations in host memory."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from dschat_ppo.common import dist

MLP_NAMES = ("mlp", "feed_forward", "ffn")
EXPERTS = ("experts", "router")  # modules of a mixture of experts
HOST = "cpu"
SMALLEST_ON_HOST = 2**16  # bytes; smaller tensors cost more time to move than they save memory


def decoder_layers(backbone: nn.Module) -> list[nn.Module]:
    """The layers of the decoder, in order."""
    count = backbone.config.get_text_config().num_hidden_layers  # type: ignore[union-attr, operator]
    lists = [module for module in backbone.modules() if isinstance(module, nn.ModuleList) and len(module) == count]
    return list(lists[0]) if lists else []


def mlp_of(layer: nn.Module) -> tuple[nn.Module | None, bool]:
    """The MLP of a decoder layer, None if it has none, and whether it is a mixture of experts."""
    mlp = next((child for name, child in layer.named_children() if name in MLP_NAMES), None)
    if mlp is None or not any(mlp.children()):
        return None, False
    return mlp, any(name.rsplit(".", 1)[-1] in EXPERTS for name, _ in mlp.named_modules())


def mlps_of(backbone: nn.Module) -> tuple[list[nn.Module], int]:
    """The MLP of each decoder layer that has one, and the number of layers whose MLP is a mixture of experts. Experts
    are not tiled: their router sees all tokens of a layer at once, and its loss needs that."""
    found = [mlp_of(layer) for layer in decoder_layers(backbone)]
    return [mlp for mlp, experts in found if mlp is not None and not experts], sum(experts for _, experts in found)


def tile_mlps(backbone: PreTrainedModel) -> None:
    """Run the MLPs of `mlps_of` over pieces of as many tokens as a hidden state has numbers (Bekman et al. 2025).

    Memory for what is between the layers of an MLP is then that of one piece, which the backward pass computes again.
    Numbers are the same up to the rounding of sums over tokens in the weights' gradients. ZeRO-3 may gather the weights
    for each piece, so a forward pass is collective: a rank with fewer tokens runs empty pieces.
    """
    size = backbone.config.get_text_config().hidden_size
    for mlp in mlps_of(backbone)[0]:
        if not hasattr(mlp, "tile_size"):
            kind: Any = type(mlp)
            mlp.__class__ = _tiled(kind)
            mlp.tile_size = size


@cache
def _tiled(kind: Any) -> Any:
    """The class of an MLP that runs in pieces. (A function in the module itself would be that of another module in a
    copy of it.)"""

    def forward(self: Any, *values: Tensor) -> Tensor:
        whole = partial(kind.forward, self)
        shape = values[0].shape
        own = count = max(1, -(-shape[:-1].numel() // self.tile_size))
        if any(layer._forward_pre_hooks for layer in self.children()):  # those of ZeRO-3, which gather its weights
            count = int(dist.all_reduce(torch.tensor(own, device=values[0].device), "max"))
        if count == 1:
            return whole(*values)
        rows = [x.reshape(1, -1, x.shape[-1]) for x in values]
        pieces = zip(*(x.split(self.tile_size, dim=1) + (x[:, :0],) * (count - own) for x in rows), strict=True)
        if torch.is_grad_enabled():
            outputs = [checkpoint(whole, *piece, use_reentrant=False) for piece in pieces]
        else:
            outputs = [whole(*piece) for piece in pieces]
        return torch.cat(outputs, dim=1).view(*shape[:-1], -1)

    return type(f"Tiled{kind.__name__}", (kind,), {"forward": forward, "__module__": kind.__module__})


def activations_on_host(enabled: bool) -> AbstractContextManager[Any]:
    """Keep tensors that the backward pass of the block needs in host memory, except parameters and small ones. Inside
    gradient checkpointing these are the inputs of the layers. On a CPU they stay where they are."""
    return torch.autograd.graph.saved_tensors_hooks(_to_host, _from_host) if enabled else nullcontext()


def _to_host(tensor: Tensor) -> tuple[torch.device, Tensor]:
    """(device of the tensor, its copy on the host), or the tensor itself if it is better left where it is."""
    is_parameter = isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)  # ZeRO-3 gathers these
    if is_parameter or tensor.device.type == HOST or tensor.nbytes < SMALLEST_ON_HOST:
        return tensor.device, tensor
    return tensor.device, _host_copy(tensor)


def _host_copy(tensor: Tensor) -> Tensor:
    host = torch.empty_like(tensor, device=HOST, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)  # before any later use of its memory, which is on the same stream


def _from_host(saved: tuple[torch.device, Tensor]) -> Tensor:
    device, tensor = saved
    return tensor.to(device, non_blocking=True)
