"""Loading models and tokenizers, strictly: what a checkpoint lacks or has too much is an error or is said."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import snapshot_download
from safetensors import safe_open
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from dschat_ppo.common.dist import local_rank, main_rank_of_node_first
from dschat_ppo.common.durable import blocks_of
from dschat_ppo.common.logging import logger
from dschat_ppo.common.progress import patient
from dschat_ppo.errors import UserError, reading
from dschat_ppo.models.settings import check_settings

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SCORE_HEAD = "score.weight"
MOST_EXTRAPOLATION = 4  # rotary positions beyond this multiple of those trained are taken for a slip
LM_HEADS = ("lm_head.", "embed_out.")  # a language model's own head, of no use to a classifier
_DROPOUTS = (
    "dropout", "attention_dropout", "hidden_dropout", "activation_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop",
    "embed_dropout", "classifier_dropout", "hidden_dropout_prob", "attention_probs_dropout_prob",
)  # fmt: skip
_WEIGHTS = ("*.safetensors", "*.bin", "*.json", "*.jinja", "*.model", "*.txt")


def model_folder(name: str, flag: str) -> str:
    """The local folder of a model named by `flag`: itself, or the hub's files after a download.

    Raises:
        UserError: there is no such folder, and the hub has no such model (or cannot be reached).
    """
    name = os.path.expanduser(name)  # a shell leaves the `~` of `--flag=~/model` as it is
    if Path(name).is_dir():
        if not (Path(name) / "config.json").exists():
            raise UserError(f"{flag} {name}: the folder holds no config.json, so it is no Hugging Face model")
        return name
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise UserError(f"{flag} {name}: no such folder")
    refused = f"{flag} {name}: neither a local folder nor a model on the hub that can be fetched"
    with main_rank_of_node_first(), reading(refused):
        return str(snapshot_download(name, allow_patterns=list(_WEIGHTS)))


def load_config(folder: str, flag: str) -> PretrainedConfig:
    """The model's configuration, without its weights.

    Raises:
        UserError: `config.json` cannot be read, or what it says is no model.
    """
    refused = f"{flag} {folder}: config.json cannot be used"
    check_settings(folder, refused)
    with reading(refused):  # without trust_remote_code transformers would ask at a terminal
        return AutoConfig.from_pretrained(folder, trust_remote_code=False, return_dict=True)


def load_tokenizer(folder: str, flag: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder; it must have an EOS.

    Raises:
        UserError: no usable tokenizer, one without words, or one without EOS.
    """
    if (Path(folder) / "config.json").exists():  # transformers reads it here too
        check_settings(folder, f"{flag} {folder}: config.json cannot be used")
    with reading(f"{flag} {folder}: its tokenizer cannot be loaded"):
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        words, special = set(tokenizer.get_vocab().values()), set(tokenizer.all_special_ids)
        tokenizer.encode("a text")  # parts that do not go together show only in use
    if words <= special:  # transformers makes one up
        raise UserError(f"{flag} {folder}: holds no tokenizer; save the model's tokenizer there")
    if tokenizer.eos_token_id is None:
        raise UserError(f"{flag} {folder}: the tokenizer has no EOS token, so answers could not end; give it one")
    return tokenizer


def filler_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """An id to fill padding with. Masks alone say what is real, so any valid id does: PAD, or EOS without one."""
    return int(tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id)


def check_vocabulary(
    tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig, flag: str, folder: str, other: bool = False
) -> None:
    """The model at `folder` must have an embedding for every id of `tokenizer`.

    Args:
        tokenizer: whose ids the model will see.
        config: of the model.
        flag: the flag that named the model.
        folder: the model's folder.
        other: the tokenizer belongs to another model (the actor); then the model's own tokenizer must agree with it.
    """
    size = getattr(config.get_text_config(), "vocab_size", None)
    if not isinstance(size, int):
        raise UserError(f"{flag} {folder}: config.json names no 'vocab_size', so it is no language model's")
    if len(tokenizer) > size:
        raise UserError(
            f"{flag} {folder}: its vocabulary of {size} does not fit the {len(tokenizer)} tokens of the "
            + ("actor's tokenizer; train the reward model from the same base" if other else "tokenizer beside it")
        )
    if other and load_tokenizer(folder, flag).get_vocab() != tokenizer.get_vocab():
        raise UserError(
            f"{flag} {folder}: its tokenizer differs from the actor's, so its scores would be of other words; "
            "train the reward model from the same base"
        )


