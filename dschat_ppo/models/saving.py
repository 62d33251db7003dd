"""Write a trained model as an ordinary Hugging Face or peft folder, after a check that all its
weights are finite."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from dschat_ppo.common import dist
from dschat_ppo.common.atomic_files import PARTIAL, empty_folder, move_files_up, way_out
from dschat_ppo.common.heartbeat import heartbeat, watchdog_paused
from dschat_ppo.common.logging import logger
from dschat_ppo.config.step_config import StepConfig
from dschat_ppo.errors import NonFiniteError, StorageError
from dschat_ppo.features import hooks
from dschat_ppo.models.adapters.folders import ADAPTER, ADAPTER_CONFIG, ADAPTER_WEIGHTS, saved_name
from dschat_ppo.models.adapters.layers import adapter_layers, is_adapter_parameter
from dschat_ppo.models.adapters.merging import matrices_of, merged_weight
from dschat_ppo.models.architectures import first_position
from dschat_ppo.models.loading import DTYPES
from dschat_ppo.models.model_folders import SCORE
from dschat_ppo.models.tokenizers import save_tokenizer
from dschat_ppo.models.untrained_parts import add_untrained, config_around
from dschat_ppo.models.weight_headers import checkpoint_dtype
from dschat_ppo.models.wrapped_models import ScalarModel, WrappedModel
from dschat_ppo.types import Engine

# Files of the two forms in which a model is saved.
OF_ADAPTERS = (ADAPTER_CONFIG, ADAPTER_WEIGHTS)
OF_WHOLE_MODELS = (
    "config.json",
    "generation_config.json",
    "model*.safetensors",
    "model.safetensors.index.json",
)


@dataclass(frozen=True)
class SavedBeside:
    """What a feature writes with a model that trains: parts of it that do not.

    Attributes:
        weights: (the model) -> the weights of these parts, under their names in the whole model.
        write_files: (the model, the folder that is written) writes their files.
        usage: (the model, whether an adapter is written) -> the section of `README.md` on how to
            use the model, if it is another one; None: the usual one.
    """

    weights: Callable[[PreTrainedModel], Mapping[str, Tensor]]
    write_files: Callable[[PreTrainedModel, Path], None]
    usage: Callable[[PreTrainedModel, bool], str | None]


@dataclass(frozen=True)
class SavedForm:
    """How a model is written.

    Attributes:
        ends: tokens that end a response, besides the tokenizer's EOS; `generate` of plain
            transformers stops at them.
        merge: merge an adapter instead of writing its folder.
        card: makes the text of `README.md` from whether an adapter is written, whether the
            tokenizer has a chat template, and the `usage` of `beside`; None: there is none.
        dtype: number format; None: that of the weights.
        beside: what is written with a whole model.
    """

    ends: Sequence[int] = ()
    merge: bool = True
    card: Callable[[bool, bool, str | None], str] | None = None
    dtype: torch.dtype | None = None
    beside: Sequence[SavedBeside] = ()


def parts_beside(config: StepConfig) -> list[SavedBeside]:
    """What features write with a whole model. A feature offers `saved_parts.beside_of(config)`, a
    `SavedBeside` or None."""
    beside_models = [beside_of(config) for beside_of in hooks("saved_parts.beside_of")]
    return [beside for beside in beside_models if beside is not None]


def saves_whole_model(config: StepConfig, prefix: str) -> bool:
    """Whether a model that trains is saved whole, with its adapter merged; else its adapter alone.
    If other weights train with an adapter, the adapter alone would not be the model. `prefix`: of
    the model's flags."""
    return not config.is_frozen(prefix) or bool(config.value("lora_merge"))


def saved_dtype(module: WrappedModel, save_dtype: str | None) -> torch.dtype | None:
    """The number format of a saved model: `save_dtype`, the value of the flag, else that of the
    folder from which `module` was loaded; None if that has no weights in such a format."""
    if save_dtype is not None:
        return DTYPES[save_dtype]
    start = module.pretrained.name_or_path
    if start and Path(start).is_dir():
        return checkpoint_dtype(start)
    return None


