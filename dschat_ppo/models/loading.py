"""Loading models and tokenizers, strictly: what a checkpoint lacks or has too much is an error or is said."""

from __future__ import annotations

import os
from collections.abc import Iterator, Set
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import snapshot_download
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from dschat_ppo.common.atomic_files import read_blocks
from dschat_ppo.common.dist import local_rank, main_rank_of_node_first
from dschat_ppo.common.heartbeat import watchdog_paused
from dschat_ppo.common.logging import logger
from dschat_ppo.errors import UserError, reading
from dschat_ppo.models.architectures import check_architecture, first_position
from dschat_ppo.models.classifiers import classifier_class, config_for, lm_names
from dschat_ppo.models.config_values import check_settings
from dschat_ppo.models.vocabulary import grow_vocabulary
from dschat_ppo.models.weight_files import checkpoint_shapes, is_old_buffer, weight_files

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
    if _needs_sentencepiece(folder):
        raise UserError(
            f"{flag} {folder}: its only tokenizer is a tokenizer.model of SentencePiece; pip install "
            '"dschat_ppo[sentencepiece]", or save a tokenizer.json there'
        )
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


def _needs_sentencepiece(folder: str) -> bool:
    """Whether sentencepiece is needed and missing. transformers would ask for tiktoken, whose files are lines of text;
    those of SentencePiece are protocol buffers, which begin with the tag of the list of pieces."""
    file = Path(folder) / "tokenizer.model"
    if find_spec("sentencepiece") is not None or (Path(folder) / "tokenizer.json").exists() or not file.is_file():
        return False
    with file.open("rb") as stream:
        return stream.read(1) == b"\n"


def filler_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """An id to fill padding with. Masks alone say what is real, so any valid id does: PAD, or EOS without one."""
    return int(tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id)


def check_vocabulary(
    tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig, flag: str, folder: str, other: bool = False,
    resize: bool = False,
) -> None:  # fmt: skip
    """The model at `folder` must have an embedding for every id of `tokenizer`, or get it (`--resize_vocabulary`).

    Args:
        tokenizer: whose ids the model will see.
        config: of the model.
        flag: the flag that named the model.
        folder: the model's folder.
        other: the tokenizer belongs to another model (the actor); then the model's own tokenizer must agree with it.
        resize: embeddings that are missing will be added.
    """
    size = getattr(config.get_text_config(), "vocab_size", None)
    if not isinstance(size, int):
        raise UserError(f"{flag} {folder}: config.json names no 'vocab_size', so it is no language model's")
    if len(tokenizer) > size and not resize:
        whose = "actor's tokenizer; train the reward model from the same base, or" if other else "tokenizer beside it;"
        raise UserError(
            f"{flag} {folder}: its vocabulary of {size} does not fit the {len(tokenizer)} tokens of the {whose} train "
            "with --resize_vocabulary, which adds the missing rows"
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
    if known is None or longest <= (known := known - first_position(config)):
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
        with watchdog_paused():
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
    for file in weight_files(folder):
        for _ in read_blocks(file):
            pass


def check_causal_lm(folder: str) -> None:
    """Compare the checkpoint with the causal language model of its config, without reading the weights.

    Raises:
        UserError: the model is no causal language model, or the checkpoint does not hold exactly its weights (they are
            listed).
    """
    config = load_config(folder, "model")
    check_architecture(config, folder, needs_lm=True)
    _check_weights(AutoModelForCausalLM, folder, config)


def load_causal_lm(
    folder: str, dtype: str, ds_config: dict[str, Any] | None, dropout: float | None = None, resize: bool = False
) -> PreTrainedModel:
    """A checked causal language model, ready for `deepspeed.initialize` with the same `ds_config`.

    Args:
        folder: model folder.
        dtype: "bf16", "fp16" or "fp32".
        ds_config: the DeepSpeed config that the model will run under; None for none.
        dropout: overrides every dropout of the config.
        resize: add rows for tokens of the folder's tokenizer that the model has none for (`grow_vocabulary`).
    """
    check_causal_lm(folder)
    config = _with_dropout(load_config(folder, "model"), dropout)
    with _loading(folder, ds_config):
        model = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=DTYPES[dtype])
    return _resized(model, folder) if resize else model


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
    check_architecture(config, folder, needs_lm=False)
    is_classifier = any(name.endswith("ForSequenceClassification") for name in config.architectures or [])
    if is_classifier and config.num_labels != 1:
        raise UserError(f"{folder}: the classifier has {config.num_labels} labels; a reward model has one")
    with reading(f"{folder}: no reward model can be built from its config.json"):
        kind = classifier_class(config)
        config = config_for(kind, config)
        unused = lm_names(config)
    allowed = {SCORE_HEAD} if new_head else set()
    return bool(_check_weights(kind, folder, config, _deepspeed_chat_mapping(folder, kind), allowed, unused))


