"""Fewer operations while generating: decoder layers of Llama's form by four products.

Where few sequences run, a decode step is mostly small operations and calls of modules. A layer here
multiplies by one matrix for queries, keys and values and one for gate and up, and rotates queries
and keys together. On a CPU the weights are laid out for few rows once. On a GPU they are one matrix
where they lie side by side, as in DeepSpeed's flat groups.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel
from transformers.activations import SiLUActivation
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dschat_ppo.algorithms.fused_logprobs import fp32_product
from dschat_ppo.errors import attempt
from dschat_ppo.models.backbone import check_attention_call, forward_replaced, unfit
from dschat_ppo.models.fast_layers import kernels_for
from dschat_ppo.rollout.attention import installed, prefill_attention

# The children of a layer of Llama's form. A layer with others (norms of queries, four norms) does
# not have that form.
LAYER = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}
ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}
ROWS, COLUMNS = 4, 3  # of the comparison with a model's own layer
TYPICAL_ROWS = 32  # of a product with packed weights, a hint for their layout
SMALL = 2.0**-7  # of its states: the residual connection must not hide what the layer adds to them

# settings of layers that were compared
_AGREED: WeakKeyDictionary[nn.Module, dict[str, Any]] = WeakKeyDictionary()

Product = Callable[[Tensor], Tensor]
# (rows, in) -> (rows, out of all): their outputs one after another
Pack = Callable[[list[nn.Linear]], Product]


class FusedLayer:
    """The forward function of a decoder `layer` of Llama's form. `pack` makes one product of
    several linear layers with the same input. `settings`: keyword arguments that the layer gives to
    its attention function."""

    def __init__(self, layer: Any, pack: Pack, settings: dict[str, Any]):
        attention = layer.self_attn
        mlp = layer.mlp
        self._own = layer.forward
        self._attention, self._settings = attention, settings
        self._kv_heads = attention.k_proj.out_features // attention.head_dim
        self._heads = attention.q_proj.out_features // attention.head_dim
        self._first_norm = layer.input_layernorm
        self._second_norm = layer.post_attention_layernorm
        self._qkv = pack([attention.q_proj, attention.k_proj, attention.v_proj])
        self._output = pack([attention.o_proj])
        self._gate_and_up = pack([mlp.gate_proj, mlp.up_proj])
        self._down = pack([mlp.down_proj])
        self._activation = mlp.act_fn
        self._is_swiglu = isinstance(mlp.act_fn, (nn.SiLU, SiLUActivation))
        self._eager: Any = vars(sys.modules[type(attention).__module__]).get(
            "eager_attention_forward"
        )

    def __call__(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        past_key_values: Cache | None = None,
        **others: Any,
    ) -> Tensor:
        """As the layer: (n, L, H) -> (n, L, H); cosines and sines are (n, L, head_dim) or (1, L,
        head_dim)."""
        assert position_embeddings is not None
        rows, length, _ = hidden_states.shape
        attention = self._attention
        if position_embeddings[0].shape[-1] != attention.head_dim:  # a part of each head is rotated
            own: Tensor = self._own(
                hidden_states,
                attention_mask=attention_mask,
                position_embeddings=position_embeddings,
                past_key_values=past_key_values,
                **others,
            )
            return own
        qkv = self._qkv(self._first_norm(hidden_states)).view(rows, length, -1, attention.head_dim)
        query, key, value = self._rotated(qkv, *position_embeddings)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, attention.layer_idx)
        attend: Any = ALL_ATTENTION_FUNCTIONS.get_interface(
            attention.config._attn_implementation, self._eager
        )
        mixed, _ = attend(attention, query, key, value, attention_mask, **self._settings)
        states = hidden_states + self._output(mixed.reshape(rows, length, -1))
        gate, up = self._gate_and_up(self._second_norm(states)).chunk(2, dim=2)
        kernels = kernels_for(gate) if self._is_swiglu else None
        return states + self._down(
            kernels.swiglu(gate, up) if kernels else self._activation(gate) * up
        )

    def _rotated(self, qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        """(n, L, all heads, d) -> queries, keys and values, (n, heads of each, L, d); may change
        `qkv`."""
        kernels = kernels_for(qkv, cos, sin)
        rotated = self._heads + self._kv_heads
        if kernels and cos.is_contiguous() and sin.is_contiguous() and len(cos) == len(qkv):
            lines = qkv.flatten(0, 1)
            angles = (cos.flatten(0, 1), sin.flatten(0, 1))
            if hasattr(kernels, "rotated_parts"):
                parts = kernels.rotated_parts(lines, *angles, self._heads, self._kv_heads)
                return tuple(
                    part.view(*qkv.shape[:2], -1, qkv.shape[3]).transpose(1, 2) for part in parts
                )
            kernels.rotate_(lines, *angles, rotated)
        else:
            both = qkv[:, :, :rotated]
            first, second = both.chunk(2, dim=3)
            both.copy_(
                (both * cos.unsqueeze(2)).add_(
                    torch.cat([-second, first], dim=3).mul_(sin.unsqueeze(2))
                )
            )
        return qkv.transpose(1, 2).split([self._heads, self._kv_heads, self._kv_heads], dim=1)


def fused_layers(model: PreTrainedModel, pack: Pack) -> list[tuple[nn.Module, FusedLayer]]:
    """The decoder layers of `model` that `FusedLayer` can replace, each with its forward function.
    Each is compared once with the layer's own forward function on random states: a layer may have
    Llama's form and compute something else (a factor of the residual connection, no rotation)."""
    found = []
    for layer in model.modules():
        if _has_the_form(layer):
            known = _AGREED.get(layer)
            if known is None:
                fused = _agreeing(model, layer, pack)
            else:
                fused = FusedLayer(layer, pack, known)
            if fused is not None:
                found.append((layer, fused))
    return found


