"""Sizes of a model that tell how much memory it needs, counted on a model without weights
(PyTorch's meta device)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel

from dschat_ppo.algorithms.fused_logprobs import HALF
from dschat_ppo.config.step_config import StepConfig
from dschat_ppo.cpu_kernels import operations
from dschat_ppo.engine.optimizers import further_optimizers
from dschat_ppo.errors import reading
from dschat_ppo.models.activation_memory import decoder_layers
from dschat_ppo.models.adapters.layers import adapter_layers, add_adapter
from dschat_ppo.models.architectures import (
    MASK_IS_READ,
    backbone_of,
    build_classifier,
    first_position,
)
from dschat_ppo.models.backbone import attention_is_replaceable, position_arguments
from dschat_ppo.models.fast_layers import use_fast_layers
from dschat_ppo.models.lm_kinds import kind_of_lm
from dschat_ppo.models.loading import AS_SAVED, DTYPES, ModelChanges, load_config
from dschat_ppo.models.model_folders import model_folder
from dschat_ppo.rollout.cache_memory import cached_bytes

TOKENS = 256  # of the forward pass that counts; activations are in proportion to them
ATTENTION = "dschat_planned"


@dataclass(frozen=True)
class SavedActivations:
    """What a forward pass saves for the backward pass, in bytes per token. What several layers save
    counts in the first of them."""

    layers: tuple[int, ...]  # of each decoder layer
    rest: int  # of the embedding and the last norm
    layer_input: int  # the input of a layer, all that gradient checkpointing keeps of it

    @property
    def whole(self) -> int:
        """Of all layers together, without gradient checkpointing."""
        return sum(self.layers) + self.rest

    @property
    def layer(self) -> int:
        """Of the layer that saves most."""
        return max(self.layers)


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of a model. Counts are of numbers (parameters), not of bytes."""

    config: PretrainedConfig  # of the model
    total: int
    layers: int  # of all decoder layers
    layer: int  # of the largest one
    trained: int  # parameters that train
    adapted: int  # weights under LoRA, which generation replaces by merged ones
    taken: Mapping[str, int]  # by optimizers of features, which train them in place of AdamW
    largest: int  # of the largest parameter
    hidden: int  # numbers of a hidden state
    vocabulary: int  # width of the logits; 1 with a scalar head
    kv_bytes: int  # bytes of the keys and values of one token
    state_bytes: int  # bytes of the states of one row, where layers carry one from token to token
    saved: SavedActivations

    @property
    def head(self) -> int:
        """Of the output or score head, also where it is tied to the embedding."""
        return self.vocabulary * self.hidden

    def cache_bytes(self, length: int) -> int:
        """Bytes of the cache for a row of `length` tokens; states exist twice after a prefill."""
        return self.kv_bytes * length + 2 * self.state_bytes


def read_model_configs(config: StepConfig) -> dict[str, PretrainedConfig]:
    """The model configurations of a step by role."""
    return {
        role: load_config(model_folder(name, flag), flag)
        for role, (flag, name) in config.models.items()
    }


# the planner counts each model once, whatever flags it tries
_COUNTED: dict[tuple[Any, ...], ModelSizes] = {}


def sizes_of(
    config: PretrainedConfig,
    dtype: str,
    scalar: bool,
    changes: ModelChanges = AS_SAVED,
    on_gpu: bool = True,
) -> ModelSizes:
    """The sizes of a model with a `scalar` head or that of a language model, with the adapter of
    the `changes`. Layers with kernels save less for the backward pass: on a CPU, and `on_gpu` in
    half precision.

    Raises:
        UserError: transformers cannot build the model, it reads numbers in its forward pass and
            cannot run without data, or it has not the settings of a decoder.
    """
    key = (config.to_json_string(use_diff=False), dtype, scalar, changes, on_gpu)
    if key not in _COUNTED:
        with reading(f"{type(config).__name__}: its memory cannot be counted"):
            _COUNTED[key] = _count_sizes(config, dtype, scalar, changes, on_gpu)
    return _COUNTED[key]


def _count_sizes(
    config: PretrainedConfig,
    dtype: str,
    scalar: bool,
    changes: ModelChanges,
    on_gpu: bool,
) -> ModelSizes:
    """`sizes_of`, by building the model and running it on the meta device. Building may raise
    almost any exception."""
    with torch.device("meta"):
        if scalar:
            model: Any = build_classifier(config, changes.kinds).to(DTYPES[dtype])
        else:
            # a copy, in which transformers notes the format
            lm_kind = kind_of_lm(config, changes.kinds)
            model = lm_kind.build(deepcopy(config), dtype=DTYPES[dtype])
    with_kernels = tuple(operations.DTYPES)
    if on_gpu:
        with_kernels = HALF  # Triton's, if they agree with PyTorch there
    if DTYPES[dtype] in with_kernels:
        use_fast_layers(model)
    if scalar:
        backbone = model.base_model
        vocabulary = 1
        kv_bytes = 0
        state_bytes = 0
    else:
        backbone = backbone_of(model)
        vocabulary = model.get_output_embeddings().weight.shape[0]
        kv_bytes, state_bytes = _cache_bytes(model)
    if changes.adapter is not None:
        # dropout does not change what is counted
        add_adapter(model, replace(changes.adapter, dropout=0.0))
    layers = [_numbers_in(layer.parameters()) for layer in decoder_layers(backbone)]
    weights = dict(model.named_parameters())  # a tied one once
    adapted = [layer.get_base_layer().weight for layer in adapter_layers(model).values()]
    trained = [weight for weight in weights.values() if weight.requires_grad]
    return ModelSizes(
        config=config,
        total=_numbers_in(weights.values()),
        layers=sum(layers),
        layer=max(layers),
        trained=_numbers_in(trained),
        adapted=_numbers_in(adapted),
        taken=_taken_numbers(weights),
        largest=max(weight.numel() for weight in weights.values()),
        hidden=config.get_text_config().hidden_size,
        vocabulary=vocabulary,
        kv_bytes=kv_bytes,
        state_bytes=state_bytes,
        saved=saved_activations(backbone),
    )


