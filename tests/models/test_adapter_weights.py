"""Adapter folders: plain peft and transformers load them with equal logits; they are accepted as model folders."""

import json
import shutil
from types import SimpleNamespace

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_adapters import IDS, LORA, VARIANTS, logits, train_a_little
from tiny_models import new_model
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaForCausalLM,
)

from dschat_ppo.errors import UserError
from dschat_ppo.models.adapters import AdapterSettings, adapter_layers, lora_targets
from dschat_ppo.models.loading import (
    check_causal_lm,
    check_sequence_classifier,
    load_causal_lm,
    load_config,
    load_sequence_classifier,
)
from dschat_ppo.models.model_folders import base_folder, base_name, is_adapter_folder, model_folder
from dschat_ppo.models.policy_model import PolicyModel
from dschat_ppo.models.saving import save_model
from dschat_ppo.models.scalar_model import ScalarModel
from dschat_ppo.models.tokenizers import load_tokenizer


def saved(module, assets, folder, merge: bool, described=None):
    tokenizer = AutoTokenizer.from_pretrained(assets / "lm")
    save_model(SimpleNamespace(module=module), tokenizer, folder, described, merge=merge)
    return folder


@pytest.fixture
def lm(assets):
    """name of a variant -> the tiny language model with such a trained adapter."""

    def build(variant: str = "lora"):
        model = load_causal_lm(str(assets / "lm"), "fp32", None, adapter=VARIANTS[variant])
        train_a_little(model)
        return model

    return build


@pytest.mark.parametrize("variant", VARIANTS)
def test_plain_peft_loads_an_adapter_folder_with_equal_logits(assets, tmp_path, lm, variant):
    model = lm(variant)
    folder = saved(PolicyModel(model), assets, tmp_path / "adapter", merge=False)
    assert not (folder / "config.json").exists() and not (folder / "model.safetensors").exists()
    auto = peft.AutoPeftModelForCausalLM.from_pretrained(folder)
    torch.testing.assert_close(logits(auto), logits(model), rtol=0, atol=0)
    plain = peft.PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(assets / "lm"), folder)
    torch.testing.assert_close(logits(plain), logits(model), rtol=0, atol=0)
    assert not torch.allclose(logits(model), logits(LlamaForCausalLM.from_pretrained(assets / "lm")), atol=0.1)
    if variant != "dora":  # whose magnitudes transformers does not find
        transformers_own = AutoModelForCausalLM.from_pretrained(folder)
        torch.testing.assert_close(logits(transformers_own), logits(model), rtol=0, atol=0)


@pytest.mark.parametrize("variant", VARIANTS)
def test_plain_transformers_loads_a_merged_folder_with_equal_logits(assets, tmp_path, lm, variant):
    model = lm(variant)
    folder = saved(PolicyModel(model), assets, tmp_path / "merged", merge=True)
    assert not is_adapter_folder(str(folder))
    plain, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values())
    torch.testing.assert_close(logits(plain), logits(model), rtol=1e-4, atol=1e-4)


def test_a_folder_holds_one_form_of_a_model(assets, tmp_path, lm):
    """The files of an earlier run in the other form would be read in place of the new ones."""
    earlier, now = lm("lora"), lm("mlp")
    folder = saved(PolicyModel(earlier), assets, tmp_path / "out", merge=False)
    (folder / "metrics.jsonl").touch()
    saved(PolicyModel(now), assets, folder, merge=True)
    assert not is_adapter_folder(str(folder)) and not (folder / "adapter_model.safetensors").exists()
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(folder)), logits(now), rtol=1e-4, atol=1e-4)
    saved(PolicyModel(earlier), assets, folder, merge=False)
    assert is_adapter_folder(str(folder)) and not list(folder.glob("model*"))
    assert not (folder / "config.json").exists() and (folder / "metrics.jsonl").exists()
    loaded = load_causal_lm(str(folder), "fp32", None, adapter=LORA)
    torch.testing.assert_close(logits(loaded), logits(earlier), rtol=0, atol=0)


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_adapter_folder_is_a_model_folder(assets, tmp_path, lm, variant):
    model = lm(variant)
    folder = str(saved(PolicyModel(model), assets, tmp_path / "adapter", merge=False))
    assert model_folder(folder, "--m") == folder
    assert load_config(folder, "--m").hidden_size == 32
    check_causal_lm(folder)
    loaded = load_causal_lm(folder, "fp32", None)
    assert adapter_layers(loaded) == {} and all(weight.requires_grad for weight in loaded.parameters())
    assert not hasattr(loaded, "peft_config")
    torch.testing.assert_close(logits(loaded), logits(model), rtol=1e-4, atol=1e-4)
    again = load_causal_lm(folder, "fp32", None, adapter=VARIANTS[variant])
    torch.testing.assert_close(logits(again), logits(model), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["gpt2", "bloom", "opt-350m", "falcon", "mixtral", "gpt-oss"])
