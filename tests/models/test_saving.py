"""Saved models load in plain transformers; weights that are not finite are found and never saved;
tokenizers."""

import json
import math
import os
import shutil
import sys
from types import SimpleNamespace

import addition
import pytest
import torch
from conftest import tiny_config
from safetensors.torch import load_file, save_file
from test_loading import IDS, expected_scores, write_deepspeed_chat
from tiny_models import model_of
from tiny_tokenizers import tokenizer_of
from torch import nn
from transformers import (
    AutoTokenizer,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
)

from dschat_ppo.errors import NonFiniteError, UserError
from dschat_ppo.models.loading import DTYPES, load_causal_lm, load_sequence_classifier
from dschat_ppo.models.saving import SavedForm, require_finite_weights, save_model, saved_dtype
from dschat_ppo.models.tokenizers import filler_id, load_tokenizer, save_tokenizer
from dschat_ppo.models.weight_headers import checkpoint_dtype
from dschat_ppo.models.wrapped_models import PolicyModel, ScalarModel
from dschat_ppo.tools import toy

NAN, INF = math.nan, math.inf


def engine_with(value: float, dtype: torch.dtype = torch.float32) -> SimpleNamespace:
    """One weight of the last layer is `value`; the model also has an empty and a frozen
    parameter."""
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    model.empty = nn.Parameter(torch.zeros(0))
    model[0].requires_grad_(False)
    model[1].weight.data[1, 4] = value
    return SimpleNamespace(module=model.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_bad_weight_is_named(dtype):
    require_finite_weights("actor", engine_with(-6e4, dtype))
    for value in (NAN, INF, -INF, *([7e4] if dtype == torch.float16 else [])):
        with pytest.raises(
            NonFiniteError, match=r"^actor: weights are not finite \(rank 0: 1\.weight\): an update"
        ):
            require_finite_weights("actor", engine_with(value, dtype))


@pytest.mark.parametrize(
    ("rank", "place", "bad"),
    [(0, 2, True), (1, 2, True), (2, 0, True), (2, 1, False), (3, 0, False)],
)
def test_partitions_are_checked_without_their_padding(monkeypatch, rank, place, bad):
    """Seven numbers over four ranks: three, three, one, none. The rest of a partition is
    padding."""
    monkeypatch.setenv("RANK", str(rank))
    model = nn.Linear(7, 1, bias=False)
    part = torch.zeros(3)
    part[place] = NAN
    for name, value in {"ds_id": 0, "ds_tensor": part, "ds_numel": 7}.items():
        setattr(model.weight, name, value)
    model.weight.data = torch.full((0,), NAN)
    engine = SimpleNamespace(module=model)
    if bad:
        with pytest.raises(NonFiniteError, match=rf"rank {rank}: weight\)"):
            require_finite_weights("actor", engine)
    else:
        require_finite_weights("actor", engine)


def saved_and_loaded(module, folder, kind, assets):
    """Save through the project, load by transformers alone, strictly."""
    save_model(SimpleNamespace(module=module), AutoTokenizer.from_pretrained(assets / "lm"), folder)
    model, info = kind.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    return model.eval()


@pytest.mark.parametrize("safe", [False, True])
def test_model_from_a_deepspeed_chat_checkpoint_is_saved_for_plain_transformers(
    assets, tmp_path, safe
):
    original = LlamaForSequenceClassification.from_pretrained(assets / "reward").eval()
    write_deepspeed_chat(original, tmp_path / "old", safe)
    module = ScalarModel(load_sequence_classifier(str(tmp_path / "old"), "fp32", None, False))
    again = saved_and_loaded(module, tmp_path / "new", LlamaForSequenceClassification, assets)
    torch.testing.assert_close(expected_scores(again), expected_scores(original), rtol=0, atol=0)


def test_the_umask_decides_who_reads_the_weights(assets, tmp_path):
    module = PolicyModel(load_causal_lm(str(assets / "lm"), "fp32", None))
    before = os.umask(0o027)
    try:
        saved_and_loaded(module, tmp_path, LlamaForCausalLM, assets)
    finally:
        os.umask(before)
    assert {file.stat().st_mode & 0o777 for file in tmp_path.iterdir()} == {0o640}


def test_tied_weights_survive_saving(assets, tmp_path):
    LlamaForCausalLM(tiny_config(tie_word_embeddings=True)).save_pretrained(tmp_path / "tied")
    module = PolicyModel(load_causal_lm(str(tmp_path / "tied"), "fp32", None))
    again = saved_and_loaded(module, tmp_path / "new", LlamaForCausalLM, assets)
    assert again.lm_head.weight is again.model.embed_tokens.weight
    with torch.no_grad():
        torch.testing.assert_close(
            again(IDS).logits, module.lm.eval()(IDS).logits, rtol=0, atol=1e-5
        )


def test_generation_config_that_transformers_refuses_to_save_loses_nothing(assets, tmp_path):
    LlamaForCausalLM(tiny_config()).save_pretrained(tmp_path / "old")
    settings = {"do_sample": False, "temperature": 0.6, "top_p": 0.9, "eos_token_id": [7, 1]}
    (tmp_path / "old/generation_config.json").write_text(json.dumps(settings))
    module = PolicyModel(load_causal_lm(str(tmp_path / "old"), "fp32", None))
    again = saved_and_loaded(module, tmp_path / "new", LlamaForCausalLM, assets)
    assert again.generation_config.temperature == 0.6
    assert again.generation_config.eos_token_id == [1, 7]


def test_a_text_model_out_of_one_of_images_and_text_is_saved_back_whole(assets, tmp_path):
    """Its vision tower and the layer that predicts a further token as they were, and the trained
    text."""
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": 32,
        "num_position_embeddings": 16,
    }
    text = model_of("qwen3.5").config.to_dict() | {"hidden_size": 32}
    config = Qwen3_5Config(text_config=text, vision_config=vision)
    whole = Qwen3_5ForConditionalGeneration(config).eval()
    whole.save_pretrained(tmp_path / "old")
    file = tmp_path / "old/model.safetensors"
    further = {"mtp.fc.weight": torch.ones(3, 3)}
    save_file(load_file(file) | further, file, metadata={"format": "pt"})
    (tmp_path / "old/preprocessor_config.json").write_text("{}")
    module = PolicyModel(load_causal_lm(str(tmp_path / "old"), "fp32", None))
    with torch.no_grad():
        for weight in module.parameters():
            weight.add_(0.01)
    again = saved_and_loaded(module, tmp_path / "new", Qwen3_5ForConditionalGeneration, assets)
    before = whole.state_dict()
    for name, weight in again.state_dict().items():
        expected = before[name] if ".visual." in name else before[name] + 0.01
        torch.testing.assert_close(weight, expected, rtol=0, atol=0)
    assert torch.equal(
        load_file(tmp_path / "new/model-untrained.safetensors")["mtp.fc.weight"],
        further["mtp.fc.weight"],
    )
    assert (tmp_path / "new/preprocessor_config.json").exists()
    third = load_causal_lm(str(tmp_path / "new"), "fp32", None)  # as the next step loads it
    assert all(map(torch.equal, third.state_dict().values(), module.lm.state_dict().values()))


