"""The weights of an adapter in a model: read from its folder, and merged into those of its base."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dschat_ppo.errors import UserError
from dschat_ppo.models.model_folders import adapter_weights

MATRICES = ("lora_A", "lora_B", "lora_magnitude_vector")  # the parts of an adapter in peft's layer; the last for DoRA
LM_HEADS = ("lm_head.", "embed_out.")  # of language models; classifiers do not have them


def load_adapter_weights(model: PreTrainedModel, folder: str, name: str) -> dict[str, Tensor]:
    """Copy the weights in an adapter folder into the adapter `name` of `model`, and its whole layers into the model.

    Returns them as the file has them, by their names in the model, on its device.
    """
    import deepspeed

    weights = adapter_weights(folder, name)
    parameters: dict[str, Any] = dict(model.named_parameters())
    wanted = {key for key in parameters if any(f".{matrix}.{name}." in key for matrix in MATRICES)}
    weights = {key: weight for key, weight in weights.items() if not key.startswith(LM_HEADS) or key in parameters}
    faults = {
        "missing": wanted - weights.keys(),
        "unexpected": weights.keys() - parameters.keys(),
        "wrong shape": {key for key in weights if key in parameters and _shape(parameters[key]) != weights[key].shape},
    }
    found = [f"{fault}: {', '.join(sorted(keys)[:3])}" for fault, keys in faults.items() if keys]
    if found:
        raise UserError(f"{folder}: the adapter does not fit {type(model).__name__}: {'; '.join(found)}")
    for key, weight in weights.items():
        target = parameters[key]
        partitioned = hasattr(target, "ds_id")
        with deepspeed.zero.GatheredParameters([target], modifier_rank=0, enabled=partitioned), torch.no_grad():
            target.copy_(weight)
    return {key: weight.to(parameters[key].device) for key, weight in weights.items()}


def _shape(parameter: Any) -> torch.Size:
    """The shape of a parameter that may be partitioned."""
    shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
    return shape


def merged_weight(layer: Any, name: str, weight: Tensor, a: Tensor, b: Tensor, magnitude: Tensor | None) -> Tensor:
    """The weight of a layer with its adapter merged, in fp32 and in the layout of `weight`.

    LoRA: `W + s B A`. DoRA: each row of this divided by its norm and multiplied by its magnitude.

    Args:
        layer: peft's layer, for its scale s and its layout; `name` is the adapter's.
        weight: of the base layer, (out, in), or (in, out) for GPT-2's `Conv1D`.
        a, b: (rank, in) and (out, rank).
        magnitude: (out,) for DoRA; None for LoRA.
    """
    transposed = bool(layer.fan_in_fan_out)
    whole = weight.float().T if transposed else weight.float()
    whole = whole + layer.scaling[name] * (b.float() @ a.float())
    if magnitude is not None:
        whole = whole * (magnitude.float() / whole.norm(dim=1)).unsqueeze(1)
    return whole.T if transposed else whole
