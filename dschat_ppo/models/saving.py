"""Writing a trained model as an ordinary Hugging Face folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from dschat_ppo.common.atomic_files import PARTIAL, empty_folder, move_files_up
from dschat_ppo.common.dist import broadcast_object, is_main
from dschat_ppo.common.heartbeat import heartbeat, watchdog_paused
from dschat_ppo.errors import StorageError
from dschat_ppo.models.architectures import first_position
from dschat_ppo.models.scalar_head import ScalarModel
from dschat_ppo.types import Engine


def gather_state(model: nn.Module) -> dict[str, Tensor]:
    """All weights of `model` in host memory on rank 0, {} elsewhere. Under ZeRO-3 one tensor is gathered at a time.

    Collective: every rank calls it.
    """
    import deepspeed

    state: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        heartbeat()
        with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            if is_main():
                state[name] = parameter.detach().cpu().clone()
    if is_main():
        persistent = model.state_dict()
        state |= {name: b.detach().cpu().clone() for name, b in model.named_buffers() if name in persistent}
    return state


def save_model(
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    folder: str | Path,
    described: Mapping[str, float | None] | None = None,
    weights: Mapping[str, Tensor] | None = None,
    ends: Sequence[int] = (),
) -> None:
    """Write safetensors, config, tokenizer with its template and, for language models, the generation config.

    Collective: every rank calls it; rank 0 writes. Files that are there are replaced by whole ones.

    Args:
        engine: DeepSpeed engine around a `PolicyModel` or a `ScalarModel`.
        tokenizer: saved beside the weights.
        folder: created if needed.
        described: numbers about the model that stand in its config under these names; None takes one out.
        weights: whole tensors, on rank 0, in place of the engine's own of these names.
        ends: tokens that answers end with, besides the tokenizer's EOS; `generate` of plain transformers stops at them.

    Raises:
        StorageError: the folder cannot be written; on every rank.
    """
    module = engine.module
    model: PreTrainedModel = module.classifier if isinstance(module, ScalarModel) else module.lm
    state = gather_state(model) | dict(weights or {})
    problem = None
    if is_main():
        model.config.dtype = next(iter(state.values())).dtype
        _describe(model, described or {})
        if isinstance(module, ScalarModel):
            _describe_padding(model, tokenizer, ends)
        else:
            model.generation_config = _generation_config(model, tokenizer, ends)
        problem = _write(model, state, tokenizer, Path(folder))
    problem = broadcast_object(problem)
    if problem is not None:
        raise StorageError(problem)


def _describe(model: PreTrainedModel, described: Mapping[str, float | None]) -> None:
    for name, value in described.items():
        if value is not None:
            setattr(model.config, name, value)
        elif hasattr(model.config, name):
            delattr(model.config, name)


def _write(
    model: PreTrainedModel, state: dict[str, Tensor], tokenizer: PreTrainedTokenizerBase, folder: Path
) -> str | None:
    """Write beside the place, then into it; why that cannot be done, or None."""
    try:
        partial = empty_folder(folder / PARTIAL)
        with torch.no_grad(), watchdog_paused():
            # not the names that a DeepSpeed-Chat checkpoint came with, but those that transformers loads
            model.save_pretrained(partial, state_dict=state, save_original_format=False)
            tokenizer.save_pretrained(partial)
        move_files_up(partial)
    except (OSError, SafetensorError) as problem:
        reason = problem.strerror if isinstance(problem, OSError) else problem
        return f"{folder}: the model cannot be written ({reason}); free space, then run the same command again"
    return None


def _describe_padding(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, ends: Sequence[int]) -> None:
    """transformers scores a row at its last non-PAD token, so PAD must not be a token that ends rows.

    RoBERTa and its kin keep theirs: their positions are counted from it.
    """
    if first_position(model.config) > 0:
        return
    pad = tokenizer.pad_token_id
    model.config.pad_token_id = None if pad in (tokenizer.eos_token_id, *ends) else pad


def _generation_config(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, ends: Sequence[int]
) -> GenerationConfig:
    """The model's own generation settings, with the EOS, other ends of an answer and PAD that it was trained with."""
    config = model.generation_config or GenerationConfig()
    listed = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    trained = (tokenizer.eos_token_id, *ends)
    kept = listed if set(listed) & set(trained) else []  # else they are another tokenizer's
    stops = list(dict.fromkeys((*trained, *kept)))
    config.eos_token_id = stops if len(stops) > 1 else stops[0]
    config.pad_token_id = tokenizer.pad_token_id
    config.bos_token_id = tokenizer.bos_token_id
    try:
        config.validate(strict=True)
    except ValueError:  # such as a temperature beside do_sample=false: transformers loads it, but refuses to save it
        config.do_sample = True
    return config