FLAG = "--model_name_or_path"


def save(folder, without, **settings):
    """A tokenizer without these special tokens, beside settings of a model: file -> contents."""
    toy.make_tokenizer(["a few words to merge"]).save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    config = {
        name: value for name, value in json.loads(file.read_text()).items() if name not in without
    }
    file.write_text(json.dumps(config))
    for name, contents in settings.items():
        (folder / f"{name}.json").write_text(json.dumps(contents))
    return folder


def ids(eos):
    return {"model_type": "llama", "eos_token_id": eos}


@pytest.mark.parametrize(
    ("settings", "eos", "file"),
    [
        ({"config": ids(1)}, 1, "config.json"),
        (
            {"config": ids(1), "generation_config": {"eos_token_id": [2, 1]}},
            2,
            "generation_config.json",
        ),
        (
            {"config": {"model_type": "gemma3", "text_config": {"eos_token_id": 3}}},
            3,
            "config.json",
        ),
        ({"config": ids([200, 1])}, 1, "config.json"),
    ],
)
def test_without_eos_the_one_of_the_model_is_taken(tmp_path, said, settings, eos, file):
    tokenizer = load_tokenizer(str(save(tmp_path, ["eos_token"], **settings)), FLAG)
    assert tokenizer.eos_token_id == eos and eos in tokenizer.all_special_ids
    assert tokenizer.decode([eos, 9], skip_special_tokens=True) == tokenizer.decode([9])
    assert said == [
        f"{FLAG} {tmp_path}: the tokenizer has no EOS token; answers end with"
        f" {tokenizer.eos_token}, the one of {file}"
    ]
    tokenizer.save_pretrained(tmp_path / "saved")
    assert AutoTokenizer.from_pretrained(tmp_path / "saved").eos_token_id == eos


