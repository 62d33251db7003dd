"""Less memory and work: the last MLP only for the tokens whose states are read, activations in host
memory.

Log-probs read the states of answers, and a reward model reads one state of each row. What the last
MLP computes at other tokens reaches nothing: later operations (norms, the head) do not mix tokens.
Its output there is 0 instead.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

MLP_NAMES = ("mlp", "feed_forward", "ffn")
EXPERTS = ("experts", "router")  # modules of a mixture of experts
HOST = "cpu"
SMALLEST_ON_HOST = 2**16  # bytes; smaller tensors cost more time to move than they save memory


def decoder_layers(backbone: nn.Module) -> list[nn.Module]:
    """The layers of the decoder, in order."""
    count = backbone.config.get_text_config().num_hidden_layers  # type: ignore[union-attr, operator]
    lists = [
        module
        for module in backbone.modules()
        if isinstance(module, nn.ModuleList) and len(module) == count
    ]
    return list(lists[0]) if lists else []


def activations_on_host(enabled: bool) -> AbstractContextManager[Any]:
    """Keep tensors that the backward pass of the block needs in host memory, except parameters and
    small ones. Inside gradient checkpointing these are the inputs of the layers. On a CPU they stay
    where they are."""
    if enabled:
        return torch.autograd.graph.saved_tensors_hooks(_to_host, _from_host)
    return nullcontext()


def _to_host(tensor: Tensor) -> tuple[torch.device, Tensor]:
    """(device of the tensor, its copy on the host), or the tensor itself if it is better left where
    it is."""
    # ZeRO-3 gathers these
    is_parameter = isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)
    if is_parameter or tensor.device.type == HOST or tensor.nbytes < SMALLEST_ON_HOST:
        return tensor.device, tensor
    return tensor.device, _host_copy(tensor)


def _host_copy(tensor: Tensor) -> Tensor:
    host = torch.empty_like(tensor, device=HOST, pin_memory=True)
    # before any later use of its memory, which is on the same stream
    return host.copy_(tensor, non_blocking=True)


def _from_host(saved: tuple[torch.device, Tensor]) -> Tensor:
    device, tensor = saved
    return tensor.to(device, non_blocking=True)


def last_mlp(backbone: nn.Module) -> nn.Module | None:
    """The MLP of the last decoder layer; None if it has none, or a mixture of experts, whose router
    sees all tokens."""
    children = [pair for layer in decoder_layers(backbone)[-1:] for pair in layer.named_children()]
    mlp = next((child for name, child in children if name in MLP_NAMES), None)
    if mlp is None or not any(mlp.children()):
        return None
    if any(name.rsplit(".", 1)[-1] in EXPERTS for name, _ in mlp.named_modules()):
        return None
    return mlp


def of_read_tokens(
    backbone: nn.Module, columns: Tensor, rows: Tensor | int = 0
) -> list[tuple[nn.Module, Callable[..., Tensor]]]:
    """The last MLP, and a forward of it that runs some tokens only: `columns` (n,) int64 are theirs
    in the backbone's input, `rows` likewise, or one for all. A token twice would get its gradient
    twice. [] without such an MLP."""
    mlp: Any = last_mlp(backbone)
    if mlp is None:
        return []
    whole = mlp.forward

    def forward(*values: Tensor) -> Tensor:
        count, width, _ = values[0].shape  # (B, T, H); T may be padded
        # Also if all tokens are read: a rank that saves other tensors for the backward pass would
        # end the recomputation of activation checkpointing elsewhere, and under ZeRO-3 that
        # recomputation gathers weights.
        places = rows * width + columns
        flat = (x.reshape(count * width, -1) for x in values)
        found: Tensor = whole(*(x.index_select(0, places).unsqueeze(0) for x in flat)).squeeze(0)
        return (
            found.new_zeros(count * width, found.shape[-1])
            .index_copy(0, places, found)
            .view(count, width, -1)
        )

    return [(mlp, forward)]
