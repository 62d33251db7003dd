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

from dschat_ppo.algorithms.fused_logprobs import FEWEST_ROWS, fp32_product
from dschat_ppo.common.exactness import exact_rollouts
from dschat_ppo.errors import attempt
from dschat_ppo.models.backbone import check_attention_call, forward_replaced, unfit
from dschat_ppo.models.fast_layers import kernels_for
from dschat_ppo.rollout.attention import attention_replaced, prefill_attention
from dschat_ppo.rollout.decode_kernels import AttentionCall

# The children of a layer of Llama's form. A layer with others (norms of queries, four norms) does
# not have that form.
LAYER = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}
ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}
# of the comparison with a model's own layer
ROWS = 4
COLUMNS = 3
TYPICAL_ROWS = 32  # of a product with packed weights, a hint for their layout
SMALL = 2.0**-7  # of its states: the residual connection must not hide what the layer adds to them

# settings of layers that were compared
_AGREED: WeakKeyDictionary[nn.Module, dict[str, Any]] = WeakKeyDictionary()

Product = Callable[[Tensor], Tensor]
# (rows, in) -> (rows, out of all): their outputs one after another
Pack = Callable[[list[nn.Linear]], Product]


class FusedLayer:
    """The forward function of a decoder layer of Llama's form, by four products."""

    def __init__(self, layer: Any, pack: Pack, settings: dict[str, Any]):
        """
        Args:
            layer: the decoder layer.
            pack: makes one product of several linear layers with the same input.
            settings: keyword arguments that the layer gives to its attention function.
        """
        attention = layer.self_attn
        mlp = layer.mlp
        self._original = layer.forward
        self._attention = attention
        self._settings = settings
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
        module = sys.modules[type(attention).__module__]
        self._eager: Any = vars(module).get("eager_attention_forward")

    def __call__(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        past_key_values: Cache | None = None,
        **options: Any,
    ) -> Tensor:
        """As the layer: (n, L, H) -> (n, L, H); cosines and sines are (n, L, head_dim) or (1, L,
        head_dim)."""
        assert position_embeddings is not None
        rows, length, _ = hidden_states.shape
        attention = self._attention
        if position_embeddings[0].shape[-1] != attention.head_dim:  # a part of each head is rotated
            output: Tensor = self._original(
                hidden_states,
                attention_mask=attention_mask,
                position_embeddings=position_embeddings,
                past_key_values=past_key_values,
                **options,
            )
            return output
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
        kernels = None
        if self._is_swiglu:
            kernels = kernels_for(gate)
        if kernels:
            product = kernels.swiglu(gate, up)
        else:
            product = self._activation(gate) * up
        return states + self._down(product)

    def _rotated(self, qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        """(n, L, all heads, d) -> queries, keys and values, (n, heads of each, L, d); may change
        `qkv`."""
        kernels = kernels_for(qkv, cos, sin)
        rotated_count = self._heads + self._kv_heads
        if kernels and cos.is_contiguous() and sin.is_contiguous() and len(cos) == len(qkv):
            lines = qkv.flatten(0, 1)
            line_cos = cos.flatten(0, 1)
            line_sin = sin.flatten(0, 1)
            if hasattr(kernels, "rotated_heads"):
                query_key_value = kernels.rotated_heads(
                    lines, line_cos, line_sin, self._heads, self._kv_heads
                )
                shape = (*qkv.shape[:2], -1, qkv.shape[3])
                return tuple(heads.view(shape).transpose(1, 2) for heads in query_key_value)
            kernels.rotate_(lines, line_cos, line_sin, rotated_count)
        else:
            heads = qkv[:, :, :rotated_count]
            first, second = heads.chunk(2, dim=3)
            turned = torch.cat([-second, first], dim=3).mul_(sin.unsqueeze(2))
            heads.copy_((heads * cos.unsqueeze(2)).add_(turned))
        return qkv.transpose(1, 2).split([self._heads, self._kv_heads, self._kv_heads], dim=1)


def fused_layers(model: PreTrainedModel, pack: Pack) -> list[tuple[nn.Module, FusedLayer]]:
    """The decoder layers of `model` that `FusedLayer` can replace, each with its forward function.
    Each is compared once with the layer's own forward function on random states: a layer may have
    Llama's form and compute something else (a factor of the residual connection, no rotation)."""
    layers = []
    for layer in model.modules():
        if not _has_the_form(layer):
            continue
        settings = _AGREED.get(layer)
        if settings is None:
            fused = _compared_with_layer(model, layer, pack)
        else:
            fused = FusedLayer(layer, pack, settings)
        if fused is not None:
            layers.append((layer, fused))
    return layers


def _has_the_form(layer: Any) -> bool:
    """Whether a module has the children of Llama's decoder layer, with plain linear layers."""

    def has(module: nn.Module, names: set[str]) -> bool:
        children = dict(module.named_children())
        if children.keys() != names:
            return False
        return all(
            type(child) is nn.Linear and "forward" not in vars(child)
            for name, child in children.items()
            if name.endswith("_proj")
        )

    if "forward" in vars(layer) or not has(layer, LAYER):
        return False
    return (
        has(layer.self_attn, ATTENTION)
        and has(layer.mlp, MLP)
        and hasattr(layer.self_attn, "head_dim")
    )


class _RecordingAttention:
    """An attention function that keeps the arguments of its last call."""

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
        """Causal attention: (n, heads, L, d) -> (n, L, heads, d)."""
        check_attention_call(module, mask, {})
        self.states = [query, key, value]
        self.settings = settings
        call = AttentionCall(0, query, key, value, query.shape[3] ** -0.5)
        return prefill_attention(call).transpose(1, 2), None


@torch.no_grad()
def _compared_with_layer(model: PreTrainedModel, layer: Any, pack: Pack) -> FusedLayer | None:
    """`layer`, fused, if it computes what the layer computes: queries, keys, values and the states
    after it. None if not."""
    weight = layer.self_attn.q_proj.weight
    head_dim = layer.self_attn.head_dim
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(ROWS, COLUMNS, weight.shape[1], generator=generator).to(weight) * SMALL
    angles = torch.randn(ROWS, COLUMNS, head_dim // 2, generator=generator).repeat(1, 1, 2)
    rotations = angles.cos().to(weight), angles.sin().to(weight)
    of_layer = _RecordingAttention()
    of_fused = _RecordingAttention()
    with attempt() as tried, attention_replaced(model, of_layer):
        expected = layer(states, position_embeddings=rotations)
    # other arguments, though names of children are the same
    if unfit(tried) or not isinstance(expected, Tensor):
        return None
    fused = FusedLayer(layer, pack, of_layer.settings)
    with attention_replaced(model, of_fused):
        output = fused(states, position_embeddings=rotations)
    if not all(map(_close, [*of_fused.states, output], [*of_layer.states, expected])):
        return None
    _AGREED[layer] = of_layer.settings
    return fused


def _close(output: Tensor, expected: Tensor) -> bool:
    """Whether two results differ by rounding at most: in fp32 by sums in another order."""
    if output.shape != expected.shape:
        return False
    difference = (output.float() - expected.float()).abs().mean()
    size = expected.float().abs().mean()
    most = 0.5
    if output.dtype == torch.float32:
        most = 64  # 10 were seen with 4096 columns
    return bool(difference <= most * torch.finfo(output.dtype).eps * size)


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
    weights = [layer.weight.detach() for layer in layers]
    weight = weights[0]
    if len(weights) > 1:
        weight = torch.cat(weights)
    bias = None
    if any(layer.bias is not None for layer in layers):
        biases = []
        for layer in layers:
            if layer.bias is None:
                biases.append(layer.weight.new_zeros(len(layer.weight)))
            else:
                biases.append(layer.bias.detach())
        bias = torch.cat(biases)
    if weight.dtype == torch.float32:
        product = partial(torch._C._nn.linear, weight=weight.t().contiguous().t(), bias=bias)
    else:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, TYPICAL_ROWS)
        product = partial(packed_linear, packed, bias)
    if exact_rollouts():
        return partial(product_of_enough_rows, product)
    return product


def product_of_enough_rows(product: Product, states: Tensor) -> Tensor:
    """A product of states (..., in) whose rows have the bits that they have among many: fewer than
    `FEWEST_ROWS` are computed as so many."""
    rows = states.numel() // states.shape[-1]
    if rows >= FEWEST_ROWS:
        return product(states)
    enough = nn.functional.pad(states.reshape(rows, -1), (0, 0, 0, FEWEST_ROWS - rows))
    return product(enough)[:rows].view(*states.shape[:-1], -1)


def packed_linear(weight: Tensor, bias: Tensor | None, input: Tensor) -> Tensor:
    """`nn.functional.linear` with a packed weight."""
    return torch.ops.mkldnn._linear_pointwise(input, weight, bias, "none", [], "")


def joint_product(layers: list[nn.Linear]) -> Product:
    """One product with the weights of `layers`, if these lie side by side in memory; else one
    product each."""
    if len(layers) == 1:
        return layers[0]
    weight = adjoining([layer.weight.detach() for layer in layers])
    biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
    bias = None
    if len(biases) == len(layers):
        bias = adjoining(biases)
    if weight is None or (bias is None and biases):
        return lambda states: torch.cat([layer(states) for layer in layers], dim=-1)
    return lambda states: torch._C._nn.linear(states, weight, bias)


def adjoining(tensors: list[Tensor]) -> Tensor | None:
    """`tensors` (n_i, ...) as one tensor over the same memory, (sum of n_i, ...), if they follow
    one another in it; else None."""
    first = tensors[0]
    memory = first.untyped_storage().data_ptr()
    offset = first.storage_offset()
    rows = 0
    for tensor in tensors:
        has_other_memory = tensor.untyped_storage().data_ptr() != memory
        if has_other_memory or tensor.storage_offset() != offset or not tensor.is_contiguous():
            return None
        offset += tensor.numel()
        rows += len(tensor)
    return first.as_strided((rows, *first.shape[1:]), first.stride())


@contextmanager
def fused(model: PreTrainedModel) -> Iterator[None]:
    """Run decoder layers of Llama's form as `FusedLayer`. The whole weights of `model` must not
    change inside the context. On a CPU every plain `nn.Linear` multiplies with a copy of its
    weight, so their memory is taken twice."""
    on_cpu = next(model.parameters()).device.type == "cpu"
    pack = joint_product
    if on_cpu:
        pack = packed_product
    with ExitStack() as replaced:
        fused_modules = set[nn.Module]()
        for layer, forward in fused_layers(model, pack):
            replaced.enter_context(forward_replaced(layer, forward))
            fused_modules.update(layer.modules())
        if on_cpu:
            for module in model.modules():
                if (
                    type(module) is nn.Linear
                    and "forward" not in vars(module)
                    and module not in fused_modules
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
        logits = fp32_product(states.flatten(0, -2), head.weight, head.bias)
        return logits.unflatten(0, states.shape[:-1])

    return forward_replaced(head, forward)
