"""Malformed model folders, generated from a seed: each works or is rejected in one line."""

import json
import random
import shutil
from pathlib import Path

import pytest
from transformers import CodeGenConfig, CodeGenForCausalLM

from dschat_ppo.errors import UserError
from dschat_ppo.models.loading import check_causal_lm, check_sequence_classifier, check_vocabulary, load_config
from dschat_ppo.models.tokenizers import load_tokenizer

FLAG = "--model_name_or_path"
CONTENTS = {
    "zeros": b"\0" * 5000, "nothing": b"", "null": b"null", "a list": b"[1, 2]", "text": b'"abc"',
    "nested 5,000 deep": b"[" * 5000 + b"]" * 5000, "no UTF-8": b'{"a": "\xff\xfe"}',
}  # fmt: skip


def is_refused(read, folder: Path) -> bool:
    """Whether reading is rejected in one line that names the file; any other exception fails the test."""
    try:
        read(folder)
    except UserError as problem:
        assert str(folder) in str(problem)
        assert "\n" not in str(problem) and len(str(problem)) < 1500
        return True
    return False


def read_model(folder: Path) -> None:
    config, tokenizer = load_config(str(folder), FLAG), load_tokenizer(str(folder), FLAG)
    check_vocabulary(tokenizer, config, FLAG, str(folder))
    check_causal_lm(str(folder))


@pytest.fixture
def model(assets, tmp_path) -> Path:
    return Path(shutil.copytree(assets / "lm", tmp_path / "model"))


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json"])
def test_malformed_config_files_are_rejected(model, name):
    whole = (model / name).read_bytes()
    for content in (*CONTENTS.values(), whole[: len(whole) // 2]):
        (model / name).write_bytes(content)
        assert is_refused(read_model, model), content[:20]


@pytest.mark.parametrize(("kind", "settings", "words"), [
    ("lm", {"vocab_size": 4 * 10**7, "hidden_size": 2**18}, "wrong shape"),  # ten trillion, before they take memory
    ("lm", {"num_hidden_layers": 10_001}, "'num_hidden_layers' is above 10000"),
    ("lm", {"num_key_value_heads": 0}, "LlamaConfig"), ("lm", {"hidden_act": "nonsense"}, "LlamaConfig.*nonsense"),
    ("lm", {"text_config": 7}, "vocab_size"), ("reward", {"hidden_act": "nonsense"}, "nonsense"),
    ("reward", {"vocab_size": -1}, "negative dimension"), ("codegen", {"n_head": 0}, "by zero"),
])  # fmt: skip
def test_a_model_that_cannot_be_built_is_rejected_in_one_line(assets, tmp_path, kind, settings, words):
    """Language models; reward models; those that transformers has no classifier for."""
    folder = tmp_path / "model"
    if kind == "codegen":
        sizes = {"vocab_size": 60, "n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 64, "rotary_dim": 4}
        CodeGenForCausalLM(CodeGenConfig(**sizes)).save_pretrained(folder)
    else:
        shutil.copytree(assets / kind, folder)
    place = folder / "config.json"
    place.write_text(json.dumps(json.loads(place.read_text()) | settings))
    words = words if kind == "lm" else f"no reward model can be built from its config.json: .*{words}"
    with pytest.raises(UserError, match=words) as caught:
        read_model(folder) if kind == "lm" else check_sequence_classifier(str(folder), new_head=True)
    assert str(folder) in str(caught.value) and "\n" not in str(caught.value)


def test_flipped_bytes_of_weights_are_rejected_or_read(model):
    rng, whole = random.Random(0), (model / "model.safetensors").read_bytes()
    for _ in range(30):
        damaged = bytearray(whole)
        damaged[rng.randrange(400)] ^= rng.randrange(1, 256)  # the header; damaged numbers cannot be detected
        (model / "model.safetensors").write_bytes(damaged)
        is_refused(read_model, model)
    (model / "model.safetensors").write_bytes(whole[:-1])
    assert is_refused(read_model, model)
