"""Embeddings for tokens that were added to a tokenizer after its model was trained (`--resize_vocabulary`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dschat_ppo.errors import UserError


def grow_vocabulary(model: PreTrainedModel, size: int) -> bool:
    """Give `model` an embedding, and where it has one a row of the head, for each of `size` tokens.

    A new row is the mean of the old ones, so that a new token is about as likely as the average one (Hewitt 2021), and
    every rank, and actor and reference, come to the same rows. Weights that are tied stay so. Under ZeRO-3 the new
    parameters are whole on every rank; `deepspeed.initialize` partitions them.

    Args:
        model: as loaded, before it is given to an engine, and once transformers' ZeRO-3 mode has ended: in it no model
            can be built without weights, to compare with.
        size: number of tokens. Nothing happens if there are rows enough.

    Returns:
        Whether the model has grown; then its config says so.

    Raises:
        UserError: the model keeps further weights for each token.
    """
    config = model.config.get_text_config()
    if size <= config.vocab_size:
        return False
    modules = [module for module in (model.get_input_embeddings(), model.get_output_embeddings()) if module is not None]
    grown: dict[nn.Parameter, nn.Parameter] = {}  # tied weights are one parameter
    for module in modules:
        for name, old in list(module.named_parameters(recurse=False)):
            if old not in grown:
                grown[old] = nn.Parameter(_with_mean_rows(old, size), requires_grad=old.requires_grad)
            setattr(module, name, grown[old])
        for count in ("num_embeddings", "out_features"):
            if hasattr(module, count):
                setattr(module, count, size)
    config.vocab_size = size
    with torch.device("meta"):
        wanted = dict(type(model)(model.config).named_parameters(remove_duplicate=False))
    others = [name for name, weight in model.named_parameters() if _shape(weight) != wanted[name].shape]
    if others:
        raise UserError(
            f"--resize_vocabulary: {type(model).__name__} keeps a row for each token in {others[0]} too; take a model "
            "with an embedding and a head alone, or a tokenizer without added tokens"
        )
    if hasattr(model, "vocab_size"):
        model.vocab_size = size
    return True


def _with_mean_rows(weight: nn.Parameter, size: int) -> Tensor:
    """A whole copy of `weight` (rows, ...) with rows of the mean after it, (size, ...)."""
    import deepspeed

    with deepspeed.zero.GatheredParameters([weight], enabled=hasattr(weight, "ds_id")), torch.no_grad():
        mean = weight.float().mean(dim=0, keepdim=True).to(weight.dtype)
        return torch.cat([weight, mean.expand(size - weight.shape[0], *mean.shape[1:])])


def _shape(weight: Any) -> tuple[int, ...]:
    return tuple(getattr(weight, "ds_shape", weight.shape))
