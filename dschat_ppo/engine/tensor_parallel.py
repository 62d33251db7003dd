"""Tensor-parallel generation: each rank of a group holds a part of every decoder layer (Shoeybi et al. 2019).

transformers names the division of each layer in `base_model_tp_plan` of a config. Here it is applied to the weights of
a training engine for the duration of a rollout: a column-wise layer computes a part of its outputs, a row-wise layer a
part of each sum, which the group then adds up. Embeddings, norms and the head stay whole on every rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from dschat_ppo.common import dist
from dschat_ppo.config.schema import require
from dschat_ppo.errors import UserError
from dschat_ppo.models.backbone import forward_replaced

COLUMNS = ("colwise", "colwise_gather_output")  # outputs are divided; in the second style, gathered again
ROWS = ("rowwise", "rowwise_split_input")  # inputs are divided; in the second style, by this layer itself
WHOLE = ("replicated_with_grad_allreduce",)  # norms of single heads


@dataclass(frozen=True)
class TensorParallel:
    """This rank's number `rank` in the `group` of `size` ranks that generate together. `layers`: decoder layers whose
    weights are gathered at a time, to divide them."""

    group: dist.Group
    rank: int
    size: int
    layers: int


def tensor_parallel(size: int, layers: int) -> TensorParallel | None:
    """Divide all ranks into groups of `size` consecutive ones; None for groups of one. Collective."""
    if size == 1:
        return None
    return TensorParallel(dist.group_of(size), dist.rank() % size, size, layers)


def reason_not_to_divide(config: PretrainedConfig, lora_dim: int) -> str | None:
    """Why `--inference_tp_size` gathers the layers of a model one at a time; None if it divides them."""
    if lora_dim > 0:
        return "layers with LoRA are not divided"
    plan, kind = plan_of(config), config.get_text_config().model_type
    if not plan:
        return f"transformers has no tensor-parallel plan for {kind} models"
    unknown = sorted(set(plan.values()) - {*COLUMNS, *ROWS, *WHOLE})
    return f"the plan of {kind} models has {', '.join(unknown)}, which is not supported" if unknown else None


def check_tensor_parallel(config: PretrainedConfig, size: int, ranks: int, lora_dim: int = 0) -> None:
    """Check that the size suits the ranks and, if its layers are divided, the model, before it is loaded."""
    if size == 1:
        return
    flag, text = f"--inference_tp_size {size}", config.get_text_config()
    instead = "use --unpin_actor_parameters, which gathers one layer at a time"
    require(ranks % size == 0, f"{flag} must divide the number of ranks, {ranks}: set it to a divisor")
    if reason_not_to_divide(config, lora_dim):
        return
    heads = text.num_attention_heads
    for name, count in (
        ("attention heads", heads),
        ("key-value heads", getattr(text, "num_key_value_heads", None) or heads),
        ("MLP columns", text.intermediate_size),
    ):
        require(count % size == 0, f"{flag} must divide the model's {count} {name}: lower it, or {instead}")


def plan_of(config: PretrainedConfig) -> dict[str, str]:
    """Names of layers inside the base model, with `*` for their number -> style; {} if transformers has no plan."""
    return dict(getattr(config.get_text_config(), "base_model_tp_plan", None) or {})


@contextmanager
def divided(model: PreTrainedModel, parallel: TensorParallel) -> Iterator[None]:
    """Hold this rank's part of the decoder layers of `model`, all linear, for the duration of the block. Its forward
    passes are then collective over the group. Entering is collective over all ranks, and leaves ZeRO-3 partitions as
    they are; without ZeRO-3 the parts are views of the whole weights."""
    with ExitStack() as stack:
        for layers in _in_chunks(_linear_layers(model), parallel.layers):
            weights = [entry for layer, style in layers for entry in _divided_weights(layer, style)]
            missing = [weight for weight, _ in weights if is_missing(weight)]
            gathered = {id(weight) for weight in missing}
            with deepspeed.zero.GatheredParameters(missing, enabled=bool(missing)):
                parts = [_part(weight, along, parallel, id(weight) in gathered) for weight, along in weights]
            for (weight, _), part in zip(weights, parts, strict=True):
                stack.callback(setattr, weight, "data", weight.data)
                weight.data = part
            for layer, style in layers:
                stack.enter_context(forward_replaced(layer, partial(_forward, layer, style, parallel)))
        yield


def is_missing(weight: Any) -> bool:
    """Whether a ZeRO-3 parameter has to be gathered; small ones are whole on every rank."""
    return hasattr(weight, "ds_id") and weight.ds_status == ZeroParamStatus.NOT_AVAILABLE


def _linear_layers(model: PreTrainedModel) -> dict[int, list[tuple[nn.Linear, str]]]:
    """The layers to divide, with their styles, by the number of their decoder layer."""
    plan, found = plan_of(model.config), dict[int, list[tuple[nn.Linear, str]]]()
    prefix = f"{model.base_model_prefix}."
    for name, module in model.named_modules():
        style = plan.get(re.sub(r"\.\d+", ".*", name.removeprefix(prefix)), WHOLE[0])
        if style in WHOLE:
            continue
        if type(module) is not nn.Linear:
            raise UserError(f"--inference_tp_size: {name} is a {type(module).__name__}, not a linear layer")
        found.setdefault(int(re.findall(r"\.(\d+)", name)[0]), []).append((module, style))
    return found


def _in_chunks(layers: dict[int, list[Any]], count: int) -> Iterator[list[Any]]:
    """The entries of `count` numbers at a time."""
    numbers = sorted(layers)
    for start in range(0, len(numbers), count):
        yield [entry for number in numbers[start : start + count] for entry in layers[number]]


def _divided_weights(layer: nn.Linear, style: str) -> list[tuple[Any, int]]:
    """The parameters of a layer that are divided, and along which dimension; a row-wise bias stays whole."""
    if style in ROWS:
        return [(layer.weight, 1)]
    return [(layer.weight, 0), *([(layer.bias, 0)] if layer.bias is not None else [])]


def _part(weight: Tensor, along: int, parallel: TensorParallel, copied: bool) -> Tensor:
    """This rank's part of a weight: a view, or a copy if the whole weight will be freed."""
    length = weight.shape[along]
    if length % parallel.size:
        raise UserError(f"--inference_tp_size {parallel.size} does not divide a layer of {length} columns")
    part = weight.data.chunk(parallel.size, dim=along)[parallel.rank]
    return part.clone(memory_format=torch.contiguous_format) if copied else part


def _forward(layer: nn.Linear, style: str, parallel: TensorParallel, inputs: Tensor) -> Tensor:
    """(..., in) -> (..., out), where `in` or `out` may be this rank's part."""
    if style in ROWS:
        if style == "rowwise_split_input":
            inputs = inputs.chunk(parallel.size, dim=-1)[parallel.rank]
        # in fp32: the sum of rounded parts is then rounded only once more
        total = dist.all_reduce(nn.functional.linear(inputs, layer.weight).float(), group=parallel.group)
        total = total.to(inputs.dtype)
        return total if layer.bias is None else total + layer.bias
    outputs = nn.functional.linear(inputs, layer.weight, layer.bias)
    if style == "colwise":
        return outputs
    gathered = dist.gather_cat(outputs.unsqueeze(0), group=parallel.group)  # (size, ..., out / size)
    return torch.cat(list(gathered), dim=-1)