def test_other_architectures_round_trip(assets, tmp_path, name):
    base = new_model(name, vocab_size=320)
    base.save_pretrained(tmp_path / "base")
    AutoTokenizer.from_pretrained(assets / "lm").save_pretrained(tmp_path / "base")
    model = load_causal_lm(str(tmp_path / "base"), "fp32", None, adapter=LORA)
    train_a_little(model)
    folder = saved(PolicyModel(model), assets, tmp_path / "adapter", merge=False)
    plain = peft.AutoPeftModelForCausalLM.from_pretrained(folder)
    torch.testing.assert_close(logits(plain), logits(model), rtol=0, atol=0)
    merged = saved(PolicyModel(model), assets, tmp_path / "merged", merge=True)
    for each in (AutoModelForCausalLM.from_pretrained(merged), load_causal_lm(str(folder), "fp32", None)):
        torch.testing.assert_close(logits(each), logits(model), rtol=1e-3, atol=1e-3)


def test_merging_rounds_the_product_once(assets, tmp_path, lm):
    folder = str(saved(PolicyModel(lm()), assets, tmp_path / "adapter", merge=False))
    weights = load_causal_lm(folder, "bf16", None).state_dict()
    base = load_causal_lm(str(assets / "lm"), "bf16", None).state_dict()
    parts = peft.utils.load_peft_weights(folder)
    for name in lora_targets(new_model("llama"), None):
        a, b = (parts[f"base_model.model.{name}.lora_{part}.weight"] for part in "AB")
        expected = (base[f"{name}.weight"].double() + 2 * b.double() @ a.double()).bfloat16()
        close = (weights[f"{name}.weight"] == expected).float().mean()
        assert close > 0.99, "fp64 and fp32 differ only where they round at a tie"