def load_sequence_classifier(
    folder: str, dtype: str, ds_config: dict[str, Any] | None, new_head: bool, dropout: float | None = None,
    resize: bool = False,
) -> PreTrainedModel:  # fmt: skip
    """A checked model with a scalar head: any sequence classifier of one label, or DeepSpeed-Chat's layout.

    Args:
        folder: model folder. A base or causal model without a head gets a new one, if `new_head` allows it.
        dtype: "bf16", "fp16" or "fp32".
        ds_config: the DeepSpeed config that the model will run under; None for none.
        new_head: True for training a reward model; False where a trained head is needed.
        dropout: overrides every dropout of the config.
        resize: see `load_causal_lm`.
    """
    if check_sequence_classifier(folder, new_head):
        logger().info(f"model: {folder} has no scalar head; a new one is initialised and will be trained")
    config = _with_dropout(load_config(folder, "model"), dropout)
    kind = classifier_class(config)
    config = config_for(kind, config)
    with _loading(folder, ds_config):
        model = kind.from_pretrained(
            folder, config=config, dtype=DTYPES[dtype], key_mapping=_deepspeed_chat_mapping(folder, kind) or None
        )
    return _resized(model, folder) if resize else model


def _resized(model: PreTrainedModel, folder: str) -> PreTrainedModel:
    known, needed = model.config.get_text_config().vocab_size, len(load_tokenizer(folder, "model"))
    if grow_vocabulary(model, needed):
        logger().info(f"model: {folder} has rows for {known} tokens; {needed - known} are added (--resize_vocabulary)")
    return model


def _with_dropout(config: PretrainedConfig, dropout: float | None) -> PretrainedConfig:
    if dropout is not None:
        for name in _DROPOUTS:
            if hasattr(config, name):
                setattr(config, name, dropout)
    return config


def _deepspeed_chat_mapping(folder: str, kind: type[PreTrainedModel]) -> dict[str, str]:
    """Renames `rwtransformer.*` and `v_head.*` to the classifier's names, if the checkpoint has them."""
    if not any(name.startswith("v_head.") for name in checkpoint_shapes(folder)):
        return {}
    return {r"^rwtransformer\.": f"{kind.base_model_prefix}.", r"^v_head\.": "score."}


def _check_weights(
    kind: Any,
    folder: str,
    config: PretrainedConfig,
    key_mapping: dict[str, str] | None = None,
    allowed_missing: Set[str] = frozenset(),
    allowed_unexpected: Set[str] = frozenset(),
) -> Set[str]:
    """Compare the checkpoint with the model on the meta device; return the allowed names that are missing."""
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)  # its report of the same facts is a page long
    try:
        with watchdog_paused(), reading(f"{folder}: its weights cannot be read as those of a {type(config).__name__}"):
            _, info = kind.from_pretrained(
                folder, config=config, device_map="meta", output_loading_info=True, key_mapping=key_mapping or None,
                ignore_mismatched_sizes=True,
            )  # fmt: skip
    finally:
        transformers.logging.set_verbosity(verbosity)
    missing = set(info["missing_keys"])
    unexpected = {name for name in info["unexpected_keys"] if not name.startswith(LM_HEADS)} - allowed_unexpected
    if unexpected:
        unexpected -= {name for name, shape in checkpoint_shapes(folder).items() if is_old_buffer(name, shape)}
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