@pytest.mark.parametrize(
    "config", [{"model_type": "llama"}, ids(None), ids(100), ids(5000), ids([])]
)
def test_without_eos_in_the_model_either_the_message_names_the_way_out(tmp_path, config):
    """100 is a word, 5000 is no token; LlamaConfig's default of 2 is not in the file."""
    with pytest.raises(
        UserError, match=rf"^{FLAG} .*names an EOS token.*set eos_token in tokenizer_config.json"
    ):
        load_tokenizer(str(save(tmp_path, ["eos_token"], config=config)), FLAG)


def test_a_folder_without_a_tokenizer_is_named(tmp_path):
    with pytest.raises(
        UserError, match=rf"^--tokenizer {tmp_path}: it has no tokenizer, or one that cannot"
    ):
        load_tokenizer(str(tmp_path), "--tokenizer")
    # transformers makes an empty tokenizer
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(UserError, match="has no tokenizer"):
        load_tokenizer(str(tmp_path), "--tokenizer")
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match="one that cannot be loaded"):
        load_tokenizer(str(tmp_path), "--tokenizer")


def test_an_adapter_folder_takes_the_eos_of_its_base(tmp_path):
    base = save(tmp_path / "base", [], config=ids(1))
    adapter = save(
        tmp_path / "adapter",
        ["eos_token"],
        adapter_config={"base_model_name_or_path": str(base), "peft_type": "LORA"},
    )
    assert load_tokenizer(str(adapter), FLAG).eos_token_id == 1


def test_without_pad_the_eos_fills_rows(tmp_path):
    tokenizer = load_tokenizer(str(save(tmp_path, ["pad_token"], config=ids(1))), FLAG)
    assert tokenizer.pad_token_id is None and filler_id(tokenizer) == 1


def test_a_tokenizer_without_unknown_token_is_loaded_and_one_that_cannot_encode_its_words_refused(
    tmp_path,
):
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
    with pytest.raises(
        UserError, match="--model .*it has no tokenizer, or one that cannot be loaded"
    ):
        load_tokenizer(str(tmp_path), "--model")


def test_a_tokenizer_model_alone_asks_for_sentencepiece(tmp_path, monkeypatch):
    tiny_config().save_pretrained(tmp_path)
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>\x15\x00\x00\x00\x00\x18\x02")
    with pytest.raises(UserError, match="--model .*needs the package sentencepiece"):
        load_tokenizer(str(tmp_path), "--model")