@pytest.mark.parametrize("from_lm", [False, True])
def test_a_reward_model_saves_its_head(assets, tmp_path, from_lm):
    base = str(assets / ("lm" if from_lm else "reward"))
    model = load_sequence_classifier(base, "fp32", None, from_lm, adapter=LORA)
    train_a_little(model)
    folder = saved(ScalarModel(model), assets, tmp_path / "adapter", False, {"reward_mean": 0.5})
    config = load_config(str(folder), "--m")
    assert (config.num_labels, config.reward_mean) == (1, 0.5), "step 3 reads the statistics"
    lengths = torch.tensor([11, 7, 3])
    with torch.no_grad():
        expected = ScalarModel(model).eval()(IDS, lengths, last_only=True)
    assert check_sequence_classifier(str(folder), new_head=False) is False
    loaded = ScalarModel(load_sequence_classifier(str(folder), "fp32", None, False))
    again = ScalarModel(load_sequence_classifier(str(folder), "fp32", None, False, adapter=LORA))
    with torch.no_grad():
        torch.testing.assert_close(loaded.eval()(IDS, lengths, last_only=True), expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(again.eval()(IDS, lengths, last_only=True), expected, rtol=0, atol=0)
    plain = peft.AutoPeftModelForSequenceClassification.from_pretrained(folder, num_labels=1)
    plain.config.pad_token_id = 0
    torch.testing.assert_close(logits(plain).squeeze(1)[0], expected[0], rtol=1e-5, atol=1e-5)
    merged = saved(ScalarModel(model), assets, tmp_path / "merged", merge=True)
    whole = AutoModelForSequenceClassification.from_pretrained(merged)
    torch.testing.assert_close(logits(whole).squeeze(1)[0], expected[0], rtol=1e-4, atol=1e-4)


def test_an_adapter_file_without_the_head_that_its_config_names_has_no_trained_head(assets, tmp_path):
    model = load_sequence_classifier(str(assets / "lm"), "fp32", None, True, adapter=LORA)
    folder = saved(ScalarModel(model), assets, tmp_path / "adapter", merge=False)
    file = folder / "adapter_model.safetensors"
    weights = load_file(file)
    del weights["base_model.model.score.weight"]
    save_file(weights, file)
    with pytest.raises(UserError, match="has no trained scalar head"):
        check_sequence_classifier(str(folder), new_head=False)


def test_an_adapter_with_a_head_is_no_language_model(assets, tmp_path):
    model = load_sequence_classifier(str(assets / "lm"), "fp32", None, True, adapter=LORA)
    folder = saved(ScalarModel(model), assets, tmp_path / "adapter", merge=False)
    with pytest.raises(UserError, match="adapter: is a reward model"):
        check_causal_lm(str(folder))


def test_an_adapter_of_a_language_model_starts_a_reward_model(assets, tmp_path, lm):
    model = lm()
    folder = str(saved(PolicyModel(model), assets, tmp_path / "adapter", merge=False))
    assert check_sequence_classifier(folder, new_head=True) is True
    with pytest.raises(UserError, match="has no trained scalar head"):
        check_sequence_classifier(folder, new_head=False)
    classifier = load_sequence_classifier(folder, "fp32", None, True)
    with torch.no_grad():
        expected = model.eval().base_model(input_ids=IDS).last_hidden_state
        found = classifier.eval().base_model(input_ids=IDS).last_hidden_state
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_reward_model_that_continues_an_adapter_of_a_language_model_saves_its_head(assets, tmp_path, lm):
    folder = str(saved(PolicyModel(lm()), assets, tmp_path / "adapter", merge=False))
    model = load_sequence_classifier(folder, "fp32", None, True, adapter=LORA)
    train_a_little(model)
    continued = str(saved(ScalarModel(model), assets, tmp_path / "continued", merge=False))
    assert check_sequence_classifier(continued, new_head=False) is False
    again = load_sequence_classifier(continued, "fp32", None, False)
    torch.testing.assert_close(again.score.weight, model.score.weight, rtol=0, atol=0)
    plain = peft.AutoPeftModelForSequenceClassification.from_pretrained(continued, num_labels=1)
    torch.testing.assert_close(plain.score.weight, model.score.weight, rtol=0, atol=0)
    torch.testing.assert_close(logits(plain), logits(again), rtol=1e-4, atol=1e-4)


def test_the_tokenizer_is_the_folder_s_or_that_of_its_base(assets, tmp_path, lm):
    folder = saved(PolicyModel(lm()), assets, tmp_path / "adapter", merge=False)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    of_base = tokenizer.chat_template
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.save_pretrained(folder)
    assert load_tokenizer(str(folder), "--m").chat_template == "{{ messages }}"
    for file in [*folder.glob("tokenizer*"), *folder.glob("chat_template*")]:
        file.unlink()
    assert load_tokenizer(str(folder), "--m").chat_template == of_base


# Bases that are not there, and adapters that do not fit


def changed(folder, **entries):
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))
    return str(folder)


def test_the_base_is_named_by_its_absolute_path_or_its_name_on_the_hub(assets, tmp_path, lm):
    folder = saved(PolicyModel(lm()), assets, tmp_path / "adapter", merge=False)
    assert json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"] == str(assets / "lm")
    assert base_folder(str(folder), "--m") == str(assets / "lm")
    assert base_folder(str(assets / "lm"), "--m") == str(assets / "lm")
    cached = "/c/models--org--some-model/snapshots/0123456789abcdef0123456789abcdef01234567"
    assert base_name(cached) == ("org/some-model", "0123456789abcdef0123456789abcdef01234567")


def test_a_base_that_is_not_there_is_named_with_the_file_to_correct(assets, tmp_path, lm):
    folder = saved(PolicyModel(lm()), assets, tmp_path / "adapter", merge=False)
    way_out = rf"; correct base_model_name_or_path in {folder}/adapter_config\.json$"
    for name, reason in {
        "/moved/away": "no such folder", "./beside": "no such folder",
        "org/none": "neither a local folder nor a model that can be downloaded from the hub.*",
    }.items():  # fmt: skip
        with pytest.raises(UserError, match=f"^--m {folder}: base model of the adapter, {name}: {reason}{way_out}"):
            base_folder(changed(folder, base_model_name_or_path=name), "--m")
    with pytest.raises(UserError, match=f"does not name its base model{way_out}"):
        base_folder(changed(folder, base_model_name_or_path=None), "--m")
    shutil.copytree(folder, tmp_path / "second")
    with pytest.raises(UserError, match=f"its base model {folder} is an adapter too; merge that one first"):
        base_folder(changed(tmp_path / "second", base_model_name_or_path=str(folder)), "--m")


