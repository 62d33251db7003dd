"""Tokenizers: without an EOS, a PAD or an unknown token, or that cannot be loaded."""

import json
import sys

import addition
import pytest
from conftest import tiny_config
from transformers import AutoTokenizer

from dschat_ppo.errors import UserError
from dschat_ppo.models.tokenizers import filler_id, load_tokenizer
from dschat_ppo.tools import toy

FLAG = "--model_name_or_path"


def save(folder, without, **settings):
    """A tokenizer without these special tokens, beside settings of a model: file -> contents."""
    toy.make_tokenizer(["a few words to merge"]).save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    config = {name: value for name, value in json.loads(file.read_text()).items() if name not in without}
    file.write_text(json.dumps(config))
    for name, contents in settings.items():
        (folder / f"{name}.json").write_text(json.dumps(contents))
    return folder


def ids(eos):
    return {"model_type": "llama", "eos_token_id": eos}


@pytest.mark.parametrize(("settings", "eos", "file"), [
    ({"config": ids(1)}, 1, "config.json"),
    ({"config": ids(1), "generation_config": {"eos_token_id": [2, 1]}}, 2, "generation_config.json"),
    ({"config": {"model_type": "gemma3", "text_config": {"eos_token_id": 3}}}, 3, "config.json"),
    ({"config": ids([200, 1])}, 1, "config.json"),
])  # fmt: skip
def test_without_eos_the_one_of_the_model_is_taken(tmp_path, said, settings, eos, file):
    tokenizer = load_tokenizer(str(save(tmp_path, ["eos_token"], **settings)), FLAG)
    assert tokenizer.eos_token_id == eos and eos in tokenizer.all_special_ids
    assert tokenizer.decode([eos, 9], skip_special_tokens=True) == tokenizer.decode([9])
    assert said == [
        f"{FLAG} {tmp_path}: the tokenizer has no EOS token; answers end with {tokenizer.eos_token}, the one of {file}"
    ]
    tokenizer.save_pretrained(tmp_path / "saved")
    assert AutoTokenizer.from_pretrained(tmp_path / "saved").eos_token_id == eos


@pytest.mark.parametrize("config", [{"model_type": "llama"}, ids(None), ids(100), ids(5000), ids([])])
def test_without_eos_in_the_model_either_the_message_names_the_way_out(tmp_path, config):
    """100 is a word, 5000 is no token; LlamaConfig's default of 2 is not in the file."""
    with pytest.raises(UserError, match=rf"^{FLAG} .*names an EOS token.*set eos_token in tokenizer_config.json"):
        load_tokenizer(str(save(tmp_path, ["eos_token"], config=config)), FLAG)


def test_a_folder_without_a_tokenizer_is_named(tmp_path):
    with pytest.raises(UserError, match=rf"^--tokenizer {tmp_path}: it has no tokenizer, or one that cannot"):
        load_tokenizer(str(tmp_path), "--tokenizer")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))  # transformers makes an empty tokenizer
    with pytest.raises(UserError, match="has no tokenizer"):
        load_tokenizer(str(tmp_path), "--tokenizer")
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match="one that cannot be loaded"):
        load_tokenizer(str(tmp_path), "--tokenizer")


def test_an_adapter_folder_takes_the_eos_of_its_base(tmp_path):
    base = save(tmp_path / "base", [], config=ids(1))
    adapter = save(
        tmp_path / "adapter", ["eos_token"], adapter_config={"base_model_name_or_path": str(base), "peft_type": "LORA"}
    )
    assert load_tokenizer(str(adapter), FLAG).eos_token_id == 1


def test_without_pad_the_eos_fills_rows(tmp_path):
    tokenizer = load_tokenizer(str(save(tmp_path, ["pad_token"], config=ids(1))), FLAG)
    assert tokenizer.pad_token_id is None and filler_id(tokenizer) == 1


def test_a_tokenizer_without_unknown_token_is_loaded_and_one_that_cannot_encode_its_own_words_refused(tmp_path):
    """The first refuses a text of other words than its own, as that of the addition task does."""
    addition.make_tokenizer().save_pretrained(tmp_path)
    file = tmp_path / "tokenizer.json"
    content = json.loads(file.read_text())
    for settings in ({}, {"unk_token": "[UNK]"}):
        content["model"] |= settings
        file.write_text(json.dumps(content))
        tokenizer = load_tokenizer(str(tmp_path), "--model")
        assert tokenizer.decode(tokenizer.encode("12+34=")) == "12+34="
    content["normalizer"] = {"type": "Prepend", "prepend": "x"}  # every word becomes another one
    file.write_text(json.dumps(content))
    with pytest.raises(UserError, match="--model .*it has no tokenizer, or one that cannot be loaded"):
        load_tokenizer(str(tmp_path), "--model")


def test_a_tokenizer_model_alone_asks_for_sentencepiece(tmp_path, monkeypatch):
    tiny_config().save_pretrained(tmp_path)
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>\x15\x00\x00\x00\x00\x18\x02")
    with pytest.raises(UserError, match="--model .*needs the package sentencepiece"):
        load_tokenizer(str(tmp_path), "--model")
