"""Load the tokenizer of a model folder, and save it, without the model classes of transformers,
whose import takes seconds."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from dschat_ppo.common.logging import logger
from dschat_ppo.errors import UserError, reading
from dschat_ppo.models.model_folders import (
    base_folder,
    check_settings,
    files_key,
)

SENTENCEPIECE = "tokenizer.model"
TOKENIZER_CONFIG = "tokenizer_config.json"
_READ: dict[tuple[Any, ...], PreTrainedTokenizerBase] = {}  # folder and its files -> tokenizer


def load_tokenizer(folder: str, flag: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder, or of its base, with an EOS token: its own, or the
    settings'."""
    if not any(Path(folder).glob("tokenizer*")):
        folder = base_folder(folder, flag)
    if (Path(folder) / "config.json").exists():  # transformers reads it here too
        check_settings(folder, f"{flag} {folder}: config.json cannot be used")
    hint = ""
    if (Path(folder) / "tokenizer.model").exists():
        hint = " (a tokenizer.model alone needs the package sentencepiece)"
    with reading(f"{flag} {folder}: it has no tokenizer, or one that cannot be loaded{hint}"):
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        words = set(tokenizer.get_vocab().values()) - set(tokenizer.all_special_ids)
        # files that do not match fail only in use; any other text may lack an unknown token
        if words:
            tokenizer.encode(tokenizer.decode([min(words)]))
    if not words:  # transformers made an empty one
        raise UserError(f"{flag} {folder}: has no tokenizer; save the model's tokenizer there")
    if tokenizer.eos_token_id is None:
        token, file = _eos_of_model(folder, flag, tokenizer)
        tokenizer.eos_token = token
        logger().info(
            f"{flag} {folder}: the tokenizer has no EOS token; answers end with {token}, the one of"
            f" {file}"
        )
    return tokenizer


def read_tokenizer(folder: str, flag: str) -> PreTrainedTokenizerBase:
    """As `load_tokenizer`, for callers that do not change it: loaded once while the folder's files
    stay as they are. A large vocabulary takes a second to load, and step 3 compares that of the
    reward model several times."""
    key = files_key(folder)
    if key not in _READ:
        _READ[key] = load_tokenizer(folder, flag)
    return _READ[key]


def _eos_of_model(folder: str, flag: str, tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """The EOS token that a model's settings name, and the name of their file; of several tokens the
    first. A word of the vocabulary is not taken: settings that were copied from another model name
    any id. `UserError`: they name none."""
    special = {*tokenizer.added_tokens_decoder, *tokenizer.all_special_ids}
    for file in ("generation_config.json", "config.json"):
        path = Path(base_folder(folder, flag)) / file
        if not path.is_file():
            continue
        with reading(f"{flag} {path}: cannot be used"):
            settings = json.loads(path.read_text(encoding="utf-8"))
            of_text_model = settings.get("text_config") or {}
            ids = settings.get("eos_token_id", of_text_model.get("eos_token_id"))
        if not isinstance(ids, list):
            ids = [ids]
        for token_id in ids:
            if token_id in special:
                return str(tokenizer.convert_ids_to_tokens(token_id)), file
    raise UserError(
        f"{flag} {folder}: neither the tokenizer nor the model's eos_token_id names an EOS token,"
        " so answers could not end; set eos_token in tokenizer_config.json to a special token of"
        " the tokenizer"
    )


def filler_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """An id for padding: PAD, or EOS without one. Masks mark the real tokens, so any valid id
    works."""
    if tokenizer.pad_token_id is None:
        return int(tokenizer.eos_token_id)
    return int(tokenizer.pad_token_id)


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a tokenizer and its chat template to `folder`, with the SentencePiece file of the
    folder from which the tokenizer was loaded.

    transformers writes `tokenizer.json` alone. Other programs, such as llama.cpp's converter, read
    the SentencePiece file in its place. That file lacks tokens that were added later, so
    `tokenizer_config.json` lists them (`added_tokens_decoder`), and it does not say whether BOS
    precedes a text (`add_bos_token`).
    """
    tokenizer.save_pretrained(folder)
    if not tokenizer.name_or_path:  # made in memory
        return
    source = Path(tokenizer.name_or_path) / SENTENCEPIECE
    if not source.is_file():
        return
    shutil.copyfile(source, folder / SENTENCEPIECE)
    config_file = folder / TOKENIZER_CONFIG
    config = json.loads(config_file.read_text(encoding="utf-8"))
    config["added_tokens_decoder"] = {
        str(token_id): token.__getstate__()
        for token_id, token in tokenizer.added_tokens_decoder.items()
    }
    if tokenizer.bos_token_id is not None:
        config["add_bos_token"] = tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]
    text = json.dumps(config, indent=2, sort_keys=True, ensure_ascii=False)
    config_file.write_text(text + "\n", encoding="utf-8")
