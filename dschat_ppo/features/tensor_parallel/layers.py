"""Tensor-parallel generation: each rank of a group holds a shard of every decoder layer (Shoeybi et
al. 2019).

transformers names the division of each layer in `base_model_tp_plan` of a config. Here it is
applied to the weights of a training engine for the duration of a rollout. A column-wise layer
computes some of its outputs. A row-wise layer computes some of the terms of each sum, which the
group then adds up. Embeddings, norms and the head stay whole on every rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import deepspeed
import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from dschat_ppo.common import dist
from dschat_ppo.config.schema import require
from dschat_ppo.engine.hybrid_engine import is_missing
from dschat_ppo.errors import UserError
from dschat_ppo.models.backbone import forward_replaced

# Styles of transformers' plans. Column-wise: outputs are divided; in the second style they are
# gathered again. Row-wise: inputs are divided; in the second style by the layer itself.
COLUMN_WISE = ("colwise", "colwise_gather_output")
ROW_WISE = ("rowwise", "rowwise_split_input")
REPLICATED = ("replicated_with_grad_allreduce",)  # norms of single heads


@dataclass(frozen=True)
class TensorParallel:
    """This rank's place in a group of ranks that generates together."""

    group: dist.Group
    rank: int  # within the group
    size: int  # ranks of the group
    layers: int  # decoder layers that are gathered at a time, to be divided


def reason_not_to_shard(config: PretrainedConfig, undivided: str | None = None) -> str | None:
    """Why `--inference_tp_size` gathers the layers of a model one at a time; None if it divides
    them. `undivided`: why the flags exclude it, if they do."""
    if undivided is not None:
        return undivided
    plan = tensor_parallel_plan(config)
    model_type = config.get_text_config().model_type
    if not plan:
        return f"transformers has no tensor-parallel plan for {model_type} models"
    unknown = sorted(set(plan.values()) - {*COLUMN_WISE, *ROW_WISE, *REPLICATED})
    if unknown:
        return f"the plan of {model_type} models has {', '.join(unknown)}, which is not supported"
    return None


def check_tensor_parallel(
    config: PretrainedConfig, size: int, ranks: int, undivided: str | None = None
) -> None:
    """Check that `--inference_tp_size` suits the ranks and, if its layers are divided, the model.

    Args:
        config: of the model.
        size: ranks of a group.
        ranks: all of the run.
        undivided: why the flags exclude divided layers; None if they do not.

    Raises:
        UserError: the size divides neither the ranks nor a dimension of the layers.
    """
    if size == 1:
        return
    flag = f"--inference_tp_size {size}"
    instead = "use --unpin_actor_parameters, which gathers one layer at a time"
    require(
        ranks % size == 0, f"{flag} must divide the number of ranks, {ranks}: set it to a divisor"
    )
    if reason_not_to_shard(config, undivided):
        return
    text_config = config.get_text_config()
    heads = text_config.num_attention_heads
    dimensions = {
        "attention heads": heads,
        "key-value heads": getattr(text_config, "num_key_value_heads", None) or heads,
        "MLP columns": text_config.intermediate_size,
    }
    for name, count in dimensions.items():
        require(
            count % size == 0,
            f"{flag} must divide the model's {count} {name}: lower it, or {instead}",
        )


def tensor_parallel_plan(config: PretrainedConfig) -> dict[str, str]:
    """Names of layers inside the base model, with `*` for their index -> style; {} if transformers
    has no plan."""
    return dict(getattr(config.get_text_config(), "base_model_tp_plan", None) or {})