def _taken_numbers(weights: Mapping[str, Tensor]) -> dict[str, int]:
    """Name of each optimizer of a feature -> how many numbers it trains in place of AdamW, of these
    weights by name."""
    taken = {}
    for optimizer in further_optimizers():
        names = [name for name, weight in weights.items() if optimizer.takes(name, weight.shape)]
        taken[optimizer.name] = _numbers_in(weights[name] for name in names)
    return taken


def _numbers_in(tensors: Iterable[Tensor]) -> int:
    """How many numbers the tensors hold together."""
    return sum(tensor.numel() for tensor in tensors)


def _cache_bytes(model: PreTrainedModel) -> tuple[int, int]:
    """Bytes of the keys and values of a token, and of the states of a row: those of a pass over one
    token, as generation measures them. GPT-2 cannot run it without data: 2 x layers x H x s."""
    with suppress(RuntimeError):
        return cached_bytes(model)
    text = model.config.get_text_config()
    return 2 * int(text.num_hidden_layers) * int(text.hidden_size) * model.dtype.itemsize, 0


class _Fused(torch.autograd.Function):
    """Attention that saves what fused kernels save: queries, keys, values, outputs, and a log-sum
    for each query and head (Dao et al. 2022, FlashAttention)."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[-1])
        ctx.save_for_backward(
            query, key, value, output, query.new_empty(query.shape[:3], dtype=torch.float32)
        )
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        raise NotImplementedError("counts what a forward pass saves")


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, *mask: Any, **options: Any
) -> tuple[Any, None]:
    """An attention function of transformers: (b, heads, T, d) -> (b, T, heads, d)."""
    return _Fused.apply(query, key, value), None


AttentionInterface.register(ATTENTION, _attention)


class _SavedBytes:
    """Counts the bytes of the memory that a forward pass saves: each piece once, in the layer that
    saves it first, and none that holds parameters of `model`."""

    OUTSIDE = -1  # in place of the index of a layer: none runs

    def __init__(self, model: PreTrainedModel):
        self.of_layer = Counter[int]()
        self._layer = self.OUTSIDE
        storages = [weight.untyped_storage() for weight in model.parameters()]
        self._known = {storage._cdata: storage for storage in storages}

    def enter(self, layer: int, *_: Any) -> None:
        """As a hook of a module: from now on the layer with this index runs."""
        self._layer = layer

    def save(self, tensor: Tensor) -> Tensor:
        """As a hook of saved tensors: count the memory of one."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._known:
            self._known[storage._cdata] = storage  # a reference, so that its key is not used again
            self.of_layer[self._layer] += storage.nbytes()
        return tensor


def saved_activations(backbone: PreTrainedModel) -> SavedActivations:
    """What a forward pass of a model on the meta device saves for each token, without parameters.
    `backbone` has no head."""
    model: Any = backbone
    config = model.config
    layers = decoder_layers(model)
    text = config.get_text_config()
    positions = getattr(text, "max_position_embeddings", None) or TOKENS
    tokens = max(1, min(TOKENS, positions - first_position(config)))
    saved = _SavedBytes(model)
    model.train()
    with ExitStack() as stack:
        stack.callback(setattr, config, "_attn_implementation", config._attn_implementation)
        if attention_is_replaceable(model) and config.model_type not in MASK_IS_READ:
            config._attn_implementation = ATTENTION
        model.warn_if_padding_and_no_attention_mask = lambda *_: None  # it reads the ids
        stack.callback(delattr, model, "warn_if_padding_and_no_attention_mask")
        for index, layer in enumerate(layers):
            begin = layer.register_forward_pre_hook(partial(saved.enter, index))
            end = layer.register_forward_hook(partial(saved.enter, saved.OUTSIDE))
            stack.callback(begin.remove)
            stack.callback(end.remove)
        hooks = torch.autograd.graph.saved_tensors_hooks(saved.save, lambda tensor: tensor)
        stack.enter_context(hooks)
        ids = torch.zeros(1, tokens, dtype=torch.int64, device="meta")
        arguments = position_arguments(model, torch.arange(tokens, device="meta").unsqueeze(0))
        model(input_ids=ids, attention_mask=None, use_cache=False, **arguments)
    return SavedActivations(
        layers=tuple(saved.of_layer[index] // tokens for index in range(len(layers))),
        rest=saved.of_layer[saved.OUTSIDE] // tokens,
        layer_input=text.hidden_size * next(model.parameters()).element_size(),
    )