def cast_weights(
    state: dict[str, Tensor], dtype: torch.dtype | None, folder: str | Path
) -> dict[str, Tensor]:
    """The weights of a model in a number format (None: as they are). If a finite weight is beyond
    its range, as in fp16, all stay as they are, and a warning says so: the model of a long run is
    saved in any case. The tensors of `state` are replaced one by one, so that memory does not hold
    all of them twice."""
    if dtype is None:
        return state
    for name, weight in state.items():
        if weight.is_floating_point() and not is_within_range(weight, dtype):
            logger().warning(
                f"{folder}: saved in {weight.dtype}, because {name} has numbers beyond the range of"
                f" {dtype} (--save_dtype)"
            )
            return state
    for name, weight in state.items():
        if weight.is_floating_point():
            state[name] = weight.to(dtype)
    return state


def is_within_range(weight: Tensor, dtype: torch.dtype) -> bool:
    """Whether all numbers of a weight are within the range of a number format."""
    if weight.numel() == 0:
        return True
    least, largest = torch.aminmax(weight)
    return bool(torch.stack([least, largest]).to(dtype).isfinite().all())


def require_finite_weights(role: str, engine: Engine) -> None:
    """Check the weights that each rank holds for NaN and infinity, between updates: one from finite
    gradients can overflow. Collective: all raise the error. The check reads the weights in the
    number format of training; an fp32 master weight that is not finite, or beyond the range of
    fp16, shows there."""
    not_finite = []  # names of weights
    for name, weight in engine.module.named_parameters():
        if dist.is_partitioned(weight):
            shard = dist.rank_shard(weight)[1]
        else:
            shard = weight.detach()
        # Without a copy: the least and the largest number are NaN if any number is.
        if shard.numel() and not torch.stack(torch.aminmax(shard)).isfinite().all():
            not_finite.append(name)
    problem = None
    if not_finite:
        problem = f"rank {dist.rank()}: {not_finite[0]}"
        if len(not_finite) > 1:
            problem += f" and {len(not_finite) - 1} more"
    first_problem = dist.first_problem(problem)
    if first_problem is not None:
        raise NonFiniteError(
            f"{role}: weights are not finite ({first_problem}): an update overflowed although its"
            " gradients were finite. They are not saved. Lower the learning rate or raise"
            " --adam_epsilon; --resume_force resumes from the newest checkpoint"
        )


def gather_state(
    model: nn.Module, includes: Callable[[str], bool] | None = None
) -> dict[str, Tensor]:
    """All weights of `model` in host memory on rank 0, {} elsewhere. Under ZeRO-3 one tensor is
    gathered at a time. Collective. `includes`: name of a parameter -> whether to take it; None: all
    parameters, and the buffers."""
    import deepspeed

    state: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if includes is not None and not includes(name):
            continue
        heartbeat()
        with deepspeed.zero.GatheredParameters([parameter]):
            if dist.is_main():
                state[name] = parameter.detach().to("cpu", copy=True)
    if dist.is_main() and includes is None:
        persistent_names = model.state_dict().keys()
        for name, buffer in model.named_buffers():
            if name in persistent_names:
                state[name] = buffer.detach().to("cpu", copy=True)
    return state


def save_model(
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    folder: str | Path,
    config_entries: Mapping[str, float | str | None] | None = None,
    weights: Mapping[str, Tensor] | None = None,
    form: SavedForm = SavedForm(),  # noqa: B008  it is immutable
) -> None:
    """Write safetensors, config, tokenizer with its template and, for language models, the
    generation config.

    A model with a LoRA adapter is written as the model with the adapter merged, or as an adapter
    folder, which peft loads: the adapter, a score head, and the name of the base model.

    Collective: every rank calls it; rank 0 writes, and all raise a `StorageError`. Existing files
    are replaced only by complete ones. Those of the other form, which an earlier run may have left
    in the folder, are removed. On rank 0 the configuration of the model in memory changes as well.

    Args:
        engine: trains the model.
        tokenizer: is written beside it.
        folder: is made if it does not exist.
        config_entries: numbers and texts to store in the model's config under these names; None
            removes an entry.
        weights: whole tensors, on rank 0, that replace the engine's weights of these names, which
            are those of the model with its adapter. For an adapter folder they may only be of the
            adapter and of a score head.
        form: how it is written. Quantised weights are never merged.
    """
    model: PreTrainedModel = engine.module.pretrained
    as_adapter = bool(adapter_layers(model)) and (
        not form.merge or bool(getattr(model, "is_quantized", False))
    )
    includes: Callable[[str], bool] | None = None
    if as_adapter:
        includes = is_saved_without_base
    state = gather_state(model, includes)
    if weights is not None:
        state |= weights
    problem = None
    if dist.is_main():
        state = cast_weights(state, form.dtype, folder)
        # `write_model` does not know which weights are quantised
        form = replace(form, merge=not as_adapter)
        problem = write_model(engine.module, state, tokenizer, folder, config_entries, form)
    problem = dist.broadcast_object(problem)
    if problem is not None:
        raise StorageError(problem)