def check_length(folder: str, longest: int, flags: str) -> None:
    """Rows of `longest` tokens (set by `flags`) must be within the positions that the model knows.

    Raises:
        UserError: they are not, and positions are learned ones. With rotary positions it is a warning up to
            `MOST_EXTRAPOLATION` times the positions known, and this error beyond.
    """
    config = load_config(folder, "model").get_text_config()
    known = getattr(config, "max_position_embeddings", None)
    if known is None or longest <= known:
        return
    message = f"{flags} of {longest} tokens goes beyond the {known} positions that {folder} knows"
    if not hasattr(config, "rope_parameters") or longest > MOST_EXTRAPOLATION * known:
        raise UserError(f"{message}; lower it")
    logger().warning(f"{message}; it was not trained on longer rows")


@contextmanager
def _loading(folder: str, ds_config: dict[str, Any] | None) -> Iterator[None]:
    """Inside, `from_pretrained` builds each layer already partitioned over the ranks if the config is ZeRO-3.

    Then ranks wait for each other inside, and the watchdog has no patience.
    """
    if local_rank() == 0:
        _read_through(folder)
    if ds_config is None or ds_config["zero_optimization"]["stage"] != 3:
        with patient():
            yield
        return
    from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config

    keep_alive = HfDeepSpeedConfig(ds_config)  # transformers holds it weakly
    try:
        yield
    finally:
        del keep_alive
        unset_hf_deepspeed_config()


@cache
def _read_through(folder: str) -> None:
    """Once, so that the machine has the weights in memory. It is from a mapped file that they are copied later, in
    between collectives, where a disk that is slow cannot be told from a rank that hangs; here it can."""
    for file in _weight_files(folder):
        for _ in blocks_of(file):
            pass


def _require_causal(folder: str, config: PretrainedConfig) -> None:
    """Rows are padded on the right and no mask is given, so a token must not see those after it."""
    if getattr(config.get_text_config(), "use_bidirectional_attention", None) in (True, "all"):
        raise UserError(f"{folder}: use_bidirectional_attention lets tokens see the future; take a causal model")


def check_causal_lm(folder: str) -> None:
    """Compare the checkpoint with the causal language model of its config, without reading the weights.

    Raises:
        UserError: the model is no causal language model, or the checkpoint does not hold exactly its weights (they are
            listed).
    """
    config = load_config(folder, "model")
    _require_causal(folder, config)
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UserError(f"{folder}: transformers has no causal language model for {type(config).__name__}")
    _check_weights(AutoModelForCausalLM, folder, config, {}, set())


def load_causal_lm(
    folder: str, dtype: str, ds_config: dict[str, Any] | None, dropout: float | None = None
) -> PreTrainedModel:
    """A checked causal language model, ready for `deepspeed.initialize` with the same `ds_config`.

    `dropout` overrides every dropout of the config.
    """
    check_causal_lm(folder)
    config = _with_dropout(load_config(folder, "model"), dropout)
    with _loading(folder, ds_config):
        return AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=DTYPES[dtype])


def check_sequence_classifier(folder: str, new_head: bool) -> bool:
    """Compare the checkpoint with a one-label sequence classifier, without reading the weights.

    Args:
        folder: model folder.
        new_head: a base or causal model without a head is welcome (training a reward model).

    Returns:
        True if the head is missing, and will be new.

    Raises:
        UserError: missing or unexpected weights (listed), several labels, an architecture without a classifier or
            not causal, or no head where one is needed.
    """
    config = load_config(folder, "model")
    _require_causal(folder, config)
    is_classifier = any(name.endswith("ForSequenceClassification") for name in config.architectures or [])
    if is_classifier and config.num_labels != 1:
        raise UserError(f"{folder}: the classifier has {config.num_labels} labels; a reward model has one")
    if type(config) not in transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        raise UserError(f"{folder}: transformers has no sequence classifier for {type(config).__name__}")
    config.num_labels = 1
    allowed = {SCORE_HEAD} if new_head else set()
    key_mapping = _deepspeed_chat_mapping(folder, config)
    return bool(_check_weights(AutoModelForSequenceClassification, folder, config, key_mapping, allowed))


