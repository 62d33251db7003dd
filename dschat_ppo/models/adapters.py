"""LoRA adapters: which layers get one, how it is added, read from a folder, and merged for good or
for a rollout.

QLoRA holds the frozen weights in 4 or 8 bits through bitsandbytes (Dettmers 2023,
https://arxiv.org/abs/2305.14314).
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal
from zlib import crc32

import torch
from torch import Tensor, nn
from transformers import BitsAndBytesConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from dschat_ppo.common import dist
from dschat_ppo.common.extras import require_extra
from dschat_ppo.common.host_memory import freed_memory_returned
from dschat_ppo.config.run_flags import AdapterFlags
from dschat_ppo.errors import UserError, reading
from dschat_ppo.models.model_folders import (
    ADAPTER,
    SCORE,
    adapter_weights,
    base_folder,
    base_name,
    read_adapter_config,
)

Bits = Literal[4, 8]


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
# the parts of an adapter in peft's layer; the last for DoRA
MATRICES = "lora_A", "lora_B", "lora_magnitude_vector"
LM_HEADS = ("lm_head.", "embed_out.")  # of language models; classifiers do not have them
_HOW_TO_MERGE = "docs/lora.md"


@dataclass(frozen=True)
class AdapterSettings:
    """A LoRA adapter and how it is trained."""

    rank: int
    alpha: float  # scale of the update: alpha / rank, or alpha / sqrt(rank) with `rslora`
    dropout: float
    # parts of names of layers, separated by commas; None: all linear layers of the blocks
    targets: str | None
    rslora: bool  # rank-stabilised scale (Kalajdzievski 2023, https://arxiv.org/abs/2312.03732)
    # also train the magnitudes of the weights (Liu 2024, https://arxiv.org/abs/2402.09353)
    dora: bool
    # train the adapter and a score head only; else all weights but those under the adapter
    freeze_base: bool
    quantise: Bits | None = None  # bits of the frozen weights (QLoRA); None: not quantised
    flag: str = "--lora_module_name"


def adapter_settings(lora: Any, flags: AdapterFlags, prefix: str = "") -> AdapterSettings | None:
    """The adapter that the flags ask for, with the step's group `lora`; None with rank 0. `prefix`
    of the model's flags in step 3: "actor_" or "critic_"."""
    dim = vars(lora)[f"{prefix}lora_dim"]
    if dim == 0:
        return None
    require_extra("peft", "LoRA")
    bits: Bits | None = 4 if flags.load_in_4bit else 8 if flags.load_in_8bit else None
    if bits is not None:
        needs = f"--load_in_{bits}bit"
        if not dist.on_gpu():
            raise UserError(
                f"{needs} needs a GPU, and this run has none; omit it to train LoRA over whole"
                " weights"
            )
        require_extra("bitsandbytes", needs)
    return AdapterSettings(
        dim,
        flags.lora_alpha,
        flags.lora_dropout,
        vars(lora)[f"{prefix}lora_module_name"],
        flags.use_rslora,
        flags.use_dora,
        flags.only_optimize_lora,
        bits,
        f"--{prefix}lora_module_name",
    )


def lora_targets(
    model: PreTrainedModel, names: str | None, flag: str = "--lora_module_name"
) -> list[str]:
    """Full names of the layers of `model` that get LoRA, in the order of the model, which has no
    adapter yet.

    Layers are linear (`nn.Linear`, GPT-2's `Conv1D`). Not among them: routers and experts that are
    one 3-D tensor, the score head, an output head that is tied to the embedding, and layers that
    the model does not call. A layer is taken if a part of `names`, separated by commas, occurs in
    its name, as in DeepSpeed-Chat; None: all linear layers of the decoder blocks.
    """
    usable = _linear_layers(model)
    if names is None:
        found = [name for name in usable if re.search(r"\.\d+\.", name)]  # inside a list of blocks
        if not found:
            raise UserError(
                f"{flag}: {type(model).__name__} has no linear layer in a list of blocks; name its"
                " layers"
            )
        return found
    parts = [part.strip() for part in names.split(",") if part.strip()]
    unknown = [part for part in parts if not any(part in name for name in usable)]
    if parts and not unknown:
        return [name for name in usable if any(part in name for part in parts)]
    last = sorted({name.rpartition(".")[2] for name in usable})
    blocks = next((match[1] for name in usable if (match := re.search(r"(\w+\.)\d+\.", name))), "")
    raise UserError(
        f"{flag} {names}: no layer of {type(model).__name__} that can get LoRA has"
        f" '{', '.join(unknown)}' in its name; give {blocks} for all layers of its blocks, or leave"
        f" the flag out, or give names among {', '.join(last)}"
    )


