"""Embeddings for tokens added to a tokenizer after its model was trained (`--resize_vocabulary`)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dschat_ppo.errors import UserError


def grow_vocabulary(model: PreTrainedModel, size: int) -> bool:
    """Add rows to the embedding of `model`, and to its head if it has one, up to `size` tokens; returns whether it did.

    A new row is the mean of the old ones: a new token is about as likely as an average one (Hewitt 2021), and all
    ranks, and actor and reference, compute the same rows. Tied weights stay tied; other weights with a row for each
    token are refused. Under ZeRO-3 the new parameters are whole on every rank; `deepspeed.initialize` partitions them.

    Call it before `model` gets an engine, and outside transformers' ZeRO-3 mode, in which the model without weights
    that this function compares with cannot be built.
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
    others = [
        name
        for name, weight in model.named_parameters()
        if tuple(getattr(weight, "ds_shape", weight.shape)) != wanted[name].shape
    ]
    if others:
        raise UserError(
            f"--resize_vocabulary: {type(model).__name__} keeps a row for each token in {others[0]} too; take a model "
            "that has only an embedding and a head, or a tokenizer without added tokens"
        )
    if hasattr(model, "vocab_size"):
        model.vocab_size = size
    return True


def _with_mean_rows(weight: nn.Parameter, size: int) -> Tensor:
    """A whole copy of `weight` (rows, ...), followed by rows of its mean: (size, ...)."""
    import deepspeed

    with deepspeed.zero.GatheredParameters([weight], enabled=hasattr(weight, "ds_id")), torch.no_grad():
        mean = weight.float().mean(dim=0, keepdim=True).to(weight.dtype)
        return torch.cat([weight, mean.expand(size - weight.shape[0], *mean.shape[1:])])
