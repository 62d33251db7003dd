"""Write a trained model as an ordinary Hugging Face folder, after a check that all its weights are finite."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from dschat_ppo.common import dist
from dschat_ppo.common.atomic_files import PARTIAL, empty_folder, move_files_up
from dschat_ppo.common.heartbeat import heartbeat, watchdog_paused
from dschat_ppo.errors import NonFiniteError, StorageError
from dschat_ppo.models.architectures import first_position
from dschat_ppo.models.scalar_model import ScalarModel
from dschat_ppo.types import Engine


def require_finite_weights(role: str, engine: Engine) -> None:
    """Check all weights for NaN and infinity, on each rank those that it holds. Collective; call it between updates.

    Updates from gradients that are not finite are skipped, but an update from finite gradients can overflow. The check
    reads the weights in the number format of training: if an fp32 master weight is not finite, or is beyond the range
    of fp16, so is its copy.

    Args:
        role: of the model, for the message.
        engine: DeepSpeed engine around it; its weights are whole or partitioned by ZeRO-3.

    Raises:
        NonFiniteError: a weight of some rank is NaN or infinite; the same text on every rank.
    """
    bad = []
    for name, weight in engine.module.named_parameters():
        part = weight.detach()
        if hasattr(weight, "ds_id"):  # this rank's partition; ZeRO-3 pads the last one with uninitialised memory
            part = weight.ds_tensor.detach().flatten()
            part = part[: max(0, weight.ds_numel - dist.rank() * part.numel())]
        # Without a copy: the least and the largest number are NaN if any number is.
        if part.numel() and not torch.stack(torch.aminmax(part)).isfinite().all():
            bad.append(name)
    problem = None
    if bad:
        problem = f"rank {dist.rank()}: {bad[0]}" + (f" and {len(bad) - 1} more" if len(bad) > 1 else "")
    first = dist.first_problem(problem)
    if first is not None:
        raise NonFiniteError(
            f"{role}: weights are not finite ({first}): an update overflowed although its gradients were finite. They "
            "are not saved. Lower the learning rate or raise --adam_epsilon; --resume_force resumes from the newest "
            "checkpoint"
        )


def gather_state(model: nn.Module) -> dict[str, Tensor]:
    """All weights of `model` in host memory on rank 0, {} elsewhere. Under ZeRO-3 one tensor is gathered at a time.

    Collective: every rank calls it.
    """
    import deepspeed

    state: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        heartbeat()
        with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            if dist.is_main():
                state[name] = parameter.detach().cpu().clone()
    if dist.is_main():
        persistent = model.state_dict()
        state |= {name: b.detach().cpu().clone() for name, b in model.named_buffers() if name in persistent}
    return state


def save_model(
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    folder: str | Path,
    described: Mapping[str, float | str | None] | None = None,
    weights: Mapping[str, Tensor] | None = None,
    ends: Sequence[int] = (),
) -> None:
    """Write safetensors, config, tokenizer with its template and, for language models, the generation config.

    Collective: every rank calls it; rank 0 writes. Existing files are replaced only by complete ones.

    Args:
        engine: DeepSpeed engine around a `PolicyModel` or a `ScalarModel`.
        tokenizer: saved with the weights.
        folder: created if needed.
        described: numbers and texts to store in the model's config under these names; None removes an entry.
        weights: whole tensors, on rank 0, that replace the engine's weights of these names.
        ends: tokens that end a response, besides the tokenizer's EOS; `generate` of plain transformers stops at them.

    Raises:
        StorageError: the folder cannot be written; on every rank.
    """
    module = engine.module
    model: PreTrainedModel = module.classifier if isinstance(module, ScalarModel) else module.lm
    state = gather_state(model) | dict(weights or {})
    problem = None
    if dist.is_main():
        model.config.dtype = next(iter(state.values())).dtype
        for name, value in (described or {}).items():
            if value is not None:
                setattr(model.config, name, value)
            elif hasattr(model.config, name):
                delattr(model.config, name)
        if not isinstance(module, ScalarModel):
            model.generation_config = _generation_config(model, tokenizer, ends)
        elif first_position(model.config) == 0:  # RoBERTa-like models count positions from PAD, so they keep it
            # transformers scores a row at its last non-PAD token, so PAD must not be a token that ends rows.
            pad = tokenizer.pad_token_id
            model.config.pad_token_id = None if pad in (tokenizer.eos_token_id, *ends) else pad
        problem = _write(model, state, tokenizer, Path(folder))
    problem = dist.broadcast_object(problem)
    if problem is not None:
        raise StorageError(problem)


def _write(
    model: PreTrainedModel, state: dict[str, Tensor], tokenizer: PreTrainedTokenizerBase, folder: Path
) -> str | None:
    """Write to a folder inside `folder`, then move the files up; returns why that is impossible, or None."""
    try:
        partial = empty_folder(folder / PARTIAL)
        with torch.no_grad(), watchdog_paused():
            # Use the names that transformers loads, not those of a DeepSpeed-Chat checkpoint.
            model.save_pretrained(partial, state_dict=state, save_original_format=False)
            tokenizer.save_pretrained(partial)
        move_files_up(partial)
    except (OSError, SafetensorError) as problem:
        reason = problem.strerror if isinstance(problem, OSError) else problem
        return f"{folder}: the model cannot be written ({reason}); free space, then run the same command again"
    return None


def _generation_config(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, ends: Sequence[int]
) -> GenerationConfig:
    """The model's own generation config, with the EOS, the other ends of a response and the PAD of its training."""
    config = model.generation_config or GenerationConfig()
    listed = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    trained = (tokenizer.eos_token_id, *ends)
    kept = listed if set(listed) & set(trained) else []  # else they belong to another tokenizer
    stops = list(dict.fromkeys((*trained, *kept)))
    config.eos_token_id = stops if len(stops) > 1 else stops[0]
    config.pad_token_id = tokenizer.pad_token_id
    config.bos_token_id = tokenizer.bos_token_id
    try:
        config.validate(strict=True)
    except ValueError:  # for instance a temperature with do_sample=false: transformers loads it but does not save it
        config.do_sample = True
    return config