@pytest.mark.parametrize("start", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("of_run", ["fp32", "bf16"])
@pytest.mark.parametrize("wanted", [None, "fp32", "bf16"])
def test_a_model_is_saved_in_the_format_of_its_start_or_the_wanted_one(
    assets, tmp_path, start, of_run, wanted
):
    begin, end = tmp_path / "begin", tmp_path / "end"
    LlamaForCausalLM.from_pretrained(assets / "lm", dtype=DTYPES[start]).save_pretrained(begin)
    tokenizer = AutoTokenizer.from_pretrained(assets / "lm")
    tokenizer.save_pretrained(begin)
    module = PolicyModel(load_causal_lm(str(begin), of_run, None))
    form = SavedForm(dtype=saved_dtype(module, wanted))
    save_model(SimpleNamespace(module=module), tokenizer, end, form=form)
    expected = DTYPES[wanted or start]
    assert checkpoint_dtype(str(end)) == expected
    assert LlamaForCausalLM.from_pretrained(end, dtype="auto").dtype == expected
    for name, saved in load_file(end / "model.safetensors").items():
        weight = module.lm.get_parameter(name)
        assert torch.equal(saved, weight.to(expected)), name
        assert weight.dtype == DTYPES[of_run], "the run goes on"


def test_a_model_that_does_not_fit_the_format_is_saved_as_it_is(assets, tmp_path, said):
    module = PolicyModel(load_causal_lm(str(assets / "lm"), "bf16", None))
    with torch.no_grad():
        module.lm.model.norm.weight[0] = 1e5
    tokenizer = AutoTokenizer.from_pretrained(assets / "lm")
    form = SavedForm(dtype=torch.float16)
    save_model(SimpleNamespace(module=module), tokenizer, tmp_path, form=form)
    assert checkpoint_dtype(str(tmp_path)) == torch.bfloat16
    assert "model.norm.weight has numbers beyond the range of torch.float16" in "".join(said)


def test_the_format_of_a_checkpoint_is_that_of_its_largest_weight(tmp_path):
    small, large = torch.ones(2), torch.ones(5, dtype=torch.bfloat16)
    torch.save({"a": small, "b": large}, tmp_path / "pytorch_model.bin")
    assert checkpoint_dtype(str(tmp_path)) == torch.bfloat16
    torch.save({"a": small, "b": large.to(torch.int8)}, tmp_path / "pytorch_model.bin")
    assert checkpoint_dtype(str(tmp_path)) is None, "the run's own is taken"


def test_a_sentencepiece_file_is_saved_with_the_tokens_that_were_added(assets, tmp_path):
    shutil.copytree(assets / "lm", tmp_path / "start")
    (tmp_path / "start/tokenizer.model").write_bytes(b"pieces")
    tokenizer = load_tokenizer(str(tmp_path / "start"), "--model")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|turn|>"]})
    tokenizer.add_tokens(["zebra"])
    module = PolicyModel(load_causal_lm(str(assets / "lm"), "fp32", None))
    save_model(SimpleNamespace(module=module), tokenizer, tmp_path / "end")
    assert (tmp_path / "end/tokenizer.model").read_bytes() == b"pieces"
    config = json.loads((tmp_path / "end/tokenizer_config.json").read_text())
    added_tokens = {
        token["content"]: (int(token_id), token["special"])
        for token_id, token in config["added_tokens_decoder"].items()
    }
    assert added_tokens["<|turn|>"] == (tokenizer.convert_tokens_to_ids("<|turn|>"), True)
    assert added_tokens["zebra"] == (tokenizer.convert_tokens_to_ids("zebra"), False)
    again = load_tokenizer(str(tmp_path / "end"), "--model")
    text = "Where is <|turn|>the zebra?"
    assert again.encode(text) == tokenizer.encode(text)
    assert again.all_special_tokens == tokenizer.all_special_tokens


@pytest.mark.parametrize(("kind", "adds_bos"), [("pieces", True), ("bytes", False)])
def test_beside_a_sentencepiece_file_stands_whether_bos_precedes_a_text(tmp_path, kind, adds_bos):
    tokenizer_of(kind).save_pretrained(tmp_path / "start")
    (tmp_path / "start/tokenizer.model").write_bytes(b"pieces")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "start")
    save_tokenizer(tokenizer, tmp_path / "end")
    config = json.loads((tmp_path / "end/tokenizer_config.json").read_text())
    assert config["add_bos_token"] is adds_bos
    again = AutoTokenizer.from_pretrained(tmp_path / "end")
    assert again.encode("the lamp") == tokenizer.encode("the lamp")
    assert (again.encode("the lamp")[0] == again.bos_token_id) is adds_bos


def test_without_a_sentencepiece_file_at_the_start_none_is_saved(assets, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"of another model")
    tokenizer = AutoTokenizer.from_pretrained(assets / "lm")
    save_tokenizer(tokenizer, tmp_path / "loaded")
    tokenizer.name_or_path = ""  # as of one made in memory
    save_tokenizer(tokenizer, tmp_path / "made")
    assert not list(tmp_path.glob("*/tokenizer.model"))