def _has_the_form(layer: Any) -> bool:
    def has(module: nn.Module, names: set[str]) -> bool:
        children = dict(module.named_children())
        linear = [child for name, child in children.items() if name.endswith("_proj")]
        return children.keys() == names and all(
            type(x) is nn.Linear and "forward" not in vars(x) for x in linear
        )

    if "forward" in vars(layer) or not has(layer, LAYER):
        return False
    return (
        has(layer.self_attn, ATTENTION)
        and has(layer.mlp, MLP)
        and hasattr(layer.self_attn, "head_dim")
    )


class _Seen:
    """An attention function that keeps its arguments."""

    def __init__(self) -> None:
        self.states: list[Tensor] = []
        self.settings: dict[str, Any] = {}

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        **settings: Any,
    ) -> tuple[Tensor, None]:
        check_attention_call(module, mask, {})
        self.states = [query, key, value]
        self.settings = settings
        return prefill_attention(query, key, value, query.shape[3] ** -0.5, None, None).transpose(
            1, 2
        ), None


@torch.no_grad()
def _agreeing(model: PreTrainedModel, layer: Any, pack: Pack) -> FusedLayer | None:
    """`layer`, fused, if it computes what the layer computes: queries, keys, values and the states
    after it."""
    weight = layer.self_attn.q_proj.weight
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(ROWS, COLUMNS, weight.shape[1], generator=generator).to(weight) * SMALL
    angles = torch.randn(ROWS, COLUMNS, layer.self_attn.head_dim // 2, generator=generator).repeat(
        1, 1, 2
    )
    turns = angles.cos().to(weight), angles.sin().to(weight)
    own = _Seen()
    ours = _Seen()
    with attempt() as tried, installed(model, own):
        expected = layer(states, position_embeddings=turns)
    # other arguments, though names of children are the same
    if unfit(tried) or not isinstance(expected, Tensor):
        return None
    fused = FusedLayer(layer, pack, own.settings)
    with installed(model, ours):
        found = fused(states, position_embeddings=turns)
    if not all(map(_close, [*ours.states, found], [*own.states, expected])):
        return None
    _AGREED[layer] = own.settings
    return fused


def _close(found: Tensor, expected: Tensor) -> bool:
    """Whether two results differ by rounding at most: in fp32 by sums in another order."""
    if found.shape != expected.shape:
        return False
    difference = (found.float() - expected.float()).abs().mean()
    size = expected.float().abs().mean()
    most = 64 if found.dtype == torch.float32 else 0.5  # fp32: 10 were seen with 4096 columns
    return bool(difference <= most * torch.finfo(found.dtype).eps * size)