def write_model(
    module: WrappedModel,
    state: dict[str, Tensor],
    tokenizer: PreTrainedTokenizerBase,
    folder: str | Path,
    config_entries: Mapping[str, float | str | None] | None,
    form: SavedForm,
) -> str | None:
    """Write a model whose weights are `state`, not those of `module`; returns why it cannot be
    written, or None. `state` has the names of the transformers model in `module`; for an adapter
    folder only the weights of the adapter and of a score head, all in the number format in which
    they are written. The other arguments are those of `save_model`."""
    model: PreTrainedModel = module.pretrained
    is_lm = not isinstance(module, ScalarModel)
    model.config.dtype = next(iter(state.values())).dtype
    _set_entries(model.config, config_entries or {})
    if is_lm:
        model.generation_config = _config_for_generation(model, tokenizer, form.ends)
    else:
        _set_pad_of_scorer(model, tokenizer, form)
    folder = Path(folder)
    as_adapter = not form.merge and bool(adapter_layers(model))
    other_form: tuple[str, ...] = OF_ADAPTERS
    if as_adapter:
        other_form = OF_WHOLE_MODELS
    try:
        unfinished = empty_folder(folder / PARTIAL)
        with torch.no_grad(), watchdog_paused():
            if as_adapter:
                _write_adapter(model, state, unfinished)
            else:
                whole_state = merged_state(model, state)
                for beside in form.beside:
                    whole_state |= beside.weights(model)
                    beside.write_files(model, unfinished)
                _write_whole_model(model, whole_state, unfinished, is_lm)
            save_tokenizer(tokenizer, unfinished)
            if form.card is not None:
                has_template = tokenizer.chat_template is not None
                text = form.card(as_adapter, has_template, _other_usage(model, form, as_adapter))
                (unfinished / "README.md").write_text(text, encoding="utf-8")
        _make_readable(unfinished)
        # An earlier run may have left the other form, as which the folder would be read.
        for pattern in other_form:
            for file in folder.glob(pattern):
                file.unlink()
        move_files_up(unfinished)
    except (OSError, SafetensorError) as problem:
        reason, error_number = _why_not_written(problem)
        return (
            f"{folder}: the model cannot be written ({reason}); {way_out(error_number)}, then run"
            " the same command again"
        )
    return None


def _other_usage(model: PreTrainedModel, form: SavedForm, as_adapter: bool) -> str | None:
    """How a model that has parts beside it is used; None: as any other."""
    for beside in form.beside:
        usage = beside.usage(model, as_adapter)
        if usage is not None:
            return usage
    return None


def _set_pad_of_scorer(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, form: SavedForm
) -> None:
    """Set the PAD token in the configuration of a model that scores rows: transformers scores a row
    at its last non-PAD token, so PAD must not be a token that ends rows. (RoBERTa-like models count
    positions from PAD, so they keep it.)"""
    if first_position(model.config) != 0:
        return
    pad = tokenizer.pad_token_id
    if pad in (tokenizer.eos_token_id, *form.ends):
        pad = None
    model.config.pad_token_id = pad


def _set_entries(config: Any, entries: Mapping[str, float | str | None]) -> None:
    """Set entries of a configuration; None removes one."""
    for name, value in entries.items():
        if value is not None:
            setattr(config, name, value)
        elif hasattr(config, name):
            delattr(config, name)


def _make_readable(folder: Path) -> None:
    """Give the files in a folder the permissions that the umask leaves; safetensors lets only the
    owner read."""
    permissions = folder.stat().st_mode & 0o666
    for file in folder.iterdir():
        if file.is_file():
            file.chmod(permissions)


