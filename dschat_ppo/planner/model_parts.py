"""The parts of a model that need memory, counted on a model without weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from dschat_ppo.config.steps import PPOConfig
from dschat_ppo.models.activation_memory import decoder_layers
from dschat_ppo.models.adapters import AdapterSettings, adapter_layers, add_adapter
from dschat_ppo.models.backbone import backbone_of
from dschat_ppo.models.classifiers import classifier_class, config_for
from dschat_ppo.models.fast_layers import use_fast_layers
from dschat_ppo.models.loading import DTYPES, load_config
from dschat_ppo.models.model_folders import model_folder
from dschat_ppo.planner.config_numbers import (
    NeedsDataError,
    counting,
    head_size,
    number_of,
    required_number,
)
from dschat_ppo.planner.saved_activations import SavedActivations, saved_activations
from dschat_ppo.rollout.memory import bytes_per_token


@dataclass(frozen=True)
class ModelParts:
    """Sizes of a model. Counts are of numbers (parameters), not of bytes.

    Attributes:
        embedding: input embeddings, and positions where they are learned.
        layers: the decoder layers, one number for each.
        head: the output or score head; 0 if it is tied to the embedding.
        other: everything else, such as the last norm.
        trained: parameters that train.
        adapted: weights under LoRA, which generation replaces by merged ones.
        largest: of the largest parameter.
        active: parameters that a token multiplies, without the input embedding; of a mixture of experts, those of its
            experts alone.
        hidden: numbers of a hidden state.
        vocabulary: width of the logits.
        heads: attention heads x numbers of a head, in all layers together: numbers that attention reads for each pair
            of tokens.
        kv_bytes: bytes of the keys and values of one token.
        saved: activations that the backward pass needs.
    """

    embedding: int
    layers: tuple[int, ...]
    head: int
    other: int
    trained: int
    adapted: int
    largest: int
    active: int
    hidden: int
    vocabulary: int
    heads: int
    kv_bytes: int
    saved: SavedActivations

    @property
    def total(self) -> int:
        """All parameters."""
        return self.embedding + sum(self.layers) + self.head + self.other


def read_model_configs(config: Any, folder_of: Callable[[str, str], str] = model_folder) -> dict[str, PretrainedConfig]:
    """The model configurations of a step by role, from the folders that its flags name.

    Args:
        config: of the step.
        folder_of: (folder or name on the hub, flag) -> local folder.

    Returns:
        Roles "actor", "reference", "critic" and "reward" of step 3, without those that the run does not have; of the
        other steps "model".

    Raises:
        UserError: a folder is not there, or its `config.json` cannot be used.
    """
    if not isinstance(config, PPOConfig):
        named = {"model": ("--model_name_or_path", config.fit.model_name_or_path)}
    else:
        named = {
            "actor": ("--actor_model_name_or_path", config.ppo.actor_model_name_or_path),
            "reference": ("--ref_model_name_or_path", config.reference_folder),
            "critic": (config.critic_flag, config.critic_folder),
            "reward": (config.reward_flag, config.reward_folder),
        }
    return {
        role: load_config(folder_of(folder, flag), flag) for role, (flag, folder) in named.items()
        if folder is not None
    }  # fmt: skip


def parts_of(
    config: PretrainedConfig, dtype: str, scalar: bool, adapter: AdapterSettings | None = None, tiled: bool = False,
    on_gpu: bool = True,
) -> ModelParts:  # fmt: skip
    """Count the parts of a model.

    Args:
        config: of the model.
        dtype: "bf16", "fp16" or "fp32".
        scalar: whether it has a scalar head in place of that of a language model.
        adapter: that trains in it.
        tiled: `--tiled_mlp`.
        on_gpu: it runs on a GPU. In bf16 on a CPU, layers with kernels save less for the backward pass.

    Raises:
        PlanError: the configuration is one that the planner does not understand.
        UserError: the adapter does not fit the model.
    """
    return _parts_of(_Key(config), dtype, scalar, adapter, tiled, on_gpu)


class _Key:
    """A configuration that is equal to others with the same settings."""

    def __init__(self, config: PretrainedConfig):
        self.config = config
        self._text = config.to_json_string(use_diff=False)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self._text == other._text

    def __hash__(self) -> int:
        return hash(self._text)


@lru_cache(maxsize=64)
def _parts_of(
    key: _Key, dtype: str, scalar: bool, adapter: AdapterSettings | None, tiled: bool, on_gpu: bool
) -> ModelParts:
    model = _without_weights(key.config, dtype, scalar)
    if not on_gpu:
        use_fast_layers(model)
    kv_bytes = 0 if scalar else _kv_bytes(model)
    if adapter is not None:
        add_adapter(model, adapter)
    backbone = model.base_model if scalar else backbone_of(model)
    layers = decoder_layers(backbone)
    with counting(f"{type(model).__name__}: its embedding and head"):
        embedding, head = model.get_input_embeddings(), model.score if scalar else model.get_output_embeddings()
        head_weight = head.weight
    counted: set[nn.Parameter] = set()
    of_embedding = _new_numbers(embedding, counted)
    of_layers = tuple(_new_numbers(layer, counted) for layer in layers)
    of_head = _new_numbers(head, counted)
    other = _new_numbers(model, counted)
    trained = {weight for weight in model.parameters() if weight.requires_grad}
    adapted = sum(layer.get_base_layer().weight.numel() for layer in adapter_layers(model).values())
    text = key.config.get_text_config()
    return ModelParts(
        embedding=of_embedding,
        layers=of_layers,
        head=of_head,
        other=other,
        trained=sum(weight.numel() for weight in trained),
        adapted=adapted,
        largest=max(weight.numel() for weight in model.parameters()),
        active=active_parameters(text, sum(of_layers)) + head_weight.numel(),
        hidden=required_number(text, "hidden_size"),
        vocabulary=1 if scalar else head_weight.shape[0],
        heads=attention_numbers(text),
        kv_bytes=kv_bytes,
        saved=saved_activations(backbone, tiled),
    )


def _kv_bytes(model: PreTrainedModel) -> int:
    """Bytes of the keys and values of a token: those of a pass over one token, as generation measures them, or if the
    model cannot run without data, of keys and values in every layer."""
    try:
        with counting(f"{type(model).__name__}: its keys and values"):
            return bytes_per_token(model)
    except NeedsDataError:
        return key_value_numbers(model.config.get_text_config()) * model.dtype.itemsize


def key_value_numbers(text: Any) -> int:
    """Numbers of the keys and values of a token: 2 x layers x key-value heads x numbers of a head."""
    heads = number_of(text, "num_key_value_heads") or required_number(text, "num_attention_heads")
    return 2 * required_number(text, "num_hidden_layers") * heads * head_size(text)


def _without_weights(config: PretrainedConfig, dtype: str, scalar: bool) -> Any:
    required_number(config.get_text_config(), "num_hidden_layers")  # by which the decoder layers are found
    with counting(f"{type(config).__name__}: a model without weights"), torch.device("meta"):
        if not scalar:
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=DTYPES[dtype])
            return model
        kind: Any = classifier_class(config)
        return kind(config_for(kind, config)).to(DTYPES[dtype])


def _new_numbers(module: nn.Module, counted: set[nn.Parameter]) -> int:
    """Parameters of a module that are not in `counted`, which they are added to."""
    new = set(module.parameters()) - counted
    counted |= new
    return sum(weight.numel() for weight in new)


def active_parameters(text: Any, layers: int) -> int:
    """Parameters of the decoder layers that a token multiplies: all of them, or of a mixture of experts those of the
    `num_experts_per_tok` experts of a token.

    An expert has three matrices of hidden x intermediate numbers, as in Mixtral and Qwen.

    Args:
        text: configuration of the language model.
        layers: parameters of all layers.
    """
    experts = number_of(text, "num_local_experts", "num_experts", "n_routed_experts")
    used = number_of(text, "num_experts_per_tok")
    if not experts or not used:
        return layers
    size = number_of(text, "moe_intermediate_size") or required_number(text, "intermediate_size")
    idle = (experts - used) * 3 * required_number(text, "hidden_size") * size
    return max(layers - idle * required_number(text, "num_hidden_layers"), layers * used // experts)


def attention_numbers(text: Any) -> int:
    """Attention heads x numbers of a head, in all layers together; 0 for a model without attention."""
    heads = number_of(text, "num_attention_heads")
    return required_number(text, "num_hidden_layers") * heads * head_size(text) if heads else 0
