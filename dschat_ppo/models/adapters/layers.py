"""Which layers get LoRA, how an adapter is added to a model, and how its weights are read."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn
from transformers import BitsAndBytesConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from dschat_ppo.common import dist
from dschat_ppo.errors import UserError, reading
from dschat_ppo.models.adapters.folders import ADAPTER, adapter_weights, read_adapter_config
from dschat_ppo.models.adapters.settings import AdapterSettings
from dschat_ppo.models.architectures import LM_HEADS
from dschat_ppo.models.lm_kinds import parts_beside_decoder
from dschat_ppo.models.model_folders import SCORE, base_folder, base_name

ROUTERS = frozenset({"gate", "router", "shared_expert_gate"})  # linear layers that choose experts
# Classes of `x W + b` by name, with those of bitsandbytes; other subclasses of nn.Linear do more,
# such as routing.
LINEAR = frozenset({"Linear", "Conv1D", "FalconLinear", "Linear4bit", "Linear8bitLt"})
# Layers whose weight is read without a call of the layer, so that its LoRA would do nothing. Key:
# model type.
NOT_CALLED = {
    "mamba": ("out_proj", "dt_proj"),
    "falcon_mamba": ("out_proj", "dt_proj"),
    "mamba2": ("out_proj",),
    "falcon_h1": ("out_proj",),
    "nemotron_h": ("out_proj",),
    "jamba": ("dt_proj",),
}
_HOW_TO_MERGE = "docs/lora.md"


def lora_targets(
    model: PreTrainedModel, names: str | None, flag: str = "--lora_module_name"
) -> list[str]:
    """Full names of the layers of `model` that get LoRA, in the order of the model, which has no
    adapter yet.

    Layers are linear (`nn.Linear`, GPT-2's `Conv1D`). Not among them: routers and experts that are
    one 3-D tensor, the score head, an output head that is tied to the embedding, layers that the
    model does not call, and those of parts beside the decoder, such as a vision tower. A layer is
    taken if one of the texts in `names`, separated by commas, occurs in its name, as in
    DeepSpeed-Chat; None: all linear layers of the decoder blocks.
    """
    usable = _layers_for_lora(model)
    if names is None:
        block_layers = [name for name in usable if re.search(r"\.\d+\.", name)]
        if not block_layers:
            raise UserError(
                f"{flag}: {type(model).__name__} has no linear layer in a list of blocks; name its"
                " layers"
            )
        return block_layers
    patterns = [pattern.strip() for pattern in names.split(",") if pattern.strip()]
    targets = []
    matching = set()
    for name in usable:
        matches = [pattern for pattern in patterns if pattern in name]
        matching.update(matches)
        if matches:
            targets.append(name)
    unknown = [pattern for pattern in patterns if pattern not in matching]
    if patterns and not unknown:
        return targets
    last_words = sorted({name.rpartition(".")[2] for name in usable})
    raise UserError(
        f"{flag} {names}: no layer of {type(model).__name__} that can get LoRA has"
        f" '{', '.join(unknown)}' in its name; give {_list_of_blocks(usable)} for all layers of its"
        f" blocks, or leave the flag out, or give names among {', '.join(last_words)}"
    )


def _list_of_blocks(layers: list[str]) -> str:
    """The name of the list of blocks, such as `layers.`, that the first of `layers` inside one
    names; "" without such a list."""
    for name in layers:
        match = re.search(r"(\w+\.)\d+\.", name)
        if match:
            return match[1]
    return ""


def _layers_for_lora(model: PreTrainedModel) -> list[str]:
    """The names of all layers of `model` that LoRA can be added to; see `lora_targets`."""
    config = model.config.get_text_config()
    head = model.get_output_embeddings()
    tied = head is not None and getattr(config, "tie_word_embeddings", False)
    has_experts = any("experts" in name for name in config.to_dict())
    not_called = NOT_CALLED.get(config.model_type, ())
    beside = set[nn.Module]()
    for module in parts_beside_decoder(model).values():
        beside.update(module.modules())
    names = []
    for name, layer in model.named_modules():
        is_head = name == SCORE or (tied and layer is head)
        is_router = has_experts and not ROUTERS.isdisjoint(name.split("."))
        if (
            is_linear(layer)
            and layer not in beside
            and not is_head
            and not is_router
            and name.rpartition(".")[2] not in not_called
        ):
            names.append(name)
    return names


def is_linear(layer: nn.Module) -> bool:
    """Whether a layer computes `x W + b`, which LoRA can be added to."""
    return type(layer).__name__ in LINEAR


def quantising_options(
    build: Callable[[], PreTrainedModel],
    adapter: AdapterSettings | None,
    dtype: torch.dtype,
    ds_config: dict[str, Any] | None,
) -> dict[str, Any]:
    """Arguments of `from_pretrained` that quantise the linear layers of the blocks, 4 bits as NF4
    with double quantisation, 8 bits as LLM.int8(); {} if the adapter does not ask. DeepSpeed's cast
    to another number format leaves the integers alone.

    Args:
        build: makes the model; it is called on the meta device, without memory for weights, to find
            the linear layers that stay whole, such as the heads.
        adapter: how many bits; None: nothing is quantised.
        dtype: of the products of 4-bit weights.
        ds_config: of the model's engine, None without one.

    Raises:
        UserError: ZeRO-3, which `--deepspeed_config` may ask for, cannot partition such weights.
    """
    if adapter is None or not adapter.quantise:
        return {}
    if ds_config is not None and ds_config["zero_optimization"]["stage"] == 3:
        flag = f"--load_in_{adapter.quantise}bit"
        raise UserError(
            f"{flag} needs ZeRO stage 0, 1 or 2: ZeRO-3 cannot partition quantised weights"
        )
    with torch.device("meta"):
        model = build()
    # all that LoRA could be added to, whatever `adapter.targets` names
    block_layers = lora_targets(model, None)
    skipped = [
        name
        for name, layer in model.named_modules()
        if is_linear(layer) and name not in block_layers
    ]
    if adapter.quantise == 4:
        config = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
            bnb_4bit_quant_storage=torch.uint8,
            llm_int8_skip_modules=skipped,
        )
    else:
        config = BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=skipped)
    return {"quantization_config": config, "device_map": {"": dist.device()}}


def add_adapter(
    model: PreTrainedModel, settings: AdapterSettings, folder: str | None = None
) -> None:
    """Add a LoRA adapter to `model`, in place, before it gets an engine: a new one, or with
    `folder` the adapter in it, which keeps its layers and scale. Matrix B of a new one is zero; A
    is drawn from the seed that torch was given last, equally on every rank and at every ZeRO stage.
    Under ZeRO-3 the new parameters are whole until `deepspeed.initialize` partitions them."""
    if folder is None:
        config = _new_config(model, settings)
    else:
        config = _config_to_continue(model, folder, settings)
    trained = {weight: weight.requires_grad for weight in model.parameters()}
    inject_lora(model, config, folder)
    for parameter, weight in model.named_parameters():
        has_adapter = parameter.endswith(".base_layer.weight")
        is_small = parameter.startswith(f"{SCORE}.") or is_adapter_parameter(parameter)
        may_train = not has_adapter and (is_small or not settings.freeze_base)
        weight.requires_grad_(may_train and trained.get(weight, True))
    if folder is not None:
        load_adapter_weights(model, folder)


def saved_config(folder: str) -> Any:
    """peft's configuration of the adapter in `folder`."""
    from peft import LoraConfig

    settings = read_adapter_config(folder, "model")
    with reading(f"{folder}: its adapter_config.json cannot be used"):
        return LoraConfig(**settings)


def is_adapter_parameter(name: str) -> bool:
    """Whether a parameter of this name belongs to a LoRA adapter (peft's names)."""
    return ".lora_" in name


def adapter_layers(model: nn.Module) -> dict[str, Any]:
    """peft's layers of `model` that hold adapters, by their names; {} without adapters."""
    return {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}


def inject_lora(model: PreTrainedModel, config: Any, folder: str | None) -> None:
    """Add the layers of the adapter that peft's `config` describes to `model`, in place, with new
    weights; `folder`, from which the adapter comes, is for messages alone."""
    from peft import inject_adapter_in_model

    seed = torch.initial_seed() ^ crc32(ADAPTER.encode())
    injected = replace(config, modules_to_save=None)  # peft would wrap the score head
    # then its matrices need no numbers
    on_meta = all(weight.is_meta for weight in model.parameters())
    partitioned = any(map(dist.is_partitioned, model.parameters()))  # peft gathers what DoRA reads
    zero3: AbstractContextManager[None] = nullcontext()
    if partitioned:
        zero3 = zero3_announced({"zero_optimization": {"stage": 3}})
    device: AbstractContextManager[Any] = nullcontext()
    if on_meta:
        device = torch.device("meta")
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings(), zero3:
        warnings.simplefilter("ignore")  # that it chooses fan_in_fan_out itself
        torch.manual_seed(seed)
        problem = f"{folder or 'LoRA'}: the adapter does not fit {type(model).__name__}"
        with reading(problem), device:
            inject_adapter_in_model(injected, model, adapter_name=ADAPTER)
    injected.modules_to_save = config.modules_to_save  # for adapter_config.json
    model.peft_config = {ADAPTER: injected}
    if on_meta:  # peft has not given them the type of the base
        for layer in adapter_layers(model).values():
            layer.to(layer.get_base_layer().weight.dtype)


@contextmanager
def zero3_announced(ds_config: dict[str, Any]) -> Iterator[None]:
    """Let transformers, and peft, which asks it, know in the block that ZeRO-3 partitions
    weights."""
    from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config

    keep_alive = HfDeepSpeedConfig(ds_config)  # transformers holds it weakly
    try:
        yield
    finally:
        del keep_alive
        unset_hf_deepspeed_config()


def _new_config(model: PreTrainedModel, settings: AdapterSettings) -> Any:
    """peft's configuration of a new adapter of `model`."""
    from peft import LoraConfig

    base, revision = base_name(model.config._name_or_path)
    targets = lora_targets(model, settings.targets, settings.flag)
    modules = dict(model.named_modules())
    alpha: Any = settings.alpha
    if alpha == int(alpha):
        alpha = int(alpha)
    return LoraConfig(
        r=settings.rank,
        lora_alpha=alpha,
        lora_dropout=settings.dropout,
        target_modules=targets,
        fan_in_fan_out=all(isinstance(modules[name], Conv1D) for name in targets),
        use_rslora=settings.rslora,
        use_dora=settings.dora,
        bias="none",
        base_model_name_or_path=base,
        revision=revision,
        **_of_kind(model),
    )


def _config_to_continue(model: PreTrainedModel, folder: str, settings: AdapterSettings) -> Any:
    """peft's configuration of the adapter in `folder`, to train it further in `model`, which may be
    of another kind."""
    flag = settings.flag.replace("module_name", "dim")
    config = saved_config(folder)
    if config.r != settings.rank:
        raise UserError(
            f"{flag} {settings.rank}: the adapter in {folder} has rank {config.r}; give that rank"
            f" to train it further, or merge it into its base first ({_HOW_TO_MERGE}) to start a"
            f" new one of rank {settings.rank}"
        )
    if settings.dora and not config.use_dora:
        raise UserError(
            f"--use_dora: the adapter in {folder} is not DoRA; leave the flag out, or merge it into"
            f" its base first ({_HOW_TO_MERGE})"
        )
    heads = (SCORE, "classifier")  # peft lists both names for every classifier
    saved_layers = [name for name in config.modules_to_save or [] if name not in heads]
    if saved_layers:
        raise UserError(
            f"{flag} {settings.rank}: the adapter in {folder} also holds whole layers"
            f" ({', '.join(saved_layers)}), which would not be trained; merge it into its base"
            f" first ({_HOW_TO_MERGE})"
        )
    base, revision = base_name(base_folder(folder, "model"))
    return replace(
        config,
        lora_dropout=settings.dropout,
        inference_mode=False,
        init_lora_weights=True,
        base_model_name_or_path=base,
        revision=revision,
        **_of_kind(model),
    )


def _of_kind(model: PreTrainedModel) -> dict[str, Any]:
    """peft's settings for a model with a score head, or for a language model."""
    if hasattr(model, SCORE):
        return {"task_type": "SEQ_CLS", "modules_to_save": [SCORE]}
    return {"task_type": "CAUSAL_LM", "modules_to_save": None}


def load_adapter_weights(model: PreTrainedModel, folder: str) -> dict[str, Tensor]:
    """Copy the weights in an adapter folder into the adapter of `model`, and its whole layers into
    the model. Returns them as the file has them, by their names in the model, on its device."""
    import deepspeed

    weights = adapter_weights(folder)
    parameters: dict[str, Any] = dict(model.named_parameters())
    adapter_keys = {key for key in parameters if is_adapter_parameter(key)}
    weights = {
        key: weight
        for key, weight in weights.items()
        if not key.startswith(LM_HEADS) or key in parameters
    }
    shapes = {key: getattr(weight, "ds_shape", weight.shape) for key, weight in parameters.items()}
    faults = {
        "missing": adapter_keys - weights.keys(),
        "unexpected": weights.keys() - parameters.keys(),
        "wrong shape": {
            key for key, weight in weights.items() if shapes.get(key, weight.shape) != weight.shape
        },
    }
    fault_texts = []
    for fault, keys in faults.items():
        if keys:
            fault_texts.append(f"{fault}: {', '.join(sorted(keys)[:3])}")
    if fault_texts:
        raise UserError(
            f"{folder}: the adapter does not fit {type(model).__name__}: {'; '.join(fault_texts)}"
        )
    for key, weight in weights.items():
        with deepspeed.zero.GatheredParameters([parameters[key]], modifier_rank=0), torch.no_grad():
            parameters[key].copy_(weight)
    return {key: weight.to(parameters[key].device) for key, weight in weights.items()}