def _why_not_written(problem: OSError | SafetensorError) -> tuple[str, int | None]:
    """The reason of the operating system, and its `errno`; None: it is not known."""
    if isinstance(problem, OSError):
        return str(problem.strerror), problem.errno
    reason = str(problem)
    error_number = re.search(r"os error (\d+)", reason)
    if error_number is None:
        return reason, None
    return reason, int(error_number[1])


def is_saved_without_base(name: str) -> bool:
    """Whether a parameter of this name is part of an adapter folder: of the adapter, or of a score
    head."""
    return name.startswith(f"{SCORE}.") or is_adapter_parameter(name)


def merged_state(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of `model` under the names that they have without an adapter, with it merged.
    `state` has all weights, whole; `model` only gives names and scales. The product is computed in
    fp32 and rounded to the number format of the weight. On ranks without weights: {}."""
    merged = {name: weight for name, weight in state.items() if not is_adapter_parameter(name)}
    if not state:
        return merged
    for path, layer in adapter_layers(model).items():
        prefix = f"{path}.base_layer."
        base_names = [name for name in merged if name.startswith(prefix)]
        for name in base_names:
            merged[name.replace(".base_layer.", ".")] = merged.pop(name)
        weight = merged[f"{path}.weight"]
        weight_with_adapter = merged_weight(layer, weight, *matrices_of(state, path))
        merged[f"{path}.weight"] = weight_with_adapter.to(weight.dtype).contiguous()
    return merged


def _write_whole_model(
    model: PreTrainedModel, state: dict[str, Tensor], folder: Path, is_lm: bool
) -> None:
    """Write weights `state` and configurations under the names of the architecture's checkpoints on
    the hub, which other programs read too (of each expert, not of all of a layer), and not under
    those of the checkpoint loaded, such as DeepSpeed-Chat's; but a text model out of one of images
    and text has its names there."""
    source = Path(model.name_or_path or "/nowhere")  # empty: made from a configuration
    outer_config = None
    if is_lm:
        outer_config = config_around(model, source)
    if outer_config is None:
        model._weight_conversions = None  # type: ignore[assignment]
    dtype = model.config.dtype  # in place of which transformers writes that of the model in memory
    model.save_pretrained(folder, state_dict=state)
    model.config.dtype = dtype
    model.config.save_pretrained(folder)
    if is_lm:
        add_untrained(model, source, folder)
    if outer_config is not None:
        outer_config.text_config = model.config
        outer_config.save_pretrained(folder)
        for file in source.glob("*processor*_config.json"):
            shutil.copy(file, folder)


def _write_adapter(model: PreTrainedModel, state: dict[str, Tensor], folder: Path) -> None:
    """Write the files of an adapter, with the `config.json` of a scalar model."""
    named = {saved_name(name): weight.contiguous() for name, weight in state.items()}
    save_file(named, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    trained: Any = model.peft_config[ADAPTER]
    config = replace(trained, inference_mode=True)
    for name, value in vars(config).items():
        if isinstance(value, set):  # its order is another one in each process
            setattr(config, name, sorted(value))
    config.save_pretrained(str(folder))
    if hasattr(model, SCORE):
        model_config = deepcopy(model.config)
        # The configuration may be that of the base, a language model.
        model_config.architectures = [type(model).__name__]
        # the folder may be loaded without quantised weights
        if hasattr(model_config, "quantization_config"):
            del model_config.quantization_config
        model_config.save_pretrained(folder)


def _config_for_generation(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, ends: Sequence[int]
) -> GenerationConfig:
    """The model's own generation config, with the EOS, the other ends of a response and the PAD of
    its training."""
    config = model.generation_config or GenerationConfig()
    listed_ends = config.eos_token_id
    if not isinstance(listed_ends, list):
        listed_ends = [listed_ends]
    trained_ends = (tokenizer.eos_token_id, *ends)
    if not set(listed_ends) & set(trained_ends):
        listed_ends = []  # they belong to another tokenizer
    all_ends = list(dict.fromkeys((*trained_ends, *listed_ends)))
    config.eos_token_id = all_ends
    if len(all_ends) == 1:
        config.eos_token_id = all_ends[0]
    config.pad_token_id = tokenizer.pad_token_id
    config.bos_token_id = tokenizer.bos_token_id
    try:
        config.validate(strict=True)
    except ValueError:
        # For instance a temperature with do_sample=false: transformers loads it, but does not save
        # it.
        config.do_sample = True
    return config
