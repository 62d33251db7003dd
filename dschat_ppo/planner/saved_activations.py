"""How much a backward pass needs of the forward pass: counted by a forward pass without data (the meta device)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from dschat_ppo.models.activation_memory import decoder_layers, mlps_of
from dschat_ppo.models.architectures import MASK_IS_READ, first_position
from dschat_ppo.models.backbone import position_arguments
from dschat_ppo.planner.config_numbers import NeedsDataError, counting, head_size, number_of, required_number

NAME = "dschat_planned"
TOKENS = 256  # of the forward pass, or fewer if the model has fewer positions; activations are in proportion to them


@dataclass(frozen=True)
class SavedActivations:
    """Bytes per token.

    Attributes:
        layers: what each decoder layer saves for its backward pass.
        rest: what the embedding and the last norm save.
        layer_input: the input of a layer, all that gradient checkpointing keeps of it.
        counted: whether the numbers are counted; else the model needs data to run, and they are those of a decoder
            with its hidden and intermediate sizes (`formula_per_layer`).
        piece: with tiled MLPs, what an MLP needs while a piece of the tokens runs again.
    """

    layers: tuple[int, ...]
    rest: int
    layer_input: int
    counted: bool
    piece: int = 0

    @property
    def whole(self) -> int:
        """Of all layers together, without gradient checkpointing."""
        return sum(self.layers) + self.rest


class _Fused(torch.autograd.Function):
    """Attention that saves what fused kernels save: queries, keys, values, outputs, and a log-sum for each query and
    head (Dao et al. 2022, FlashAttention)."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[-1])
        ctx.save_for_backward(query, key, value, output, query.new_empty(query.shape[:3], dtype=torch.float32))
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        raise NotImplementedError("counts what a forward pass saves")


def _attention(module: Any, query: Tensor, key: Tensor, value: Tensor, *mask: Any, **options: Any) -> tuple[Any, None]:
    return _Fused.apply(query, key, value), None


AttentionInterface.register(NAME, _attention)


@dataclass
class _Count:
    """Bytes of the memory that is saved, each piece once, by the layer in which it is saved first."""

    known: dict[int, Any] = field(default_factory=dict)  # keeps the memory, so that its number is not used again
    layer: int = -1
    in_mlp: bool = False
    sizes: dict[tuple[int, bool], int] = field(default_factory=dict)  # by layer, and whether in its MLP

    def saved(self, tensor: Tensor) -> Tensor:
        memory = tensor.untyped_storage()
        if memory._cdata not in self.known:
            self.known[memory._cdata] = memory
            place = (self.layer, self.in_mlp)
            self.sizes[place] = self.sizes.get(place, 0) + memory.nbytes()
        return tensor