@contextmanager
def sharded_layers(model: PreTrainedModel, parallel: TensorParallel) -> Iterator[None]:
    """Hold this rank's shard of the linear layers in the decoder layers of `model` inside the
    block. `parallel`: this rank's group, and how many decoder layers are gathered at a time.

    Forward passes inside the block are collective over the group. Entering is collective over all
    ranks, and leaves ZeRO-3 partitions as they are. Without ZeRO-3 the shards are views of the
    whole weights.
    """
    decoder_layers = _linear_layers(model)
    with ExitStack() as stack:
        for start in range(0, len(decoder_layers), parallel.layers):
            gathered_together = decoder_layers[start : start + parallel.layers]
            layers = list(chain.from_iterable(gathered_together))
            weights: list[tuple[Any, int]] = []
            for layer, style in layers:
                weights += _weights_to_shard(layer, style)
            missing = [weight for weight, _ in weights if is_missing(weight)]
            missing_ids = {id(weight) for weight in missing}
            with deepspeed.zero.GatheredParameters(missing):
                shards = [
                    _shard(weight, dim, parallel, copied=id(weight) in missing_ids)
                    for weight, dim in weights
                ]
            for (weight, _), shard in zip(weights, shards, strict=True):
                stack.callback(setattr, weight, "data", weight.data)
                weight.data = shard
            for layer, style in layers:
                forward = partial(_forward, layer, style, parallel)
                stack.enter_context(forward_replaced(layer, forward))
        yield


def _linear_layers(model: PreTrainedModel) -> list[list[tuple[nn.Linear, str]]]:
    """The linear layers of each decoder layer that are divided, and their styles."""
    plan = tensor_parallel_plan(model.config)
    prefix = f"{model.base_model_prefix}."
    by_decoder_layer: dict[int, list[tuple[nn.Linear, str]]] = {}
    for name, module in model.named_modules():
        pattern = re.sub(r"\.\d+", ".*", name.removeprefix(prefix))
        style = plan.get(pattern, REPLICATED[0])
        if style in REPLICATED:
            continue
        if type(module) is not nn.Linear:
            raise UserError(
                f"--inference_tp_size: {name} is a {type(module).__name__}, not a linear layer"
            )
        layer_index = int(re.findall(r"\.(\d+)", name)[0])
        by_decoder_layer.setdefault(layer_index, []).append((module, style))
    return [by_decoder_layer[index] for index in sorted(by_decoder_layer)]


def _weights_to_shard(layer: nn.Linear, style: str) -> list[tuple[Any, int]]:
    """The parameters of a layer that are divided, each with its dimension; a row-wise bias stays
    whole."""
    if style in ROW_WISE:
        return [(layer.weight, 1)]
    if layer.bias is None:
        return [(layer.weight, 0)]
    return [(layer.weight, 0), (layer.bias, 0)]


def _shard(weight: Tensor, dim: int, parallel: TensorParallel, copied: bool) -> Tensor:
    """This rank's shard of a weight: a view, or a copy if the whole weight will be freed."""
    length = weight.shape[dim]
    if length % parallel.size:
        raise UserError(
            f"--inference_tp_size {parallel.size} does not divide a layer of {length} columns"
        )
    shard = weight.data.chunk(parallel.size, dim=dim)[parallel.rank]
    if copied:
        return shard.clone(memory_format=torch.contiguous_format)
    return shard


def _forward(layer: nn.Linear, style: str, parallel: TensorParallel, inputs: Tensor) -> Tensor:
    """(..., in) -> (..., out), where `in` or `out` may be this rank's shard."""
    if style in ROW_WISE:
        if style == "rowwise_split_input":
            inputs = inputs.chunk(parallel.size, dim=-1)[parallel.rank]
        # in fp32: the sum of rounded terms is then rounded only once more
        partial_sum = nn.functional.linear(inputs, layer.weight).float()
        total = dist.all_reduce(partial_sum, group=parallel.group).to(inputs.dtype)
        if layer.bias is None:
            return total
        return total + layer.bias
    outputs = nn.functional.linear(inputs, layer.weight, layer.bias)
    if style == "colwise":
        return outputs
    # (size, ..., out / size)
    gathered = dist.gather_cat(outputs.unsqueeze(0), group=parallel.group)
    return torch.cat(list(gathered), dim=-1)
