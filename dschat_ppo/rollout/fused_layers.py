"""Fewer operations while generating: on a GPU rotary positions by four of ten; on a CPU in bfloat16 decoder layers of
Llama's form by four packed products.

Where few sequences run, a decode step is mostly small operations and calls of modules. A layer here multiplies by one
matrix for queries, keys and values and one for gate and up, and rotates queries and keys together. Weights are laid out
for oneDNN once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel
from transformers.activations import SiLUActivation
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dschat_ppo.cpu_kernels import operations
from dschat_ppo.cpu_kernels.operations import can_run
from dschat_ppo.models.probes import check_attention_call, unfit
from dschat_ppo.rollout.attention import causal_attention, installed

# The children of a layer of Llama's form. A layer with others (norms of queries, four norms) does not have that form.
LAYER = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}
ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}
ROWS, COLUMNS = 4, 3  # of the comparison with a model's own layer
TYPICAL_ROWS = 32  # of a product with packed weights, a hint for their layout
SMALL = 2.0**-7  # of its states: the residual connection must not hide what the layer adds to them

_AGREED: WeakKeyDictionary[nn.Module, dict[str, Any]] = WeakKeyDictionary()  # settings of layers that were compared

Product = Callable[[Tensor], Tensor]
Pack = Callable[[list[nn.Linear]], Product]  # (rows, in) -> (rows, out of all): their outputs one after another


class FusedLayer:
    """The forward function of a decoder `layer` of Llama's form. `pack` makes one product of several linear layers with
    the same input. `settings`: keyword arguments that the layer gives to its attention function."""

    def __init__(self, layer: Any, pack: Pack, settings: dict[str, Any]):
        attention, mlp, self._own = layer.self_attn, layer.mlp, layer.forward
        self._attention, self._settings = attention, settings
        self._kv_heads = attention.k_proj.out_features // attention.head_dim
        self._heads = attention.q_proj.out_features // attention.head_dim
        self._first_norm, self._second_norm = layer.input_layernorm, layer.post_attention_layernorm
        self._qkv = pack([attention.q_proj, attention.k_proj, attention.v_proj])
        self._output = pack([attention.o_proj])
        self._gate_and_up, self._down = pack([mlp.gate_proj, mlp.up_proj]), pack([mlp.down_proj])
        self._activation = mlp.act_fn
        self._is_swiglu = isinstance(mlp.act_fn, (nn.SiLU, SiLUActivation))
        self._eager: Any = vars(sys.modules[type(attention).__module__]).get("eager_attention_forward")

    def __call__(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        past_key_values: Cache | None = None,
        **others: Any,
    ) -> Tensor:
        """As the layer: (n, L, H) -> (n, L, H); cosines and sines are (n, L, head_dim) or (1, L, head_dim)."""
        assert position_embeddings is not None
        rows, length, _ = hidden_states.shape
        attention = self._attention
        if position_embeddings[0].shape[-1] != attention.head_dim:  # a part of each head is rotated
            own: Tensor = self._own(
                hidden_states, attention_mask=attention_mask, position_embeddings=position_embeddings,
                past_key_values=past_key_values, **others,
            )  # fmt: skip
            return own
        qkv = self._qkv(self._first_norm(hidden_states)).view(rows, length, -1, attention.head_dim)
        (cos, sin), rotated = position_embeddings, self._heads + self._kv_heads  # queries and keys, in place
        if can_run(qkv, cos, sin) and cos.is_contiguous() and sin.is_contiguous() and len(cos) == len(qkv):
            operations.rotate_(qkv.flatten(0, 1), cos.flatten(0, 1), sin.flatten(0, 1), rotated)
        else:
            both = qkv[:, :, :rotated]
            first, second = both.chunk(2, dim=3)
            both.copy_((both * cos.unsqueeze(2)).add_(torch.cat([-second, first], dim=3).mul_(sin.unsqueeze(2))))
        query, key, value = qkv.transpose(1, 2).split([self._heads, self._kv_heads, self._kv_heads], dim=1)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, attention.layer_idx)
        attend: Any = ALL_ATTENTION_FUNCTIONS.get_interface(attention.config._attn_implementation, self._eager)
        mixed, _ = attend(attention, query, key, value, attention_mask, **self._settings)
        states = hidden_states + self._output(mixed.reshape(rows, length, -1))
        gate, up = self._gate_and_up(self._second_norm(states)).chunk(2, dim=2)
        fused = self._is_swiglu and can_run(gate)
        return states + self._down(operations.swiglu(gate, up) if fused else self._activation(gate) * up)


def fused_layers(model: PreTrainedModel, pack: Pack) -> list[tuple[nn.Module, FusedLayer]]:
    """The decoder layers of `model` that `FusedLayer` can replace, each with its forward function. Each is compared
    once with the layer's own forward function on random states: a layer may have Llama's form and compute something
    else (a factor of the residual connection, no rotation)."""
    found = []
    for layer in model.modules():
        if _has_the_form(layer):
            known = _AGREED.get(layer)
            fused = _agreeing(model, layer, pack) if known is None else FusedLayer(layer, pack, known)
            if fused is not None:
                found.append((layer, fused))
    return found


def _has_the_form(layer: Any) -> bool:
    def has(module: nn.Module, names: set[str]) -> bool:
        children = dict(module.named_children())
        linear = [child for name, child in children.items() if name.endswith("_proj")]
        return children.keys() == names and all(type(x) is nn.Linear and "forward" not in vars(x) for x in linear)

    if "forward" in vars(layer) or not has(layer, LAYER):
        return False
    return has(layer.self_attn, ATTENTION) and has(layer.mlp, MLP) and hasattr(layer.self_attn, "head_dim")


class _Seen:
    """An attention function that keeps its arguments."""

    def __init__(self) -> None:
        self.states: list[Tensor] = []
        self.settings: dict[str, Any] = {}

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **settings: Any
    ) -> tuple[Tensor, None]:
        check_attention_call(module, mask, {})
        self.states, self.settings = [query, key, value], settings
        return causal_attention(query, key, value, query.shape[3] ** -0.5, None, None).transpose(1, 2), None


@torch.no_grad()
def _agreeing(model: PreTrainedModel, layer: Any, pack: Pack) -> FusedLayer | None:
    """`layer`, fused, if it computes what the layer computes: queries, keys, values and the states after it."""
    weight, generator = layer.self_attn.q_proj.weight, torch.Generator().manual_seed(0)
    states = torch.randn(ROWS, COLUMNS, weight.shape[1], generator=generator).to(weight) * SMALL
    angles = torch.randn(ROWS, COLUMNS, layer.self_attn.head_dim // 2, generator=generator).repeat(1, 1, 2)
    turns = angles.cos().to(weight), angles.sin().to(weight)
    own, ours = _Seen(), _Seen()
    try:
        with installed(model, own):
            expected = layer(states, position_embeddings=turns)
    except Exception as problem:  # noqa: BLE001  a layer with the same names of children and other arguments
        unfit(problem)
        return None
    if not isinstance(expected, Tensor):
        return None
    fused = FusedLayer(layer, pack, own.settings)
    with installed(model, ours):
        found = fused(states, position_embeddings=turns)
    if not all(map(_close, [*ours.states, found], [*own.states, expected])):
        return None
    _AGREED[layer] = own.settings
    return fused


def _close(found: Tensor, expected: Tensor) -> bool:
    """Whether two half-precision results differ by rounding at most."""
    if found.shape != expected.shape:
        return False
    difference, size = (found.float() - expected.float()).abs().mean(), expected.float().abs().mean()
    return bool(difference <= torch.finfo(found.dtype).eps / 2 * size)


def can_prepack(model: nn.Module) -> bool:
    """Whether PyTorch has the (private) operators, the processor supports them, and the weights are bf16 on the CPU."""
    weight = next(model.parameters())
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    supported = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return bool(supported and weight.device.type == "cpu" and weight.dtype == torch.bfloat16)


def packed_product(layers: list[nn.Linear]) -> Product:
    """A product with a packed copy of the weights of `layers`, whose outputs come one after another."""
    weights, biases = zip(*((layer.weight.detach(), layer.bias) for layer in layers), strict=True)
    whole = weights[0] if len(weights) == 1 else torch.cat(weights)
    bias = None
    if any(part is not None for part in biases):
        parts = [w.new_zeros(len(w)) if b is None else b.detach() for w, b in zip(weights, biases, strict=True)]
        bias = torch.cat(parts)
    return partial(packed_linear, torch.ops.mkldnn._reorder_linear_weight(whole, TYPICAL_ROWS), bias)


def packed_linear(weight: Tensor, bias: Tensor | None, input: Tensor) -> Tensor:
    """`nn.functional.linear` with a packed weight."""
    return torch.ops.mkldnn._linear_pointwise(input, weight, bias, "none", [], "")


@contextmanager
def prepacked(model: PreTrainedModel) -> Iterator[None]:
    """Make every plain `nn.Linear` multiply with a packed copy of its weight, which takes the weights' memory again.
    Decoder layers of Llama's form run as `FusedLayer`. `model` has whole bfloat16 weights on the CPU, which must not
    change inside the context."""
    replaced: list[Any] = []
    try:
        for layer, forward in fused_layers(model, packed_product):
            replaced.append(layer)
            replaced[-1].forward = forward
        inside = {id(module) for layer in replaced for module in layer.modules()}
        for module in model.modules():
            if type(module) is nn.Linear and "forward" not in vars(module) and id(module) not in inside:
                replaced.append(module)
                replaced[-1].forward = packed_product([module])
        yield
    finally:
        for layer in replaced:
            vars(layer).pop("forward", None)  # packing may have failed half-way


FUNCTION = "apply_rotary_pos_emb"  # of a transformers module: (q, k, cos, sin, unsqueeze_dim=1) -> (q, k)
MOST_ANGLES = 4  # kept at a time: some models have one set for each kind of layer

Rotate = Callable[..., tuple[Tensor, Tensor]]


class FusedRotary:
    """Rotates queries and keys of one new token of each row together; else it calls `original`, the model's function.
    The rotation is `x * cos + rotate_half(x) * sin` (Su et al. 2021, equation 34), as one product of the numbers of `x`
    and the same numbers with the halves exchanged; the sign of `rotate_half` goes to the sine, which is exact. So the
    bits are those of separate operations."""

    def __init__(self, original: Rotate):
        self._original = original
        self._factors: list[tuple[Tensor, tuple[int, int], Tensor, Tensor]] = []  # for the layers of a step

    def __call__(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """As the function of the model: q (n, heads, L, d), k (n, kv_heads, L, d), cos and sin (n, L, d)."""
        width = q.shape[3]
        if args or kwargs or q.shape[2] != 1 or cos.dim() != 3 or cos.shape[2] != width or cos.dtype != q.dtype:
            return self._original(q, k, cos, sin, *args, **kwargs)
        factors, exchanged = self._factors_of(cos, sin, q.shape[:2], k.shape[1])
        both = torch.cat([q.reshape(-1, width), k.reshape(-1, width)])  # contiguous queries, then contiguous keys
        products = both.index_select(1, exchanged) * factors
        rotated = products[:, :width] + products[:, width:]
        queries = q.shape[0] * q.shape[1]
        return rotated[:queries].view(q.shape), rotated[queries:].view(k.shape)

    def _factors_of(self, cos: Tensor, sin: Tensor, shape: torch.Size, kv_heads: int) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines of all rows and heads, (n * (heads + kv_heads), 2 d), and the order of numbers."""
        (count, heads), width = shape, cos.shape[2]
        for angles, key, factors, exchanged in self._factors:
            if angles is cos and key == (heads, kv_heads):
                return factors, exchanged
        first, second = sin.chunk(2, dim=2)
        row = torch.cat([cos, -first, second], dim=2)  # (n, 1, 2 d)
        factors = torch.cat([row.expand(count, number, -1).reshape(-1, 2 * width) for number in (heads, kv_heads)])
        order = torch.arange(width, device=cos.device)
        exchanged = torch.cat([order, order.roll(width // 2)])
        self._factors = [*self._factors[1 - MOST_ANGLES :], (cos, (heads, kv_heads), factors, exchanged)]
        return factors, exchanged


@contextmanager
def fused_rotary(model: nn.Module) -> Iterator[None]:
    """Make the attention layers of `model` rotate with `FusedRotary`, where that gives the same bits."""
    weight = next(model.parameters())
    modules = {type(layer).__module__ for layer in model.modules()}
    originals = {
        name: vars(sys.modules[name])[FUNCTION] for name in sorted(modules) if FUNCTION in vars(sys.modules[name])
    }
    try:
        for name, original in originals.items():
            if _rotation_agrees(original, weight.device, weight.dtype):
                setattr(sys.modules[name], FUNCTION, FusedRotary(original))
        yield
    finally:
        for name, original in originals.items():
            setattr(sys.modules[name], FUNCTION, original)


@torch.no_grad()
def _rotation_agrees(original: Rotate, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `FusedRotary` and the function of a model give the same bits for random queries, keys and angles."""
    generator = torch.Generator().manual_seed(0)
    q, k, angles = (torch.randn(shape, generator=generator) for shape in ((3, 6, 1, 16), (3, 2, 1, 16), (3, 1, 16)))
    tensors = [tensor.to(device, dtype) for tensor in (q, k, angles.cos(), angles.sin())]
    try:
        expected = original(*tensors)
        found = FusedRotary(original)(*tensors)
        return len(expected) == 2 and all(map(torch.equal, found, expected))
    except Exception as problem:  # noqa: BLE001  a function of the same name for other arguments
        unfit(problem)
        return False
