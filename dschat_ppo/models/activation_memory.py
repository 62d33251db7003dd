"""Less memory and work: the last MLP only for the tokens whose states are read, activations in host
memory.

Log-probs read the states of responses, and a reward model reads one state of each row. What the
last MLP computes at other tokens reaches nothing: later operations (norms, the head) do not mix
tokens. Its output there is 0 instead.
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
    decoder = backbone.get_decoder()  # type: ignore[operator]
    lists = [
        module
        for module in decoder.modules()
        if isinstance(module, nn.ModuleList) and len(module) == count
    ]
    if lists:
        return list(lists[0])
    return []


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
    return tensor.device, _copy_to_host(tensor)


def _copy_to_host(tensor: Tensor) -> Tensor:
    host = torch.empty_like(tensor, device=HOST, pin_memory=True)
    # before any later use of its memory, which is on the same stream
    return host.copy_(tensor, non_blocking=True)


def _from_host(saved: tuple[torch.device, Tensor]) -> Tensor:
    device, tensor = saved
    return tensor.to(device, non_blocking=True)


def last_mlp(backbone: nn.Module) -> nn.Module | None:
    """The MLP of the last decoder layer; None if it has none, or a mixture of experts, whose router
    sees all tokens."""
    layers = decoder_layers(backbone)
    if not layers:
        return None
    mlp = next((child for name, child in layers[-1].named_children() if name in MLP_NAMES), None)
    if mlp is None or not any(mlp.children()):
        return None
    if any(name.rsplit(".", 1)[-1] in EXPERTS for name, _ in mlp.named_modules()):
        return None
    return mlp


def last_mlp_of_read_tokens(
    backbone: nn.Module, columns: Tensor, rows: Tensor | int = 0
) -> list[tuple[nn.Module, Callable[..., Tensor]]]:
    """The last MLP, and a forward to put in its place for one pass: it runs the n tokens whose
    states are read, and gives 0 at the others, which nothing reads.

    Args:
        backbone: the model without its head.
        columns: (n,) int64, columns of these tokens in the backbone's input. A token may not be
            there twice: its gradient would count twice.
        rows: (n,) int64, their rows; or a number, the row of all.

    Returns:
        One pair; none if `last_mlp` finds no MLP.
    """
    mlp: Any = last_mlp(backbone)
    if mlp is None:
        return []
    original_forward = mlp.forward

    def forward(*arguments: Tensor) -> Tensor:
        """(B, T, H) each -> (B, T, H), 0 at other tokens."""
        count, width, _ = arguments[0].shape  # T may be padded
        # Also if all tokens are read: a rank that saves other tensors for the backward pass would
        # end the recomputation of activation checkpointing elsewhere, and under ZeRO-3 that
        # recomputation gathers weights.
        slots = rows * width + columns
        of_tokens = []
        for argument in arguments:
            flat = argument.reshape(count * width, -1)
            of_tokens.append(flat.index_select(0, slots).unsqueeze(0))
        outputs: Tensor = original_forward(*of_tokens).squeeze(0)
        zeros = outputs.new_zeros(count * width, outputs.shape[-1])
        return zeros.index_copy(0, slots, outputs).view(count, width, -1)

    return [(mlp, forward)]
