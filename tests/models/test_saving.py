"""Saved models load in plain transformers; weights that are not finite are found and never saved."""

import json
import math
import os
from types import SimpleNamespace

import pytest
import torch
from conftest import tiny_config
from safetensors.torch import load_file, save_file
from test_loading import IDS, expected_scores, write_deepspeed_chat
from tiny_models import model_of
from torch import nn
from transformers import (
    AutoTokenizer,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
)

from dschat_ppo.errors import NonFiniteError
from dschat_ppo.models.loading import load_causal_lm, load_sequence_classifier
from dschat_ppo.models.saving import require_finite_weights, save_model
from dschat_ppo.models.wrapped_models import PolicyModel, ScalarModel

NAN, INF = math.nan, math.inf


def engine_with(value: float, dtype: torch.dtype = torch.float32) -> SimpleNamespace:
    """One weight of the last layer is `value`; the model also has an empty and a frozen parameter."""
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    model.empty = nn.Parameter(torch.zeros(0))
    model[0].requires_grad_(False)
    model[1].weight.data[1, 4] = value
    return SimpleNamespace(module=model.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_bad_weight_is_named(dtype):
    require_finite_weights("actor", engine_with(-6e4, dtype))
    for value in (NAN, INF, -INF, *([7e4] if dtype == torch.float16 else [])):
        with pytest.raises(NonFiniteError, match=r"^actor: weights are not finite \(rank 0: 1\.weight\): an update"):
            require_finite_weights("actor", engine_with(value, dtype))


@pytest.mark.parametrize(
    ("rank", "place", "bad"), [(0, 2, True), (1, 2, True), (2, 0, True), (2, 1, False), (3, 0, False)]
)
def test_partitions_are_checked_without_their_padding(monkeypatch, rank, place, bad):
    """Seven numbers over four ranks: three, three, one, none. The rest of a partition is padding."""
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
def test_model_from_a_deepspeed_chat_checkpoint_is_saved_for_plain_transformers(assets, tmp_path, safe):
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
        torch.testing.assert_close(again(IDS).logits, module.lm.eval()(IDS).logits, rtol=0, atol=0)


def test_generation_config_that_transformers_refuses_to_save_loses_nothing(assets, tmp_path):
    LlamaForCausalLM(tiny_config()).save_pretrained(tmp_path / "old")
    settings = {"do_sample": False, "temperature": 0.6, "top_p": 0.9, "eos_token_id": [7, 1]}
    (tmp_path / "old/generation_config.json").write_text(json.dumps(settings))
    module = PolicyModel(load_causal_lm(str(tmp_path / "old"), "fp32", None))
    again = saved_and_loaded(module, tmp_path / "new", LlamaForCausalLM, assets)
    assert again.generation_config.temperature == 0.6
    assert again.generation_config.eos_token_id == [1, 7]


def test_a_text_model_out_of_one_of_images_and_text_is_saved_back_whole(assets, tmp_path):
    """Its vision tower and the layer that predicts a further token as they were, and the trained text."""
    vision = {
        "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32,
        "num_position_embeddings": 16,
    }  # fmt: skip
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
        load_file(tmp_path / "new/model-untrained.safetensors")["mtp.fc.weight"], further["mtp.fc.weight"]
    )
    assert (tmp_path / "new/preprocessor_config.json").exists()
    third = load_causal_lm(str(tmp_path / "new"), "fp32", None)  # as the next step loads it
    assert all(map(torch.equal, third.state_dict().values(), module.lm.state_dict().values()))
