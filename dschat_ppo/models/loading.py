"""Load models and tokenizers strictly: missing and unexpected weights are errors."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import nn
from transformers import (
    AutoConfig,
    PretrainedConfig,
    PreTrainedModel,
)

from dschat_ppo.common.atomic_files import read_blocks
from dschat_ppo.common.dist import local_rank
from dschat_ppo.common.heartbeat import watchdog_paused
from dschat_ppo.common.host_memory import freed_memory_returned
from dschat_ppo.common.logging import log_once, logger
from dschat_ppo.common.paths import shown_path
from dschat_ppo.config.feature_needs import FurtherModel
from dschat_ppo.config.step_config import StepConfig
from dschat_ppo.errors import UserError, reading
from dschat_ppo.models.adapters.adding import adapt, check_adapter, report_adapter, saves_head
from dschat_ppo.models.adapters.layers import quantising_options, zero3_announced
from dschat_ppo.models.adapters.settings import AdapterSettings, adapter_settings
from dschat_ppo.models.architectures import (
    DROPOUTS,
    SKIPPED_LAYERS,
    build_classifier,
    check_architecture,
    check_classifier_config,
    classifier_class,
    config_for,
    first_position,
    lm_head_names,
)
from dschat_ppo.models.lm_kinds import CAUSAL, LMKind, further_kinds, kind_of_lm, leave_whole
from dschat_ppo.models.model_folders import SCORE, base_folder, check_settings, without_code
from dschat_ppo.models.tokenizers import load_tokenizer
from dschat_ppo.models.vocabulary import grow_vocabulary
from dschat_ppo.models.weight_comparison import check_weights
from dschat_ppo.models.weight_headers import (
    checkpoint_shapes,
    weight_files,
)

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SCORE_WEIGHT = f"{SCORE}.weight"
DEEPSPEED_CHAT_HEAD = "v_head.weight"
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


@dataclass(frozen=True)
class ModelChanges:
    """What a loaded model has otherwise than its folder.

    Attributes:
        dropout: overrides every dropout of the config; no layer is then skipped in training. None:
            as the config says.
        resize: add rows for tokens of the folder's tokenizer that have none (`grow_vocabulary`).
        adapter: add a LoRA adapter; if the folder is an adapter folder, continue that one. Without
            it an adapter folder is merged into the weights of its base.
        kinds: of language models that the run takes, beside causal ones.
    """

    dropout: float | None = None
    resize: bool = False
    adapter: AdapterSettings | None = None
    kinds: tuple[LMKind, ...] = ()


AS_SAVED = ModelChanges()


def changes_to_train(
    config: StepConfig, prefix: str = "", dropout: float | None = None, quantises: bool = True
) -> ModelChanges:
    """What the flags change in a model that trains.

    Args:
        config: the flags.
        prefix: of the model's flags: "", in step 3 "actor_" or "critic_".
        dropout: that of the changes.
        quantises: whether frozen weights are quantised if the flags ask for it.
    """
    adapter = adapter_settings(config, prefix, quantises)
    changes = replace(frozen_changes(config), kinds=further_kinds(config, trains=True))
    return replace(changes, dropout=dropout, adapter=adapter)


def frozen_changes(config: StepConfig) -> ModelChanges:
    """What the flags change in a model that does not train."""
    return ModelChanges(resize=config.run.resize_vocabulary, kinds=further_kinds(config))


def further_changes(config: StepConfig, model: FurtherModel) -> ModelChanges:
    """What the flags change in a model that a feature adds. One that reads texts of its own is a
    language model of text."""
    changes = frozen_changes(config)
    if not model.reads_tokens_of_actor:
        changes = replace(changes, kinds=())
    return changes


@dataclass(frozen=True)
class _Source:
    """The model that a folder holds, and how transformers builds it."""

    folder: str
    config: PretrainedConfig
    kind: Any  # a class, or an auto class, whose `from_pretrained` reads the weights
    build: Callable[[], PreTrainedModel]  # makes the model without the weights of the folder
    # patterns that rename weights of the checkpoint
    key_mapping: dict[str, str] | None = None
    # changes the model once its weights are loaded
    finish: Callable[[PreTrainedModel], None] = leave_whole


def require_length(folder: str, longest: int, flags: str) -> None:
    """Require that the model can read rows of `longest` tokens (set by `flags`). Learned positions
    must cover them; of rotary ones, `MAX_EXTRAPOLATION` times the known positions, with a
    warning."""
    config = load_config(folder, "model").get_text_config()
    positions = getattr(config, "max_position_embeddings", None)
    if positions is None or longest <= positions - first_position(config):
        return
    positions -= first_position(config)
    beyond = (
        f"{flags} of {longest} tokens goes beyond the {positions} positions of {shown_path(folder)}"
    )
    if not hasattr(config, "rope_parameters") or longest > MAX_EXTRAPOLATION * positions:
        raise UserError(f"{beyond}; lower it")
    log_once(f"{beyond}; it was not trained on longer rows: lower it", logging.WARNING)


@contextmanager
def _prepared_loading(
    folder: str, ds_config: dict[str, Any] | None, device: str | None = None
) -> Iterator[None]:
    """In the block, `from_pretrained` builds each layer already partitioned over the ranks if
    `ds_config` is ZeRO-3. Ranks then wait for each other inside, so the watchdog is paused only for
    other configs. `device`: as in `load_causal_lm`."""
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


def check_causal_lm(folder: str, changes: ModelChanges = AS_SAVED) -> None:
    """Compare the checkpoint with the causal language model of its config, without reading the
    weights. A model that is none, or has a score head, is refused too, and an adapter of the
    `changes` (see `load_causal_lm`) that cannot be added."""
    config = load_config(folder, "model")
    kind = kind_of_lm(config, changes.kinds)
    if kind is CAUSAL:
        check_architecture(config, folder, needs_lm=True)
    base = base_folder(folder, "model")
    heads = checkpoint_shapes(base).keys() & {SCORE_WEIGHT, DEEPSPEED_CHAT_HEAD}
    if heads or (base != folder and saves_head(folder)):
        raise UserError(
            f"{folder}: is a reward model or critic, because it has a score head"
            f" ({min(heads, default=SCORE_WEIGHT)}), so it cannot generate text; give a causal"
            " language model, such as the SFT model"
        )
    check_weights(kind.auto_class, base, config)
    check_adapter(partial(kind.build, config), folder, changes.adapter)


def load_causal_lm(
    folder: str,
    dtype: str,
    ds_config: dict[str, Any] | None,
    changes: ModelChanges = AS_SAVED,
    device: str | None = None,
) -> PreTrainedModel:
    """A checked causal language model, ready for `deepspeed.initialize` with the same `ds_config`.

    Args:
        folder: of a model, or of an adapter.
        dtype: "bf16", "fp16" or "fp32".
        ds_config: of the engine that will hold the model; None: it gets none. With ZeRO-3 the
            weights are partitioned while they are loaded.
        changes: what it has otherwise than its folder.
        device: "meta" builds the model without its weights; None loads them.
    """
    check_causal_lm(folder, ModelChanges(kinds=changes.kinds))
    config = _with_dropout(load_config(folder, "model"), changes.dropout)
    kind = kind_of_lm(config, changes.kinds)
    build = partial(kind.build, config)
    source = _Source(folder, config, kind.auto_class, build, finish=kind.take_apart)
    return _load(source, dtype, ds_config, changes, device)


def check_sequence_classifier(
    folder: str, new_head: bool, changes: ModelChanges = AS_SAVED
) -> bool:
    """Compare the checkpoint with a one-label sequence classifier, without reading the weights, and
    try to add the adapter of the `changes`. Returns whether it has no head, which `new_head`
    (training a reward model) allows: it will be new."""
    config = load_config(folder, "model")
    check_classifier_config(config, folder, changes.kinds)
    build = partial(build_classifier, config, changes.kinds)
    with reading(f"{folder}: no reward model can be built from its config.json"):
        kind = classifier_class(config, changes.kinds)
        config = config_for(kind, config)
        unused = lm_head_names(config)
    base = base_folder(folder, "model")
    has_head = base != folder and saves_head(folder)
    mapping = _deepspeed_chat_mapping(base, kind)
    missing = check_weights(kind, base, config, mapping, {SCORE_WEIGHT}, unused)
    is_new = bool(missing) and not has_head
    if is_new and not new_head:
        raise UserError(
            f"{folder}: has no trained scalar head ({SCORE_WEIGHT}), so it is a language model and"
            " not a reward model; give a reward model, which step 2 trains"
        )
    check_adapter(build, folder, changes.adapter)
    return is_new


def load_sequence_classifier(
    folder: str,
    dtype: str,
    ds_config: dict[str, Any] | None,
    new_head: bool,
    changes: ModelChanges = AS_SAVED,
    device: str | None = None,
    zero_head: bool = False,
) -> PreTrainedModel:
    """A checked model with a scalar head: a decoder's one-label sequence classifier, or
    DeepSpeed-Chat's layout. A base or causal model without a head gets a new one if `new_head`,
    random as transformers makes it or, with `zero_head`, zero. The head trains with an adapter. The
    other arguments are those of `load_causal_lm`."""
    is_new = check_sequence_classifier(folder, new_head, ModelChanges(kinds=changes.kinds))
    if is_new:
        logger().info(
            f"model: {folder} has no scalar head; a new one is initialised and will be trained"
        )
    config = _with_dropout(load_config(folder, "model"), changes.dropout)
    build = partial(build_classifier, config, changes.kinds)
    finish = kind_of_lm(config, changes.kinds).take_apart
    kind = classifier_class(config, changes.kinds)
    config = config_for(kind, config)
    mapping = _deepspeed_chat_mapping(base_folder(folder, "model"), kind) or None
    source = _Source(folder, config, kind, build, mapping, finish)
    model = _load(source, dtype, ds_config, changes, device)
    if is_new and zero_head:
        head = model.get_parameter(SCORE_WEIGHT)
        with deepspeed.zero.GatheredParameters([head], modifier_rank=0):
            nn.init.zeros_(head)
    return model


def _load(
    source: _Source,
    dtype: str,
    ds_config: dict[str, Any] | None,
    changes: ModelChanges,
    device: str | None,
) -> PreTrainedModel:
    """Load a model and make the `changes` but the dropout, which its config has already. The
    arguments are those of `load_causal_lm`."""
    folder = source.folder
    base = base_folder(folder, "model")
    if device:
        options: dict[str, Any] = {"device_map": device}
    else:
        options = quantising_options(source.build, changes.adapter, DTYPES[dtype], ds_config)
    with _prepared_loading(base, ds_config, device):
        model: PreTrainedModel = source.kind.from_pretrained(
            base,
            config=source.config,
            dtype=DTYPES[dtype],
            key_mapping=source.key_mapping,
            **options,
        )
    source.finish(model)
    if changes.resize:
        rows = source.config.get_text_config().vocab_size
        tokens = len(load_tokenizer(folder, "model"))
        if grow_vocabulary(model, tokens):
            logger().info(
                f"model: {folder} has rows for {rows} tokens; adding {tokens - rows}"
                " (--resize_vocabulary)"
            )
    adapt(model, folder, changes.adapter)
    report_adapter(model, folder, changes.adapter)
    return model


def _with_dropout(config: PretrainedConfig, dropout: float | None) -> PretrainedConfig:
    """The config with this dropout and, because ranks must run the same layers, without layers that
    training skips."""
    configs = [config.get_text_config()]  # the config itself, except for models of images and text
    configs += [getattr(config, name) for name in config.sub_configs if hasattr(config, name)]
    rates = {}
    if dropout is not None:
        rates = {**dict.fromkeys(DROPOUTS, dropout), **dict.fromkeys(SKIPPED_LAYERS, 0.0)}
    for name, rate in rates.items():
        for with_rate in configs:
            if hasattr(with_rate, name):
                setattr(with_rate, name, rate)
    return config


def _deepspeed_chat_mapping(folder: str, kind: type[PreTrainedModel]) -> dict[str, str]:
    """Patterns that rename the weights of DeepSpeed-Chat's reward models to those of the class
    `kind`; {} if the folder holds another model."""
    if not any(name.startswith("v_head.") for name in checkpoint_shapes(folder)):
        return {}
    return {r"^rwtransformer\.": f"{kind.base_model_prefix}.", r"^v_head\.": f"{SCORE}."}