def saved_activations(backbone: PreTrainedModel, tiled: bool = False) -> SavedActivations:
    """What a forward pass of a model on the meta device saves for each token.

    The count includes the fp32 copies of norms, inputs of linear layers that train, and the inputs and outputs of
    activation functions; frozen linear layers do not save their inputs. Parameters are not counted.

    Args:
        backbone: without its head, on the meta device.
        tiled: `--tiled_mlp`: of an MLP, only its input is kept.

    Raises:
        PlanError: a setting is missing, or the forward pass fails for another reason than that it needs data.
    """
    config = backbone.config
    text = config.get_text_config()
    known = number_of(text, "max_position_embeddings") or TOKENS
    with counting(f"{type(config).__name__}: where its positions begin"):
        first = first_position(config)
    tokens = max(1, min(TOKENS, known - first))
    itemsize = next(backbone.parameters()).element_size()
    layer_input = required_number(text, "hidden_size") * itemsize
    layers, count = len(decoder_layers(backbone)), _Count()
    for weight in backbone.parameters():
        count.known[weight.untyped_storage()._cdata] = weight.untyped_storage()
    try:
        _run(backbone, tokens, count, tiled)
    except NeedsDataError:
        return SavedActivations((formula_per_layer(text, itemsize),) * layers, 0, layer_input, counted=False)
    per_token = {place: size // tokens for place, size in count.sizes.items()}
    in_mlps = [per_token.get((number, True), 0) for number in range(layers)]
    outside = [per_token.get((number, False), 0) for number in range(layers)]
    kept = tuple(other + (layer_input if mlp else 0) for other, mlp in zip(outside, in_mlps, strict=True))
    return SavedActivations(kept, per_token.get((-1, False), 0), layer_input, True, max(in_mlps, default=0))


def _run(backbone: Any, tokens: int, count: _Count, tiled: bool) -> None:
    """Count what a forward pass over `tokens` tokens saves."""
    config, before = backbone.config, backbone.config._attn_implementation
    ids = torch.zeros(1, tokens, dtype=torch.int64, device="meta")
    positions = position_arguments(backbone, torch.arange(tokens, device="meta").unsqueeze(0))
    backbone.train()
    with ExitStack() as stack:
        stack.callback(setattr, config, "_attn_implementation", before)
        if backbone._supports_attention_backend and config.model_type not in MASK_IS_READ:
            config._attn_implementation = NAME
        backbone.warn_if_padding_and_no_attention_mask = lambda *_: None  # it reads the ids
        stack.callback(delattr, backbone, "warn_if_padding_and_no_attention_mask")
        for number, layer in enumerate(decoder_layers(backbone)):
            _note(stack, layer, partial(_set_layer, count, number), partial(_set_layer, count, -1))
        for mlp in mlps_of(backbone)[0] if tiled else []:
            _note(stack, mlp, partial(_set_in_mlp, count, True), partial(_set_in_mlp, count, False))
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(count.saved, lambda tensor: tensor))
        with counting(f"{type(config).__name__}: its forward pass without weights"):
            backbone(input_ids=ids, attention_mask=None, use_cache=False, **positions)


def _note(stack: ExitStack, module: nn.Module, enter: Callable[[], None], leave: Callable[[], None]) -> None:
    """Call `enter` before the forward pass of a module and `leave` after it."""
    stack.callback(module.register_forward_pre_hook(lambda *_: enter()).remove)
    stack.callback(module.register_forward_hook(lambda *_: leave()).remove)


def _set_layer(count: _Count, number: int) -> None:
    count.layer = number


def _set_in_mlp(count: _Count, inside: bool) -> None:
    count.in_mlp = inside


def formula_per_layer(text: Any, itemsize: int) -> int:
    """Bytes per token that a decoder layer with two RMS norms and a gated MLP saves, if all of it trains.

    Each norm: its input in fp32, the reciprocal root (4 bytes), its output before and after the weight: 4 H + 4 +
    2 s H bytes, for H numbers of s bytes. Attention: queries, keys, values and the output, and a log-sum (4 bytes) for
    each head: s (2 A + 2 K) + 4 h. The MLP: outputs of both first products, of the activation function, and of the
    product of the two: 4 s I. (Korthikanti et al. 2022, section 4, counts a layer of GPT in the same way.)

    Args:
        text: configuration of the language model.
        itemsize: bytes of a number, s.

    Raises:
        PlanError: a setting is missing.
    """
    hidden, heads = required_number(text, "hidden_size"), required_number(text, "num_attention_heads")
    size, key_heads = head_size(text), number_of(text, "num_key_value_heads") or heads
    intermediate = number_of(text, "intermediate_size") or 4 * hidden
    used = number_of(text, "num_experts_per_tok")
    if used:
        intermediate = used * (number_of(text, "moe_intermediate_size") or intermediate)
    norms = 2 * (4 * hidden + 4 + 2 * itemsize * hidden)
    return norms + itemsize * 2 * size * (heads + key_heads) + 4 * heads + 4 * itemsize * intermediate
