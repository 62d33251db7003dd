"""The parts of a model that need memory, counted on a model without weights (PyTorch's meta
device)."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack, suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from dschat_ppo.config.step_config import StepConfig
from dschat_ppo.engine.build_engine import is_layer_matrix
from dschat_ppo.errors import reading
from dschat_ppo.models.activation_memory import decoder_layers
from dschat_ppo.models.adapters import AdapterSettings, adapter_layers, add_adapter
from dschat_ppo.models.architectures import (
    MASK_IS_READ,
    backbone_of,
    classifier_class,
    config_for,
    first_position,
)
from dschat_ppo.models.backbone import attention_is_replaceable, position_arguments
from dschat_ppo.models.fast_layers import use_fast_layers
from dschat_ppo.models.loading import DTYPES, load_config
from dschat_ppo.models.model_folders import model_folder
from dschat_ppo.rollout.cache_memory import cached_bytes

TOKENS = 256  # of the forward pass that counts; activations are in proportion to them
ATTENTION = "dschat_planned"


@dataclass(frozen=True)
class SavedActivations:
    """What a forward pass saves for the backward pass, in bytes per token."""

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
class ModelParts:
    """Sizes of a model. Counts are of numbers (parameters), not of bytes."""

    total: int
    layers: int  # of all decoder layers
    layer: int  # of the largest one
    trained: int  # parameters that train
    adapted: int  # weights under LoRA, which generation replaces by merged ones
    matrices: int  # those that `--optimizer muon` trains with Muon
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
_COUNTED: dict[tuple[Any, ...], ModelParts] = {}


def parts_of(
    config: PretrainedConfig,
    dtype: str,
    scalar: bool,
    adapter: AdapterSettings | None = None,
    on_gpu: bool = True,
) -> ModelParts:
    """Count the parts of a model with a `scalar` head or that of a language model, in which
    `adapter` trains; `UserError` if transformers cannot build it, if it reads numbers in its
    forward pass and cannot run without data, or if it has not the settings of a decoder. On a CPU,
    layers with kernels save less for the backward pass than `on_gpu`."""
    key = (config.to_json_string(use_diff=False), dtype, scalar, adapter, on_gpu)
    if key in _COUNTED:
        return _COUNTED[key]
    with reading(f"{type(config).__name__}: its memory cannot be counted"):
        with torch.device("meta"):
            if scalar:
                kind: Any = classifier_class(config)
                model: Any = kind(config_for(kind, config)).to(DTYPES[dtype])
            else:
                # a copy, in which transformers notes the format
                model = AutoModelForCausalLM.from_config(deepcopy(config), dtype=DTYPES[dtype])
        if not on_gpu:
            use_fast_layers(model)
        kv_bytes, state_bytes = (0, 0) if scalar else _cache_bytes(model)
        if adapter is not None:
            add_adapter(model, adapter)
        backbone = model.base_model if scalar else backbone_of(model)
        sizes = [
            sum(weight.numel() for weight in layer.parameters())
            for layer in decoder_layers(backbone)
        ]
        weights = dict(model.named_parameters())  # a tied one once
        _COUNTED[key] = ModelParts(
            total=sum(weight.numel() for weight in weights.values()),
            layers=sum(sizes),
            layer=max(sizes),
            trained=sum(weight.numel() for weight in weights.values() if weight.requires_grad),
            adapted=sum(
                layer.get_base_layer().weight.numel() for layer in adapter_layers(model).values()
            ),
            matrices=sum(
                w.numel() for name, w in weights.items() if is_layer_matrix(name, w.shape)
            ),
            largest=max(weight.numel() for weight in weights.values()),
            hidden=config.get_text_config().hidden_size,
            vocabulary=1 if scalar else model.get_output_embeddings().weight.shape[0],
            kv_bytes=kv_bytes,
            state_bytes=state_bytes,
            saved=saved_activations(backbone),
        )
    return _COUNTED[key]


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
    return _Fused.apply(query, key, value), None


AttentionInterface.register(ATTENTION, _attention)


def saved_activations(backbone: PreTrainedModel) -> SavedActivations:
    """What a forward pass of a model on the meta device saves for each token, without parameters:
    each piece of memory once, in the layer that saves it first. `backbone` has no head."""
    model: Any = backbone
    config = model.config
    layers = decoder_layers(model)
    text = config.get_text_config()
    before = config._attn_implementation
    tokens = max(
        1,
        min(
            TOKENS,
            (getattr(text, "max_position_embeddings", None) or TOKENS) - first_position(config),
        ),
    )
    # the layer that runs (-1: none), and the bytes that each saves
    place = -1
    sizes = Counter[int]()
    known = {
        weight.untyped_storage()._cdata: weight.untyped_storage() for weight in model.parameters()
    }

    def save(tensor: Tensor) -> Tensor:
        memory = tensor.untyped_storage()
        if memory._cdata not in known:
            known[memory._cdata] = memory  # kept, so that its number is not used again
            sizes[place] += memory.nbytes()
        return tensor

    def note(layer: int, *_: Any) -> None:
        nonlocal place
        place = layer

    model.train()
    with ExitStack() as stack:
        stack.callback(setattr, config, "_attn_implementation", before)
        if attention_is_replaceable(model) and config.model_type not in MASK_IS_READ:
            config._attn_implementation = ATTENTION
        model.warn_if_padding_and_no_attention_mask = lambda *_: None  # it reads the ids
        stack.callback(delattr, model, "warn_if_padding_and_no_attention_mask")
        for number, layer in enumerate(layers):
            stack.callback(layer.register_forward_pre_hook(partial(note, number)).remove)
            stack.callback(layer.register_forward_hook(partial(note, -1)).remove)
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor))
        ids = torch.zeros(1, tokens, dtype=torch.int64, device="meta")
        positions = position_arguments(model, torch.arange(tokens, device="meta").unsqueeze(0))
        model(input_ids=ids, attention_mask=None, use_cache=False, **positions)
    kept = tuple(sizes[number] // tokens for number in range(len(layers)))
    return SavedActivations(
        kept, sizes[-1] // tokens, text.hidden_size * next(model.parameters()).element_size()
    )