def load_sequence_classifier(
    folder: str, dtype: str, ds_config: dict[str, Any] | None, new_head: bool, dropout: float | None = None
) -> PreTrainedModel:
    """A checked model with a scalar head: any sequence classifier of one label, or DeepSpeed-Chat's layout.

    Args:
        folder: model folder. A base or causal model without a head gets a new one, if `new_head` allows it.
        dtype: "bf16", "fp16" or "fp32".
        ds_config: the DeepSpeed config that the model will run under; None for none.
        new_head: True for training a reward model; False where a trained head is needed.
        dropout: overrides every dropout of the config.
    """
    if check_sequence_classifier(folder, new_head):
        logger().info(f"model: {folder} has no scalar head; a new one is initialised and will be trained")
    config = _with_dropout(load_config(folder, "model"), dropout)
    config.num_labels = 1
    with _loading(folder, ds_config):
        return AutoModelForSequenceClassification.from_pretrained(
            folder,
            config=config,
            dtype=DTYPES[dtype],
            key_mapping=_deepspeed_chat_mapping(folder, config) or None,
        )


def _with_dropout(config: PretrainedConfig, dropout: float | None) -> PretrainedConfig:
    if dropout is not None:
        for name in _DROPOUTS:
            if hasattr(config, name):
                setattr(config, name, dropout)
    return config


def _deepspeed_chat_mapping(folder: str, config: PretrainedConfig) -> dict[str, str]:
    """Renames `rwtransformer.*` and `v_head.*` to the classifier's names, if the checkpoint has them."""
    names = _checkpoint_names(folder)
    if not any(name.startswith("v_head.") for name in names):
        return {}
    model_class: Any = transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[type(config)]
    return {r"^rwtransformer\.": f"{model_class.base_model_prefix}.", r"^v_head\.": "score."}


def _weight_files(folder: str) -> list[Path]:
    root = Path(folder)
    return sorted(root.glob("*.safetensors")) or sorted(root.glob("pytorch_model*.bin"))


def _checkpoint_names(folder: str) -> list[str]:
    """Names of the weights in a checkpoint, read without the weights themselves."""
    names: list[str] = []
    for file in _weight_files(folder):
        with reading(f"{file}: cannot be read, copy the model again"):
            if file.suffix == ".bin":
                names += list(torch.load(file, map_location="meta", weights_only=True, mmap=True))
                continue
            with safe_open(file, framework="pt") as weights:
                names += list(weights.keys())
    return names


def _check_weights(
    auto_class: Any,
    folder: str,
    config: PretrainedConfig,
    key_mapping: dict[str, str],
    allowed_missing: set[str],
) -> set[str]:
    """Compare the checkpoint with the model on the meta device; return the allowed names that are missing."""
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)  # its report of the same facts is a page long
    try:
        with patient(), reading(f"{folder}: its weights cannot be read as those of a {type(config).__name__}"):
            _, info = auto_class.from_pretrained(
                folder, config=config, device_map="meta", output_loading_info=True, key_mapping=key_mapping or None,
                ignore_mismatched_sizes=True,
            )  # fmt: skip
    finally:
        transformers.logging.set_verbosity(verbosity)
    missing = set(info["missing_keys"])
    unexpected = {name for name in info["unexpected_keys"] if not name.startswith(LM_HEADS)}
    wrong_shape = {entry[0] if isinstance(entry, tuple) else str(entry) for entry in info["mismatched_keys"]}
    if SCORE_HEAD in missing - allowed_missing and missing <= {SCORE_HEAD}:
        raise UserError(f"{folder}: has no trained scalar head ({SCORE_HEAD}); train a reward model first (step 2)")
    faults = {"missing": missing - allowed_missing, "unexpected": unexpected, "wrong shape": wrong_shape}
    told = "; ".join(f"{fault}: {_some(names)}" for fault, names in faults.items() if names)
    if told:
        raise UserError(f"{folder}: the checkpoint does not fit {type(config).__name__}: {told}")
    return missing & allowed_missing


def _some(names: set[str], most: int = 6) -> str:
    shown = sorted(names)[:most]
    return ", ".join(shown) + (f" and {len(names) - most} more" if len(names) > most else "")