@pytest.mark.parametrize(
    ("entries", "what"),
    [
        ({"peft_type": "IA3"}, "an adapter of type IA3"),
        ({"bias": "all"}, "LoRA with trained biases"),
        ({"target_parameters": ["mlp.experts"]}, "LoRA with target_parameters"),
        ({"init_lora_weights": "pissa"}, "LoRA that changed the weights of its base"),
    ],
)
def test_adapters_that_are_more_than_lora_are_refused(assets, tmp_path, lm, entries, what):
    folder = saved(PolicyModel(lm()), assets, tmp_path / "adapter", merge=False)
    with pytest.raises(UserError, match=rf"holds {what}.*; merge it into its base with peft"):
        check_causal_lm(changed(folder, **entries))


def test_another_rank_is_refused_with_both_numbers(assets, tmp_path, lm):
    folder = str(saved(PolicyModel(lm()), assets, tmp_path / "adapter", merge=False))
    settings = AdapterSettings(16, 8.0, 0.0, None, False, False, True, flag="--actor_lora_module_name")
    with pytest.raises(UserError, match=r"^--actor_lora_dim 16: the adapter in .* has rank 4; give that rank"):
        check_causal_lm(folder, settings)
    with pytest.raises(UserError, match=r"^--use_dora: the adapter in .* is not DoRA"):
        check_causal_lm(folder, AdapterSettings(4, 8.0, 0.0, None, False, True, True))


def test_an_adapter_that_continues_keeps_its_scale(assets, tmp_path, lm, said):
    model = lm()
    folder = str(saved(PolicyModel(model), assets, tmp_path / "adapter", merge=False))
    again = load_causal_lm(folder, "fp32", None, adapter=AdapterSettings(4, 32.0, 0.5, "q_proj", True, False, True))
    torch.testing.assert_close(logits(again), logits(model), rtol=0, atol=0)
    kept = f"model: the adapter in {folder} is trained further with its layers and scale"
    assert said[-2] == f"{kept}; --lora_module_name, --use_rslora without effect", "32 is the default of --lora_alpha"
    load_causal_lm(folder, "fp32", None, adapter=AdapterSettings(4, 16.0, 0.5, None, False, False, True))
    assert said[-2] == f"{kept}; --lora_alpha without effect"
    load_causal_lm(folder, "fp32", None, adapter=AdapterSettings(4, 8.0, 0.5, None, False, False, True))
    assert said[-2] == kept
    assert {layer.lora_dropout["default"].p for layer in adapter_layers(again).values()} == {0.5}


def test_an_adapter_of_another_model_is_refused(assets, tmp_path, lm):
    folder = saved(PolicyModel(lm()), assets, tmp_path / "adapter", merge=False)
    new_model("gpt2").save_pretrained(tmp_path / "gpt2")
    for settings in (None, LORA):
        with pytest.raises(UserError, match=r"adapter: the adapter does not fit GPT2LMHeadModel"):
            check_causal_lm(changed(folder, base_model_name_or_path=str(tmp_path / "gpt2")), settings)
    new_model("llama", vocab_size=320, hidden_size=64).save_pretrained(tmp_path / "wide")
    with pytest.raises(
        UserError, match=r"does not fit LlamaForCausalLM: wrong shape: model\.layers\.0\.mlp\.down_proj"
    ):
        check_causal_lm(changed(folder, base_model_name_or_path=str(tmp_path / "wide")))


def test_a_broken_file_is_refused(assets, tmp_path, lm):
    folder = saved(PolicyModel(lm()), assets, tmp_path / "adapter", merge=False)
    (folder / "adapter_model.safetensors").write_bytes(b"nothing")
    with pytest.raises(UserError, match="its adapter cannot be read, copy it again"):
        check_causal_lm(str(folder))
    (folder / "adapter_config.json").write_text("{")
    with pytest.raises(UserError, match=r"adapter_config\.json: cannot be used"):
        check_causal_lm(str(folder))