def can_prepack(model: nn.Module) -> bool:
    """Whether the weights are on a CPU, in fp32, or in bf16 where the processor and PyTorch's
    (private) operators take packed ones."""
    weight = next(model.parameters())
    if weight.device.type != "cpu" or weight.dtype == torch.float32:
        return weight.device.type == "cpu"
    packs = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return (
        packs
        and weight.dtype == torch.bfloat16
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


def packed_product(layers: list[nn.Linear]) -> Product:
    """A product with a copy of the weights of `layers`, whose outputs come one after another:
    packed for oneDNN in bf16. In fp32 it is transposed, with which MKL takes a quarter of the time
    for few rows, and less for many."""
    weights, biases = zip(*((layer.weight.detach(), layer.bias) for layer in layers), strict=True)
    whole = weights[0] if len(weights) == 1 else torch.cat(weights)
    bias = None
    if any(part is not None for part in biases):
        parts = [
            w.new_zeros(len(w)) if b is None else b.detach()
            for w, b in zip(weights, biases, strict=True)
        ]
        bias = torch.cat(parts)
    if whole.dtype == torch.float32:
        return partial(torch._C._nn.linear, weight=whole.t().contiguous().t(), bias=bias)
    return partial(
        packed_linear, torch.ops.mkldnn._reorder_linear_weight(whole, TYPICAL_ROWS), bias
    )


def packed_linear(weight: Tensor, bias: Tensor | None, input: Tensor) -> Tensor:
    """`nn.functional.linear` with a packed weight."""
    return torch.ops.mkldnn._linear_pointwise(input, weight, bias, "none", [], "")


def joint_product(layers: list[nn.Linear]) -> Product:
    """One product with the weights of `layers`, if these lie side by side in memory; else one
    product each."""
    if len(layers) == 1:
        return layers[0]
    weight = side_by_side([layer.weight.detach() for layer in layers])
    biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
    if len(biases) == len(layers):
        bias = side_by_side(biases)
    else:
        bias = None
    if weight is None or (bias is None and biases):
        return lambda states: torch.cat([layer(states) for layer in layers], dim=-1)
    return lambda states: torch._C._nn.linear(states, weight, bias)


def side_by_side(parts: list[Tensor]) -> Tensor | None:
    """`parts` (n_i, ...) as one tensor over the same memory, (sum of n_i, ...), if they follow one
    another in it."""
    first = parts[0]
    memory = first.untyped_storage().data_ptr()
    place = first.storage_offset()
    for part in parts:
        if (
            part.untyped_storage().data_ptr() != memory
            or part.storage_offset() != place
            or not part.is_contiguous()
        ):
            return None
        place += part.numel()
    return first.as_strided((sum(map(len, parts)), *first.shape[1:]), first.stride())


@contextmanager
def fused(model: PreTrainedModel) -> Iterator[None]:
    """Run decoder layers of Llama's form as `FusedLayer`. The whole weights of `model` must not
    change inside the context. On a CPU every plain `nn.Linear` multiplies with a copy of its
    weight, so their memory is taken twice."""
    on_cpu = next(model.parameters()).device.type == "cpu"
    with ExitStack() as replaced:
        layers = fused_layers(model, packed_product if on_cpu else joint_product)
        for layer, forward in layers:
            replaced.enter_context(forward_replaced(layer, forward))
        inside = {id(module) for layer, _ in layers for module in layer.modules()}
        for module in model.modules() if on_cpu else ():
            if (
                type(module) is nn.Linear
                and "forward" not in vars(module)
                and id(module) not in inside
            ):
                replaced.enter_context(forward_replaced(module, packed_product([module])))
        yield


def fp32_logits(model: PreTrainedModel) -> AbstractContextManager[None]:
    """Make a plain head give fp32 logits, as training computes them: bf16 would round a logit of 16
    by 0.06."""
    head: Any = model.get_output_embeddings()
    if type(head) is not nn.Linear or "forward" in vars(head):
        return nullcontext()

    def forward(states: Tensor) -> Tensor:
        return fp32_product(states.flatten(0, -2), head.weight, head.bias).unflatten(
            0, states.shape[:-1]
        )

    return forward_replaced(head, forward)
