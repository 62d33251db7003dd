"""Load models and tokenizers strictly: missing and unexpected weights are errors."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import deepspeed
import torch
import transformers
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from dschat_ppo.common.atomic_files import read_blocks
from dschat_ppo.common.dist import local_rank
from dschat_ppo.common.heartbeat import watchdog_paused
from dschat_ppo.common.host_memory import freed_memory_returned
from dschat_ppo.common.logging import log_once, logger
from dschat_ppo.common.paths import shown_path
from dschat_ppo.errors import UserError, reading
from dschat_ppo.models.adapters import (
    LM_HEADS,
    AdapterSettings,
    adapter_layers,
    add_adapter,
    ignored_flags,
    load_merged,
    quantised_base,
    zero3_announced,
)
from dschat_ppo.models.architectures import (
    DROPOUTS,
    SKIPPED_LAYERS,
    check_architecture,
    check_classifier_config,
    classifier_class,
    config_for,
    first_position,
    lm_head_names,
)
from dschat_ppo.models.model_folders import (
    SCORE,
    base_folder,
    check_settings,
    files_of,
    is_adapter_folder,
    saves_head,
    wants_settings_only,
    without_code,
)
from dschat_ppo.models.tokenizers import load_tokenizer, read_tokenizer
from dschat_ppo.models.weight_headers import (
    checkpoint_headers,
    checkpoint_shapes,
    is_old_buffer,
    require_floating_point,
    weight_files,
)

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SCORE_WEIGHT = f"{SCORE}.weight"
DEEPSPEED_CHAT_HEAD = "v_head.weight"
MAX_NAMES = 6  # of weights, in a message
# models that fit -> the allowed names that are missing
_COMPARED: dict[tuple[Any, ...], Set[str]] = {}
# rotary positions beyond this multiple of those trained are assumed to be a mistake
MAX_EXTRAPOLATION = 4


def load_config(folder: str, flag: str) -> PretrainedConfig:
    """The model's configuration, without its weights; of an adapter folder without `config.json`,
    that of its base."""
    if not (Path(folder) / "config.json").exists():
        folder = base_folder(folder, flag)
    refused = f"{flag} {folder}: config.json cannot be used"
    check_settings(folder, refused)
    with reading(refused):  # without trust_remote_code=False transformers asks at a terminal
        config = without_code(
            AutoConfig.from_pretrained(folder, trust_remote_code=False, return_dict=True)
        )
        if getattr(config.get_text_config(), "attn_logit_softcapping", None):
            # SDPA ignores the soft cap; transformers before 5.21 takes SDPA
            config._attn_implementation = "eager"
    return config


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


def require_length(folder: str, longest: int, flags: str) -> None:
    """Require that the model can read rows of `longest` tokens (set by `flags`). Learned positions
    must cover them; of rotary ones, `MAX_EXTRAPOLATION` times the known positions, with a
    warning."""
    config = load_config(folder, "model").get_text_config()
    known = getattr(config, "max_position_embeddings", None)
    if known is None or longest <= known - first_position(config):
        return
    known -= first_position(config)
    beyond = (
        f"{flags} of {longest} tokens goes beyond the {known} positions of {shown_path(folder)}"
    )
    if not hasattr(config, "rope_parameters") or longest > MAX_EXTRAPOLATION * known:
        raise UserError(f"{beyond}; lower it")
    log_once(f"{beyond}; it was not trained on longer rows: lower it", logging.WARNING)


@contextmanager
def _loading(
    folder: str, ds_config: dict[str, Any] | None, device: str | None = None
) -> Iterator[None]:
    """Make `from_pretrained` build each layer already partitioned over the ranks if the config is
    ZeRO-3. Ranks then wait for each other inside, so the watchdog is paused only for the other
    configs."""
    if local_rank() == 0 and device != "meta":
        _read_through(folder)
    if ds_config is None or ds_config["zero_optimization"]["stage"] != 3:
        with watchdog_paused(), freed_memory_returned():
            yield
        return
    if ds_config["zero_optimization"].get("zero_hpz_partition_size", 1) > 1:
        # DeepSpeed asserts that the ranks are not yet divided, which they are after the first
        # model.
        deepspeed.utils.groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None
    with zero3_announced(ds_config), freed_memory_returned():
        yield


@cache
def _read_through(folder: str) -> None:
    """Read the weights once, into the page cache: later, a slow disk looks like a rank that
    hangs."""
    for file in weight_files(folder):
        for _ in read_blocks(file):
            pass


def check_causal_lm(folder: str, adapter: AdapterSettings | None = None) -> None:
    """Compare the checkpoint with the causal language model of its config, without reading the
    weights. A model that is none, or has a score head, is refused too, and an `adapter` (see
    `load_causal_lm`) that cannot be added."""
    config = load_config(folder, "model")
    check_architecture(config, folder, needs_lm=True)
    base = base_folder(folder, "model")
    heads = checkpoint_shapes(base).keys() & {SCORE_WEIGHT, DEEPSPEED_CHAT_HEAD}
    if heads or (base != folder and saves_head(folder)):
        raise UserError(
            f"{folder}: is a reward model or critic, because it has a score head"
            f" ({min(heads, default=SCORE_WEIGHT)}), so it cannot generate text; give a causal"
            " language model, such as the SFT model"
        )
    check_weights(AutoModelForCausalLM, base, config)
    check_adapter(partial(AutoModelForCausalLM.from_config, config), folder, adapter)


def load_causal_lm(
    folder: str,
    dtype: str,
    ds_config: dict[str, Any] | None,
    dropout: float | None = None,
    resize: bool = False,
    adapter: AdapterSettings | None = None,
    device: str | None = None,
) -> PreTrainedModel:
    """A checked causal language model, ready for `deepspeed.initialize` with the same `ds_config`.

    Args:
        dtype: "bf16", "fp16" or "fp32".
        dropout: overrides every dropout of the config; no layer is then skipped in training.
        resize: add rows for tokens of the folder's tokenizer that have none (`grow_vocabulary`).
        adapter: add a LoRA adapter; if `folder` is an adapter folder, continue that one. Without it
            an adapter folder is merged into the weights of its base.
        device: "meta" builds the model without its weights; None loads them.
    """
    check_causal_lm(folder)
    config = _with_dropout(load_config(folder, "model"), dropout)
    build = partial(AutoModelForCausalLM.from_config, config)
    return _loaded(
        AutoModelForCausalLM, build, folder, config, dtype, ds_config, resize, adapter, device
    )


def check_sequence_classifier(
    folder: str, new_head: bool, adapter: AdapterSettings | None = None
) -> bool:
    """Compare the checkpoint with a one-label sequence classifier, without reading the weights.
    Returns whether it has no head, which `new_head` (training a reward model) allows: it will be
    new."""
    config = load_config(folder, "model")
    check_classifier_config(config, folder)
    with reading(f"{folder}: no reward model can be built from its config.json"):
        kind = classifier_class(config)
        config = config_for(kind, config)
        unused = lm_head_names(config)
    base = base_folder(folder, "model")
    has_head = base != folder and saves_head(folder)
    mapping = _deepspeed_chat_mapping(base, kind)
    is_new = (
        bool(check_weights(kind, base, config, mapping, {SCORE_WEIGHT}, unused)) and not has_head
    )
    if is_new and not new_head:
        raise UserError(
            f"{folder}: has no trained scalar head ({SCORE_WEIGHT}), so it is a language model and"
            " not a reward model; give a reward model, which step 2 trains"
        )
    check_adapter(partial(kind, config), folder, adapter)
    return is_new


def load_sequence_classifier(  # noqa: PLR0913
    folder: str,
    dtype: str,
    ds_config: dict[str, Any] | None,
    new_head: bool,
    dropout: float | None = None,
    resize: bool = False,
    adapter: AdapterSettings | None = None,
    device: str | None = None,
    zero_head: bool = False,
) -> PreTrainedModel:
    """A checked model with a scalar head: a decoder's one-label sequence classifier, or
    DeepSpeed-Chat's layout. A base or causal model without a head gets a new one if `new_head`,
    random as transformers makes it or, with `zero_head`, zero. The head trains with an adapter. The
    other arguments are those of `load_causal_lm`."""
    is_new = check_sequence_classifier(folder, new_head)
    if is_new:
        logger().info(
            f"model: {folder} has no scalar head; a new one is initialised and will be trained"
        )
    config = _with_dropout(load_config(folder, "model"), dropout)
    kind = classifier_class(config)
    config = config_for(kind, config)
    names = _deepspeed_chat_mapping(base_folder(folder, "model"), kind) or None
    model = _loaded(
        kind,
        partial(kind, config),
        folder,
        config,
        dtype,
        ds_config,
        resize,
        adapter,
        device,
        names,
    )
    if is_new and zero_head:
        head = model.get_parameter(SCORE_WEIGHT)
        with deepspeed.zero.GatheredParameters([head], modifier_rank=0):
            nn.init.zeros_(head)
    return model


def _loaded(  # noqa: PLR0913
    kind: Any,
    build: Callable[[], PreTrainedModel],
    folder: str,
    config: PretrainedConfig,
    dtype: str,
    ds_config: dict[str, Any] | None,
    resize: bool,
    adapter: AdapterSettings | None,
    device: str | None,
    key_mapping: dict[str, str] | None = None,
) -> PreTrainedModel:
    base = base_folder(folder, "model")
    if device:
        placed = {"device_map": device}
    else:
        placed = quantised_base(build, adapter, DTYPES[dtype], ds_config)
    with _loading(base, ds_config, device):
        model = kind.from_pretrained(
            base, config=config, dtype=DTYPES[dtype], key_mapping=key_mapping, **placed
        )
    known = config.get_text_config().vocab_size
    if resize and grow_vocabulary(model, needed := len(load_tokenizer(folder, "model"))):
        logger().info(
            f"model: {folder} has rows for {known} tokens; adding {needed - known}"
            " (--resize_vocabulary)"
        )
    _adapt(model, folder, adapter)
    _report_adapter(model, folder, adapter)
    return model


def _with_dropout(config: PretrainedConfig, dropout: float | None) -> PretrainedConfig:
    """The config with this dropout and, because ranks must run the same layers, without layers that
    training skips."""
    text = config.get_text_config()  # the config itself, except for models of images and text
    if dropout is None:
        rates = {}
    else:
        rates = {**dict.fromkeys(DROPOUTS, dropout), **dict.fromkeys(SKIPPED_LAYERS, 0.0)}
    for name, rate in rates.items():
        if hasattr(text, name):
            setattr(text, name, rate)
    return config


def _deepspeed_chat_mapping(folder: str, kind: type[PreTrainedModel]) -> dict[str, str]:
    if not any(name.startswith("v_head.") for name in checkpoint_shapes(folder)):
        return {}
    return {r"^rwtransformer\.": f"{kind.base_model_prefix}.", r"^v_head\.": f"{SCORE}."}


def check_adapter(
    build: Callable[[], PreTrainedModel], folder: str, adapter: AdapterSettings | None
) -> None:
    """Do what `_adapt` does to the model that `build` makes, without weights."""
    if adapter is not None or is_adapter_folder(folder):
        with torch.device("meta"):
            model = build()
        _adapt(model, folder, adapter)


def _adapt(model: PreTrainedModel, folder: str, adapter: AdapterSettings | None) -> None:
    """Give `model`, loaded from the base of `folder`, an `adapter`, or that of the folder further;
    None: merged."""
    if adapter is not None:
        add_adapter(model, adapter, folder=folder if is_adapter_folder(folder) else None)
    elif is_adapter_folder(folder):
        load_merged(model, folder)


def _report_adapter(model: PreTrainedModel, folder: str, adapter: AdapterSettings | None) -> None:
    if is_adapter_folder(folder):
        if adapter is None:
            ignored = []
            done = "is merged into its base model"
        else:
            ignored = ignored_flags(folder, adapter)
            done = "is trained further with its layers and scale"
        note = f"; {', '.join(ignored)} without effect" if ignored else ""
        logger().info(f"model: the adapter in {folder} {done}{note}")
    if adapter is not None:
        sizes = [
            (weight.requires_grad, getattr(weight, "ds_numel", weight.numel()))
            for weight in model.parameters()
        ]
        trained = sum(size for trains, size in sizes if trains)
        total = sum(size for _, size in sizes)
        layers = len(adapter_layers(model))
        logger().info(
            f"LoRA: rank {adapter.rank} in {layers} layers; {trained:,} of {total:,} parameters are"
            " trained"
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
    modules = [
        module
        for module in (model.get_input_embeddings(), model.get_output_embeddings())
        if module is not None
    ]
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
        wanted = dict(type(model)(model.config).named_parameters(remove_duplicate=False))
    others = [
        name
        for name, weight in model.named_parameters()
        if tuple(getattr(weight, "ds_shape", weight.shape)) != wanted[name].shape
    ]
    if others:
        raise UserError(
            f"--resize_vocabulary: {type(model).__name__} keeps a row for each token in {others[0]}"
            " too; take a model that has only an embedding and a head, or a tokenizer without"
            " added tokens"
        )
    if hasattr(model, "vocab_size"):
        model.vocab_size = size
    return True


def _with_mean_rows(weight: nn.Parameter, size: int) -> Tensor:
    """A whole copy of `weight` (rows, ...), followed by rows of its mean: (size, ...)."""
    with deepspeed.zero.GatheredParameters([weight]), torch.no_grad():
        mean = weight.float().mean(dim=0, keepdim=True).to(weight.dtype)
        return torch.cat([weight, mean.expand(size - weight.shape[0], *mean.shape[1:])])


def check_weights(
    kind: Any,
    folder: str,
    config: PretrainedConfig,
    key_mapping: Mapping[str, str] | None = None,
    allowed_missing: Set[str] = frozenset(),
    allowed_unexpected: Set[str] = frozenset(),
) -> Set[str]:
    """Compare the checkpoint with the model on the meta device; returns the allowed names that are
    missing. The result is kept for files that have not changed, as steps check all models first and
    again when they load them. With `settings_only`, a folder without weights is not compared.
    `kind`: a class of models, or an auto class; `key_mapping`: patterns that rename weights of the
    checkpoint."""
    if wants_settings_only() and not weight_files(folder):
        log_once(f"note: {folder} holds no weights, so they are not compared with its config.json")
        return frozenset()
    key = (
        kind.__module__,
        kind.__name__,
        config.to_json_string(use_diff=False),
        *files_of(folder),
        *sorted((key_mapping or {}).items()),
        frozenset(allowed_missing),
        frozenset(allowed_unexpected),
    )
    if key in _COMPARED:
        return _COMPARED[key]
    verbosity = transformers.logging.get_verbosity()
    # it reports the same facts on a page
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    try:
        with (
            watchdog_paused(),
            reading(f"{folder}: its weights cannot be read as those of a {type(config).__name__}"),
        ):
            model, info = kind.from_pretrained(
                folder,
                config=config,
                device_map="meta",
                output_loading_info=True,
                key_mapping=key_mapping or None,
                ignore_mismatched_sizes=True,
            )
    finally:
        transformers.logging.set_verbosity(verbosity)
    integers = [name for name, value in model.named_buffers() if not value.is_floating_point()]
    require_floating_point(folder, checkpoint_headers(folder), integers)
    missing = set(info["missing_keys"])
    unexpected = {
        name for name in info["unexpected_keys"] if not name.startswith(LM_HEADS)
    } - allowed_unexpected
    if unexpected:
        unexpected -= {
            name for name, shape in checkpoint_shapes(folder).items() if is_old_buffer(name, shape)
        }
    wrong_shape = {
        entry[0] if isinstance(entry, tuple) else str(entry) for entry in info["mismatched_keys"]
    }
    faults = []
    for fault, names in (
        ("missing", missing - allowed_missing),
        ("unexpected", unexpected),
        ("wrong shape", wrong_shape),
    ):
        if len(names) > MAX_NAMES:
            more = f" and {len(names) - MAX_NAMES} more"
        else:
            more = ""
        faults += [f"{fault}: {', '.join(sorted(names)[:MAX_NAMES])}{more}"] if names else []
    if faults:
        raise UserError(
            f"{folder}: the checkpoint does not fit {type(config).__name__}: {'; '.join(faults)}"
        )
    _COMPARED[key] = missing & allowed_missing
    return _COMPARED[key]
