"""LoRA: which layers get it, its formula by hand, folders that plain peft and transformers load, and merging."""

import json
import math
import shutil
from types import SimpleNamespace

import peft
import pytest
import torch
from tiny_models import KINDS, new_model
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaForCausalLM,
)

from dschat_ppo.config.lora_flags import AdapterFlags
from dschat_ppo.errors import UserError
from dschat_ppo.models import adapters
from dschat_ppo.models.adapters import (
    AdapterSettings,
    adapter_layers,
    adapter_settings,
    add_adapter,
    is_adapter_parameter,
    lora_targets,
)
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

IDS = torch.randint(3, 300, (3, 11), generator=torch.Generator().manual_seed(3))
LORA = AdapterSettings(4, 8.0, 0.0, None, rslora=False, dora=False, freeze_base=True)
VARIANTS = {
    "lora": LORA,
    "rslora": AdapterSettings(4, 8.0, 0.0, None, True, False, True),
    "dora": AdapterSettings(4, 8.0, 0.0, None, False, True, True),
    "mlp": AdapterSettings(3, 2.5, 0.0, "mlp.", False, False, True),
}


def train_a_little(model) -> None:
    """Change every parameter that trains, as an optimizer would."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight += 0.2 * torch.randn(weight.shape, generator=generator)


def saved(module, assets, folder, merge: bool):
    tokenizer = AutoTokenizer.from_pretrained(assets / "lm")
    save_model(SimpleNamespace(module=module), tokenizer, folder, merge=merge)
    return folder


@torch.no_grad()
def logits(model, ids=IDS):
    return model.eval()(input_ids=ids).logits


@pytest.fixture
def lm(assets):
    """name of a variant -> the tiny language model with such a trained adapter."""

    def build(variant: str = "lora"):
        model = load_causal_lm(str(assets / "lm"), "fp32", None, adapter=VARIANTS[variant])
        train_a_little(model)
        return model

    return build


# Layers


def test_the_default_is_all_linear_layers_of_the_blocks():
    names = lora_targets(new_model("llama"), None)
    parts = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
    parts += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    assert names == [f"model.layers.{layer}.{part}" for layer in (0, 1) for part in parts]


@pytest.mark.parametrize("name", KINDS)
def test_every_adapter_of_every_architecture_gets_a_gradient(name):
    model = new_model(name)
    add_adapter(model, LORA)
    train_a_little(model)  # B is not 0
    ids = torch.randint(2, 40, (2, 12), generator=torch.Generator().manual_seed(1))
    model(input_ids=ids).logits.logsumexp(-1).sum().backward()
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    assert trained and all(is_adapter_parameter(name) for name in trained)
    assert [name for name, weight in trained.items() if weight.grad is None or not weight.grad.any()] == []


def test_routers_and_tensors_of_experts_get_none():
    for name in ("mixtral", "gpt-oss", "phimoe"):
        assert {target.rpartition(".")[2] for target in lora_targets(new_model(name), None)} == {
            "q_proj", "k_proj", "v_proj", "o_proj"
        }  # fmt: skip


def test_linear_routers_get_none():
    model = new_model("mixtral")
    for layer in model.model.layers:
        layer.mlp.router = torch.nn.Linear(32, 4)
        layer.mlp.gate = torch.nn.Linear(32, 4)
    assert not any("router" in name or name.endswith("gate") for name in lora_targets(model, None))
    dense = new_model("llama")
    dense.model.layers[0].mlp.gate = torch.nn.Linear(32, 4)
    assert "model.layers.0.mlp.gate" in lora_targets(dense, None), "without experts a gate is an ordinary layer"


def test_names_are_parts_of_names():
    model = new_model("llama")
    assert lora_targets(model, "layers.1.") == [name for name in lora_targets(model, None) if ".1." in name]
    assert lora_targets(model, "q_proj, v_proj") == [
        f"model.layers.{layer}.self_attn.{part}_proj" for layer in (0, 1) for part in "qv"
    ]
    assert lora_targets(new_model("opt"), "decoder.layers.") == lora_targets(new_model("opt"), None)


def test_a_head_gets_an_adapter_only_if_it_is_named_and_not_tied():
    assert lora_targets(new_model("llama"), "lm_head,q_proj")[-1] == "lm_head"
    assert "lm_head" not in lora_targets(new_model("llama", tie_word_embeddings=True), "lm_head,q_proj")


def test_names_that_are_not_found_end_in_one_line_with_names_that_are():
    with pytest.raises(UserError) as raised:
        lora_targets(new_model("llama"), "decoder.layers.", "--actor_lora_module_name")
    assert str(raised.value) == (
        "--actor_lora_module_name decoder.layers.: no linear layer of LlamaForCausalLM has this in its name; give "
        "layers. for all layers of its blocks, or leave the flag out, or give names among down_proj, gate_proj, "
        "k_proj, lm_head, o_proj, q_proj, up_proj, v_proj"
    )


def test_layers_with_an_adapter_keep_their_names():
    model = new_model("llama")
    before = lora_targets(model, None)
    add_adapter(model, LORA)
    assert lora_targets(model, None) == before
    assert list(adapter_layers(model)) == before


# Formulas


@pytest.mark.parametrize(("rslora", "scale"), [(False, 8 / 4), (True, 8 / math.sqrt(4))])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_the_update_is_scale_times_b_a_x(name, rslora, scale):
    model, part = new_model(name), {"llama": "down_proj", "gpt2": "c_fc"}[name]
    add_adapter(model, AdapterSettings(4, 8.0, 0.0, part, rslora, False, True))
    train_a_little(model)
    layer = next(iter(adapter_layers(model).values()))
    x = torch.randn(5, layer.in_features, generator=torch.Generator().manual_seed(2))
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    expected = layer.base_layer(x) + scale * (x @ a.T) @ b.T
    assert a.shape == (4, layer.in_features) and b.shape == (layer.out_features, 4)
    torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-5)


def test_a_new_adapter_changes_nothing_and_is_the_same_whatever_was_drawn_before():
    model = new_model("llama")
    before = logits(model, IDS % 48)
    torch.manual_seed(3)
    torch.rand(5)
    state = torch.get_rng_state()
    add_adapter(model, LORA)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(logits(model, IDS % 48), before)
    other = new_model("llama")
    torch.manual_seed(3)
    add_adapter(other, LORA)
    third = new_model("llama")
    torch.manual_seed(4)
    add_adapter(third, LORA)
    found = [next(iter(adapter_layers(each).values())).lora_A["default"].weight for each in (model, other, third)]
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])
    assert found[0].abs().max() <= 1 / math.sqrt(32), "Kaiming's uniform distribution with a = sqrt(5)"


# What trains


def test_only_lora_trains_with_a_frozen_base():
    model = new_model("llama")
    add_adapter(model, LORA)
    assert {is_adapter_parameter(name) for name, weight in model.named_parameters() if weight.requires_grad} == {True}
    assert {is_adapter_parameter(name) for name, weight in model.named_parameters() if not weight.requires_grad} == {
        False
    }


def test_a_score_head_trains_too(assets):
    model = load_sequence_classifier(str(assets / "reward"), "fp32", None, False, adapter=LORA)
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    assert {name for name in trained if not is_adapter_parameter(name)} == {"score.weight"}


def test_everything_trains_without_a_frozen_base():
    model = new_model("llama")
    model.lm_head.requires_grad_(False)
    add_adapter(model, AdapterSettings(4, 8.0, 0.0, None, False, False, freeze_base=False))
    frozen = {name for name, weight in model.named_parameters() if not weight.requires_grad}
    assert frozen == {"lm_head.weight"}, "as before"


def test_a_second_adapter_leaves_the_first_as_it_is():
    model = new_model("llama")
    add_adapter(model, LORA, "first")
    train_a_little(model)
    before = logits(model, IDS % 48)
    add_adapter(model, AdapterSettings(2, 2.0, 0.0, "q_proj", False, False, True), "second")
    assert torch.equal(logits(model, IDS % 48), before)
    assert set(model.peft_config) == {"first", "second"}
    trained = [name for name, weight in model.named_parameters() if weight.requires_grad]
    assert sum(".first." in name for name in trained) == 28 and sum(".second." in name for name in trained) == 4
    assert len(trained) == 32


# Folders


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
    folder = saved(ScalarModel(model), assets, tmp_path / "adapter", merge=False)
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
        ({"target_parameters": ["mlp.experts"]}, "LoRA of expert tensors"),
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
    assert said[-2] == f"model: the adapter in {folder} is trained further; it keeps its scale"
    assert {layer.lora_dropout["default"].p for layer in adapter_layers(again).values()} == {0.5}


def test_an_adapter_of_another_model_is_refused(assets, tmp_path, lm):
    folder = saved(PolicyModel(lm()), assets, tmp_path / "adapter", merge=False)
    new_model("gpt2").save_pretrained(tmp_path / "gpt2")
    with pytest.raises(UserError, match=r"adapter: the adapter does not fit GPT2LMHeadModel"):
        check_causal_lm(changed(folder, base_model_name_or_path=str(tmp_path / "gpt2")))
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


# Settings


def test_rank_0_is_no_adapter():
    assert adapter_settings(0, "layers.", AdapterFlags()) is None


def test_settings_are_those_of_the_flags():
    flags = AdapterFlags(lora_alpha=3.0, lora_dropout=0.1, use_rslora=True, only_optimize_lora=True)
    assert adapter_settings(5, "layers.", flags, "--x") == AdapterSettings(
        5, 3.0, 0.1, "layers.", True, False, True, None, "--x"
    )


def test_a_missing_package_is_named_with_its_extra(monkeypatch):
    monkeypatch.setattr(adapters, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"^LoRA needs the package peft: pip install 'dschat_ppo\[lora\]'$"):
        adapter_settings(5, None, AdapterFlags())