def _linear_layers(model: PreTrainedModel) -> list[str]:
    config = model.config.get_text_config()
    head = model.get_output_embeddings()
    tied = head is not None and getattr(config, "tie_word_embeddings", False)
    has_experts = any("experts" in name for name in config.to_dict())
    not_called = NOT_CALLED.get(config.model_type, ())
    names = []
    for name, layer in model.named_modules():
        is_head = name == SCORE or (tied and layer is head)
        is_router = has_experts and not ROUTERS.isdisjoint(name.split("."))
        if (
            is_linear(layer)
            and not is_head
            and not is_router
            and name.rpartition(".")[2] not in not_called
        ):
            names.append(name)
    return names


def is_linear(layer: nn.Module) -> bool:
    """Whether a layer computes `x W + b`, which LoRA can be added to."""
    return type(layer).__name__ in LINEAR


def quantised_base(
    build: Callable[[], PreTrainedModel],
    adapter: AdapterSettings | None,
    dtype: torch.dtype,
    ds_config: dict[str, Any] | None,
) -> dict[str, Any]:
    """Arguments of `from_pretrained` that quantise the linear layers of the blocks, 4 bits as NF4
    with double quantisation, 8 bits as LLM.int8(); {} if the adapter does not ask. `build` makes
    the model. DeepSpeed's cast leaves the integers alone; products are in `dtype`. Not under
    ZeRO-3, which `--deepspeed_config` may ask for."""
    if adapter is None or adapter.quantise is None:
        return {}
    if ds_config is not None and ds_config["zero_optimization"]["stage"] == 3:
        flag = f"--load_in_{adapter.quantise}bit"
        raise UserError(
            f"{flag} needs ZeRO stage 0, 1 or 2: ZeRO-3 cannot partition quantised weights"
        )
    with torch.device("meta"):
        model = build()
    layers = lora_targets(model, None)
    skipped = [
        name for name, layer in model.named_modules() if is_linear(layer) and name not in layers
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
    """Add a LoRA adapter to `model`, in place, before it gets an engine, or that of a `folder` with
    its own layers and scale. Matrix B is zero; A is drawn from the seed that torch was given last,
    equally on every rank and at every ZeRO stage. Under ZeRO-3 the new parameters are whole until
    `deepspeed.initialize` partitions them."""
    if folder is None:
        config = _new_config(model, settings)
    else:
        config = _config_to_continue(model, folder, settings)
    trained = {weight: weight.requires_grad for weight in model.parameters()}
    _inject(model, config, folder)
    for parameter, weight in model.named_parameters():
        has_adapter = parameter.endswith(".base_layer.weight")
        is_small = parameter.startswith(f"{SCORE}.") or is_adapter_parameter(parameter)
        may_train = not has_adapter and (is_small or not settings.freeze_base)
        weight.requires_grad_(may_train and trained.get(weight, True))
    if folder is not None:
        load_adapter_weights(model, folder)


def ignored_flags(folder: str, settings: AdapterSettings) -> list[str]:
    """Flags of `settings` that differ from what the adapter in `folder` has and keeps."""
    config = saved_config(folder)
    differing = {
        settings.flag: settings.targets is not None,
        "--lora_alpha": settings.alpha not in (AdapterFlags().lora_alpha, config.lora_alpha),
        "--use_rslora": settings.rslora and not config.use_rslora,
    }
    return [flag for flag, differs in differing.items() if differs]


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


def _inject(model: PreTrainedModel, config: Any, folder: str | None) -> None:
    from peft import inject_adapter_in_model

    seed = torch.initial_seed() ^ crc32(ADAPTER.encode())
    injected = replace(config, modules_to_save=None)  # peft would wrap the score head
    # then its matrices need no numbers
    without = all(weight.is_meta for weight in model.parameters())
    partitioned = any(map(dist.is_partitioned, model.parameters()))  # peft gathers what DoRA reads
    zero3: AbstractContextManager[None] = nullcontext()
    if partitioned:
        zero3 = zero3_announced({"zero_optimization": {"stage": 3}})
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings(), zero3:
        warnings.simplefilter("ignore")  # that it chooses fan_in_fan_out itself
        torch.manual_seed(seed)
        problem = f"{folder or 'LoRA'}: the adapter does not fit {type(model).__name__}"
        with reading(problem), torch.device("meta") if without else nullcontext():
            inject_adapter_in_model(injected, model, adapter_name=ADAPTER)
    injected.modules_to_save = config.modules_to_save  # for adapter_config.json
    model.peft_config = {ADAPTER: injected}
    # peft has not given them the type of the base
    for layer in adapter_layers(model).values() if without else ():
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
    from peft import LoraConfig

    base, revision = base_name(model.config._name_or_path)
    targets = lora_targets(model, settings.targets, settings.flag)
    modules = dict(model.named_modules())
    alpha: Any = int(settings.alpha) if settings.alpha == int(settings.alpha) else settings.alpha
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
    others = [name for name in config.modules_to_save or [] if name not in heads]
    if others:
        raise UserError(
            f"{flag} {settings.rank}: the adapter in {folder} also holds whole layers"
            f" ({', '.join(others)}), which would not be trained; merge it into its base first"
            f" ({_HOW_TO_MERGE})"
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
    has_score = hasattr(model, SCORE)
    return {
        "task_type": "SEQ_CLS" if has_score else "CAUSAL_LM",
        "modules_to_save": [SCORE] if has_score else None,
    }


def load_merged(model: PreTrainedModel, folder: str) -> None:
    """Merge the adapter in `folder` into the weights of `model`: the product in fp32, then rounded.
    In place. `model` is the adapter's base, whole or partitioned by ZeRO-3 (then collective),
    before it gets an engine."""
    require_extra("peft", f"the adapter folder {folder}")
    import deepspeed

    trained = [weight for weight in model.parameters() if weight.requires_grad]
    _inject(model, replace(saved_config(folder), init_lora_weights=False), folder)
    weights = load_adapter_weights(model, folder)
    for path, layer in adapter_layers(model).items():
        base = layer.get_base_layer()
        if not is_linear(base):
            raise UserError(
                f"{folder}: its adapter of {path} is not of a linear layer; merge it with peft"
            )
        with deepspeed.zero.GatheredParameters([base.weight], modifier_rank=0), torch.no_grad():
            a, b, magnitude = matrices_of(weights, path)
            base.weight.copy_(merged_weight(layer, base.weight, a, b, magnitude))
        parent, _, child = path.rpartition(".")
        setattr(model.get_submodule(parent), child, base)
    del model.peft_config
    for weight in trained:
        weight.requires_grad_(True)


def load_adapter_weights(model: PreTrainedModel, folder: str) -> dict[str, Tensor]:
    """Copy the weights in an adapter folder into the adapter of `model`, and its whole layers into
    the model. Returns them as the file has them, by their names in the model, on its device."""
    import deepspeed

    weights = adapter_weights(folder)
    parameters: dict[str, Any] = dict(model.named_parameters())
    wanted = {key for key in parameters if is_adapter_parameter(key)}
    weights = {
        key: weight
        for key, weight in weights.items()
        if not key.startswith(LM_HEADS) or key in parameters
    }
    shapes = {key: getattr(weight, "ds_shape", weight.shape) for key, weight in parameters.items()}
    faults = {
        "missing": wanted - weights.keys(),
        "unexpected": weights.keys() - parameters.keys(),
        "wrong shape": {
            key for key, weight in weights.items() if shapes.get(key, weight.shape) != weight.shape
        },
    }
    found = [f"{fault}: {', '.join(sorted(keys)[:3])}" for fault, keys in faults.items() if keys]
    if found:
        raise UserError(
            f"{folder}: the adapter does not fit {type(model).__name__}: {'; '.join(found)}"
        )
    for key, weight in weights.items():
        with deepspeed.zero.GatheredParameters([parameters[key]], modifier_rank=0), torch.no_grad():
            parameters[key].copy_(weight)
    return {key: weight.to(parameters[key].device) for key, weight in weights.items()}


def matrices_of(weights: Mapping[str, Tensor], path: str) -> tuple[Tensor, Tensor, Tensor | None]:
    """A, B and, for DoRA, the magnitudes of the layer at `path`, of weights by their names in the
    model."""
    a, b, magnitude = (weights.get(f"{path}.{matrix}.{ADAPTER}.weight") for matrix in MATRICES)
    assert a is not None and b is not None
    return a, b, magnitude


def merged_weight(
    layer: Any, weight: Tensor, a: Tensor, b: Tensor, magnitude: Tensor | None
) -> Tensor:
    """The weight of a layer with its adapter merged, in fp32 and in the layout of `weight`: LoRA `W
    + s B A`; DoRA each row of this divided by its norm and multiplied by its magnitude.

    `weight` (out, in), or (in, out) for GPT-2's `Conv1D`; `a` (rank, in), `b` (out, rank);
    `magnitude` (out,) for DoRA, None for LoRA. peft's `layer` has the scale s and the layout.
    """
    transposed = bool(layer.fan_in_fan_out)
    whole = weight.float().T if transposed else weight.float()
    whole = whole + layer.scaling[ADAPTER] * (b.float() @ a.float())
    if magnitude is not None:
        whole = whole * (magnitude.float() / whole.norm(dim=1)).unsqueeze(1)
    return whole.T if transposed else whole


@contextmanager
def merged(
    model: PreTrainedModel,
    disposable: Collection[nn.Parameter] = (),
    originals_on_host: bool = False,
) -> Iterator[None]:
    """Replace each layer that has adapters by its base layer with the merged weight, so that code
    that looks for `nn.Linear` finds it. The exit restores layers and original weights bit for bit:
    they are kept, on the device or with `originals_on_host` in host memory; only `disposable`
    weights (copies gathered by ZeRO-3), which are dropped afterwards, are merged in place. Layers
    with a quantised base keep their adapter unmerged. The model has whole weights and no hooks; its
    weights and adapters must not change inside the context."""
    dropped = set(disposable)
    layers = {
        layer
        for layer in adapter_layers(model).values()
        if layer.get_base_layer().weight.is_floating_point()
    }
    places = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent._modules.items()
    ]
    with ExitStack() as stack:
        with freed_memory_returned():  # else the heap keeps as much again, from products in fp32
            for parent, name, child in places:
                if child in layers:
                    base: Any = child.get_base_layer()  # type: ignore[union-attr,operator]
                    in_place = base.weight in dropped and not _is_own_partition(base.weight)
                    new = _with_adapter(child, base.weight)
                    stack.enter_context(
                        _weight_replaced(base.weight, new, in_place, originals_on_host)
                    )
                    # the order of children stays
                    stack.callback(parent._modules.__setitem__, name, child)
                    parent._modules[name] = base
        yield


@torch.no_grad()
def _with_adapter(layer: Any, weight: nn.Parameter) -> Tensor:
    """The weight of `layer` with its adapter merged: computed in fp32, in the dtype and layout of
    `weight`."""
    a, b, magnitude = matrices_of(dict(layer.named_parameters(prefix="layer")), "layer")
    return merged_weight(layer, weight.detach(), a, b, magnitude).to(weight.dtype).contiguous()


def _is_own_partition(weight: Any) -> bool:
    """Whether a gathered weight is this rank's partition itself: on one rank ZeRO-3 makes no
    copy."""
    return weight.untyped_storage().data_ptr() == weight.ds_tensor.untyped_storage().data_ptr()


@contextmanager
def _weight_replaced(
    weight: nn.Parameter, new: Tensor, in_place: bool, original_on_host: bool
) -> Iterator[None]:
    """Give `weight` the values `new`. If `in_place`, the original is lost."""
    if original_on_host and not in_place:
        original = weight.data.to("cpu", copy=True)
    else:
        original = weight.data
    if in_place or original_on_host:
        weight.data.copy_(new)
    else:
        weight.data = new
    try:
        yield
    finally:
        if original_on_host and not in_place:
            weight.data.copy_(original)
        elif not in_place:
            weight.data = original
