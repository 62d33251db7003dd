"""Check that a model has an embedding for each token of its tokenizer, and add missing ones."""

from __future__ import annotations

import deepspeed
import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from dschat_ppo.errors import UserError
from dschat_ppo.models.tokenizers import read_tokenizer


def check_vocabulary(
    tokenizer: PreTrainedTokenizerBase,
    config: PretrainedConfig,
    flag: str,
    folder: str,
    other: bool = False,
    resize: bool = False,
) -> None:
    """Check that the model at `folder`, named by `flag`, has an embedding for every id of
    `tokenizer`. If the tokenizer is that of an `other` model (the actor's), the model's own must be
    equal to it. `resize`: missing embeddings will be added (`--resize_vocabulary`)."""
    size = getattr(config.get_text_config(), "vocab_size", None)
    if not isinstance(size, int):
        raise UserError(
            f"{flag} {folder}: config.json has no 'vocab_size', so it is not a language model's"
        )
    if len(tokenizer) > size and not resize:
        if other:
            whose = "the actor's tokenizer; train the reward model from the same base, or"
        else:
            whose = "its tokenizer;"
        raise UserError(
            f"{flag} {folder}: its vocabulary of {size} does not fit the {len(tokenizer)} tokens of"
            f" {whose} train with --resize_vocabulary, which adds the missing rows"
        )
    if other and read_tokenizer(folder, flag).get_vocab() != tokenizer.get_vocab():
        raise UserError(
            f"{flag} {folder}: its tokenizer differs from the actor's, so it would score other"
            " text; train the reward model from the same base"
        )


def grow_vocabulary(model: PreTrainedModel, size: int) -> bool:
    """Add rows to the embedding of `model`, and to its head if it has one, up to `size` tokens;
    returns whether it did. A new row is the mean of the old ones: a new token is about as likely as
    an average one (Hewitt 2021), and all ranks compute the same. Tied weights stay tied; other
    weights with a row for each token are refused. Call it before `model` gets an engine, and
    outside transformers' ZeRO-3 mode; new parameters are whole until `deepspeed.initialize`."""
    config = model.config.get_text_config()
    if size <= config.vocab_size:
        return False
    modules = [model.get_input_embeddings()]
    head = model.get_output_embeddings()
    if head is not None:
        modules.append(head)
    grown: dict[nn.Parameter, nn.Parameter] = {}  # tied weights are one parameter
    for module in modules:
        for name, old in list(module.named_parameters(recurse=False)):
            if old not in grown:
                grown[old] = nn.Parameter(
                    _with_mean_rows(old, size), requires_grad=old.requires_grad
                )
            setattr(module, name, grown[old])
        for count in ("num_embeddings", "out_features"):
            if hasattr(module, count):
                setattr(module, count, size)
    config.vocab_size = size
    with torch.device("meta"):
        larger_model = type(model)(model.config)
    new_shapes = {
        name: weight.shape for name, weight in larger_model.named_parameters(remove_duplicate=False)
    }
    not_grown = [
        name
        for name, weight in model.named_parameters()
        if tuple(getattr(weight, "ds_shape", weight.shape)) != new_shapes[name]
    ]
    if not_grown:
        raise UserError(
            f"--resize_vocabulary: {type(model).__name__} keeps a row for each token in"
            f" {not_grown[0]} too; take a model that has only an embedding and a head, or a"
            " tokenizer without added tokens"
        )
    if hasattr(model, "vocab_size"):
        model.vocab_size = size
    return True


def _with_mean_rows(weight: nn.Parameter, size: int) -> Tensor:
    """A whole copy of `weight` (rows, ...), followed by rows of its mean: (size, ...)."""
    with deepspeed.zero.GatheredParameters([weight]), torch.no_grad():
        mean = weight.float().mean(dim=0, keepdim=True).to(weight.dtype)
        return torch.cat([weight, mean.expand(size - weight.shape[0], *mean.shape[1:])])
