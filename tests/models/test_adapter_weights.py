"""Adapter folders: plain peft and transformers load them with equal logits; they are accepted as
model folders."""

import json
import math
import re
import shutil
from types import SimpleNamespace

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_adapters import IDS, LORA, VARIANTS, logits, train_a_little
from tiny_models import new_model
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from dschat_ppo.errors import UserError
from dschat_ppo.models.adapters.folders import read_adapter_config
from dschat_ppo.models.adapters.layers import adapter_layers, lora_targets
from dschat_ppo.models.adapters.settings import AdapterSettings
from dschat_ppo.models.loading import (
    ModelChanges,
    check_causal_lm,
    check_sequence_classifier,
    load_causal_lm,
    load_config,
    load_sequence_classifier,
)
from dschat_ppo.models.model_folders import base_folder, base_name, is_adapter_folder, model_folder
from dschat_ppo.models.saving import SavedForm, save_model
from dschat_ppo.models.tokenizers import load_tokenizer
from dschat_ppo.models.wrapped_models import PolicyModel, ScalarModel


def saved(module, assets, folder, merge: bool, described=None):
    tokenizer = AutoTokenizer.from_pretrained(assets / "lm")
    save_model(
        SimpleNamespace(module=module), tokenizer, folder, described, form=SavedForm(merge=merge)
    )
    return folder


def trained(assets, variant: str = "lora"):
    """The tiny language model with an adapter of `VARIANTS` that has learned something."""
    model = load_causal_lm(
        str(assets / "lm"), "fp32", None, ModelChanges(adapter=VARIANTS[variant])
    )
    train_a_little(model)
    return model


@pytest.fixture(scope="module")
def once(assets, tmp_path_factory):
    """(model, its adapter folder) of "lora"; tests change a copy."""
    model = trained(assets)
    return model, saved(
        PolicyModel(model), assets, tmp_path_factory.mktemp("once") / "adapter", merge=False
    )


@pytest.fixture
def folder(once, tmp_path):
    return shutil.copytree(once[1], tmp_path / "adapter")


def changed(folder, **entries) -> str:
    """The folder, after these entries of adapter_config.json have changed."""
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))
    return str(folder)


@pytest.mark.parametrize("variant", ["rslora", "dora", "mlp"])
def test_peft_transformers_and_this_project_load_what_was_saved(assets, tmp_path, variant):
    model = trained(assets, variant)
    folder = saved(PolicyModel(model), assets, tmp_path / "adapter", merge=False)
    assert not (folder / "config.json").exists() and not (folder / "model.safetensors").exists()
    plain = AutoModelForCausalLM.from_pretrained(assets / "lm")
    assert not torch.allclose(logits(model), logits(plain), atol=0.1)
    exact = [
        peft.AutoPeftModelForCausalLM.from_pretrained(folder),
        peft.PeftModel.from_pretrained(plain, folder),
    ]
    if variant != "dora":  # whose magnitudes transformers does not find
        exact.append(AutoModelForCausalLM.from_pretrained(folder))
    exact.append(load_causal_lm(str(folder), "fp32", None, ModelChanges(adapter=VARIANTS[variant])))
    for each in exact:
        torch.testing.assert_close(logits(each), logits(model), rtol=0, atol=3e-5)
    assert model_folder(str(folder), "--m") == str(folder)
    assert load_config(str(folder), "--m").hidden_size == 32
    loaded = load_causal_lm(str(folder), "fp32", None)
    assert adapter_layers(loaded) == {} and all(
        weight.requires_grad for weight in loaded.parameters()
    )
    assert not hasattr(loaded, "peft_config")
    merged = saved(PolicyModel(model), assets, tmp_path / "merged", merge=True)
    assert not is_adapter_folder(str(merged))
    of_transformers, info = AutoModelForCausalLM.from_pretrained(merged, output_loading_info=True)
    assert not any(info.values())
    for each in (loaded, of_transformers):
        torch.testing.assert_close(logits(each), logits(model), rtol=1e-4, atol=1e-4)


def test_a_folder_holds_one_form_of_a_model(assets, tmp_path):
    """The files of an earlier run in the other form would be read in place of the new ones."""
    earlier, now = trained(assets), trained(assets, "mlp")
    folder = saved(PolicyModel(earlier), assets, tmp_path / "out", merge=False)
    (folder / "metrics.jsonl").touch()
    saved(PolicyModel(now), assets, folder, merge=True)
    assert (
        not is_adapter_folder(str(folder)) and not (folder / "adapter_model.safetensors").exists()
    )
    torch.testing.assert_close(
        logits(AutoModelForCausalLM.from_pretrained(folder)), logits(now), rtol=1e-4, atol=1e-4
    )
    saved(PolicyModel(earlier), assets, folder, merge=False)
    assert is_adapter_folder(str(folder)) and not list(folder.glob("model*"))
    assert not (folder / "config.json").exists() and (folder / "metrics.jsonl").exists()
    loaded = load_causal_lm(str(folder), "fp32", None, ModelChanges(adapter=LORA))
    torch.testing.assert_close(logits(loaded), logits(earlier), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["gpt2", "gpt-oss"])
def test_other_architectures_round_trip(assets, tmp_path, name):
    base = new_model(name, vocab_size=320)
    base.save_pretrained(tmp_path / "base")
    AutoTokenizer.from_pretrained(assets / "lm").save_pretrained(tmp_path / "base")
    model = load_causal_lm(str(tmp_path / "base"), "fp32", None, ModelChanges(adapter=LORA))
    train_a_little(model)
    folder = saved(PolicyModel(model), assets, tmp_path / "adapter", merge=False)
    plain = peft.AutoPeftModelForCausalLM.from_pretrained(folder)
    torch.testing.assert_close(logits(plain), logits(model), rtol=0, atol=1e-5)
    merged = saved(PolicyModel(model), assets, tmp_path / "merged", merge=True)
    for each in (
        AutoModelForCausalLM.from_pretrained(merged),
        load_causal_lm(str(folder), "fp32", None),
    ):
        torch.testing.assert_close(logits(each), logits(model), rtol=1e-3, atol=1e-3)


def test_merging_rounds_the_product_once(assets, folder):
    weights = load_causal_lm(str(folder), "bf16", None).state_dict()
    base = load_causal_lm(str(assets / "lm"), "bf16", None).state_dict()
    parts = peft.utils.load_peft_weights(folder)
    for name in lora_targets(new_model("llama"), None):
        a, b = (parts[f"base_model.model.{name}.lora_{part}.weight"] for part in "AB")
        expected = (base[f"{name}.weight"].double() + 2 * b.double() @ a.double()).bfloat16()
        close = (weights[f"{name}.weight"] == expected).float().mean()
        assert close > 0.99, "fp64 and fp32 differ only where they round at a tie"


def test_a_reward_model_saves_its_head(assets, tmp_path):
    model = load_sequence_classifier(
        str(assets / "reward"), "fp32", None, False, ModelChanges(adapter=LORA)
    )
    train_a_little(model)
    folder = saved(ScalarModel(model), assets, tmp_path / "adapter", False, {"reward_mean": 0.5})
    config = load_config(str(folder), "--m")
    assert (config.num_labels, config.reward_mean) == (1, 0.5), "step 3 reads the statistics"
    assert config.architectures == ["LlamaForSequenceClassification"]
    adapter_config = json.loads((folder / "adapter_config.json").read_text())
    assert (adapter_config["task_type"], adapter_config["modules_to_save"]) == (
        "SEQ_CLS",
        ["score"],
    )
    lengths = torch.tensor([11, 7, 3])
    with torch.no_grad():
        expected = ScalarModel(model).eval()(IDS, lengths, last_only=True)
    assert check_sequence_classifier(str(folder), new_head=False) is False
    loaded = ScalarModel(load_sequence_classifier(str(folder), "fp32", None, False))
    again = ScalarModel(
        load_sequence_classifier(str(folder), "fp32", None, False, ModelChanges(adapter=LORA))
    )
    with torch.no_grad():
        torch.testing.assert_close(
            loaded.eval()(IDS, lengths, last_only=True), expected, rtol=1e-4, atol=1e-4
        )
        torch.testing.assert_close(
            again.eval()(IDS, lengths, last_only=True), expected, rtol=0, atol=1e-5
        )
    plain = peft.AutoPeftModelForSequenceClassification.from_pretrained(folder, num_labels=1)
    plain.config.pad_token_id = 0
    torch.testing.assert_close(logits(plain).squeeze(1)[0], expected[0], rtol=1e-5, atol=1e-5)
    merged = saved(ScalarModel(model), assets, tmp_path / "merged", merge=True)
    whole = AutoModelForSequenceClassification.from_pretrained(merged)
    torch.testing.assert_close(logits(whole).squeeze(1)[0], expected[0], rtol=1e-4, atol=1e-4)


def test_a_head_that_the_file_lacks_is_not_trained_and_an_adapter_with_one_is_no_language_model(
    assets, tmp_path
):
    model = load_sequence_classifier(
        str(assets / "lm"), "fp32", None, True, ModelChanges(adapter=LORA)
    )
    folder = saved(ScalarModel(model), assets, tmp_path / "adapter", merge=False)
    with pytest.raises(UserError, match="adapter: is a reward model"):
        check_causal_lm(str(folder))
    file = folder / "adapter_model.safetensors"
    weights = load_file(file)
    del weights["base_model.model.score.weight"]
    save_file(weights, file)
    with pytest.raises(UserError, match="has no trained scalar head"):
        check_sequence_classifier(str(folder), new_head=False)


def test_an_adapter_of_a_language_model_starts_a_reward_model_which_saves_its_head(
    assets, tmp_path, once
):
    model, folder = once[0], str(once[1])
    assert check_sequence_classifier(folder, new_head=True) is True
    with pytest.raises(UserError, match="has no trained scalar head"):
        check_sequence_classifier(folder, new_head=False)
    classifier = load_sequence_classifier(folder, "fp32", None, True)
    with torch.no_grad():
        expected = model.eval().base_model(input_ids=IDS).last_hidden_state
        found = classifier.eval().base_model(input_ids=IDS).last_hidden_state
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    model = load_sequence_classifier(folder, "fp32", None, True, ModelChanges(adapter=LORA))
    train_a_little(model)
    continued = str(saved(ScalarModel(model), assets, tmp_path / "continued", merge=False))
    assert load_config(continued, "--m").architectures == ["LlamaForSequenceClassification"]
    plain = peft.AutoPeftModelForSequenceClassification.from_pretrained(continued, num_labels=1)
    head = plain.base_model.model.score.modules_to_save["default"].weight
    torch.testing.assert_close(head, model.score.weight, rtol=0, atol=0)
    assert check_sequence_classifier(continued, new_head=False) is False
    again = load_sequence_classifier(continued, "fp32", None, False)
    torch.testing.assert_close(again.score.weight, model.score.weight, rtol=0, atol=0)


def test_the_tokenizer_is_the_folder_s_or_that_of_its_base(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    of_base = tokenizer.chat_template
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.save_pretrained(folder)
    assert load_tokenizer(str(folder), "--m").chat_template == "{{ messages }}"
    for file in [*folder.glob("tokenizer*"), *folder.glob("chat_template*")]:
        file.unlink()
    assert load_tokenizer(str(folder), "--m").chat_template == of_base


# Bases that are not there, and adapters that do not fit


def test_the_base_is_named_by_its_absolute_path_or_its_name_on_the_hub(assets, folder):
    assert json.loads((folder / "adapter_config.json").read_text())[
        "base_model_name_or_path"
    ] == str(assets / "lm")
    assert base_folder(str(folder), "--m") == str(assets / "lm")
    assert base_folder(str(assets / "lm"), "--m") == str(assets / "lm")
    cached = "/c/models--org--some-model/snapshots/0123456789abcdef0123456789abcdef01234567"
    assert base_name(cached) == ("org/some-model", "0123456789abcdef0123456789abcdef01234567")


def settings(
    rank=4,
    alpha=8.0,
    dropout=0.0,
    targets=None,
    rslora=False,
    dora=False,
    flag="--lora_module_name",
):
    is_given = alpha != 32.0  # the default of --lora_alpha
    return AdapterSettings(
        rank, alpha, dropout, targets, rslora, dora, True, alpha_is_given=is_given, flag=flag
    )


CORRECT = "; correct base_model_name_or_path in ADAPTER/adapter_config.json"
MERGE = ".*; merge it into its base with peft"
# entries of adapter_config.json, the adapter that is asked for, and the message; ADAPTER: the
# folder
REFUSED = [
    *(
        (
            {"base_model_name_or_path": name},
            None,
            f"ADAPTER: base model of the adapter, {name}: {reason}{CORRECT}",
        )
        for name, reason in (
            ("/moved/away", "no such folder"),
            ("org/none", "neither a local folder nor a model .*"),
        )
    ),
    (
        {"base_model_name_or_path": None},
        None,
        f"ADAPTER: the adapter does not name its base model{CORRECT}",
    ),
    (
        {"base_model_name_or_path": "ONCE"},
        None,
        "ADAPTER: its base model ONCE is an adapter too; merge that one first",
    ),
    (
        {"base_model_name_or_path": "GPT2"},
        None,
        "ADAPTER: the adapter does not fit GPT2LMHeadModel",
    ),
    (
        {"base_model_name_or_path": "WIDE"},
        None,
        r"fit LlamaForCausalLM: wrong shape: model\.layers\.0\.mlp\.down_proj",
    ),
    *(
        (entries, None, "the scale .* must be a finite number and is " + said)
        for entries, said in (
            ({"lora_alpha": math.nan}, "nan"),
            ({"lora_alpha": -math.inf}, "-inf"),
            ({"lora_alpha": "8"}, "'8'"),
            ({"lora_alpha": True}, "True"),
            ({"alpha_pattern": {"up_proj": math.inf}}, "inf"),
        )
    ),
    ({"peft_type": "IA3"}, None, f"ADAPTER: holds an adapter of type IA3{MERGE}"),
    ({"bias": "all"}, None, f"holds LoRA with trained biases{MERGE}"),
    ({"target_parameters": ["mlp.experts"]}, None, f"holds LoRA with target_parameters{MERGE}"),
    ({"of_a_later_peft": "x"}, None, f"holds LoRA with of_a_later_peft{MERGE}"),
    (
        {"init_lora_weights": "pissa"},
        None,
        f"holds LoRA that changed the weights of its base{MERGE}",
    ),
    (
        {"layers_pattern": "h"},
        None,
        "ADAPTER: its adapter_config.json cannot be used: .*layers_to_transform",
    ),
    (
        {"modules_to_save": ["lm_head"]},
        LORA,
        r"also holds whole layers \(lm_head\), which would not be trained",
    ),
    (
        {},
        settings(16, flag="--actor_lora_module_name"),
        "^--actor_lora_dim 16: the adapter in ADAPTER has rank 4;",
    ),
    ({}, settings(dora=True), "^--use_dora: the adapter in ADAPTER is not DoRA"),
]


@pytest.mark.parametrize(
    ("entries", "asked", "message"), REFUSED, ids=[message[-60:] for *_, message in REFUSED]
)
def test_adapters_that_cannot_be_used_are_refused(once, folder, tmp_path, entries, asked, message):
    new_model("gpt2").save_pretrained(tmp_path / "gpt2")
    new_model("llama", vocab_size=320, hidden_size=64).save_pretrained(tmp_path / "wide")
    names = {"ONCE": str(once[1]), "GPT2": str(tmp_path / "gpt2"), "WIDE": str(tmp_path / "wide")}
    entries = {
        key: names.get(value, value) if isinstance(value, str) else value
        for key, value in entries.items()
    }
    for name, path in {"ADAPTER": str(folder), "ONCE": str(once[1])}.items():
        message = message.replace(name, re.escape(path))
    with pytest.raises(UserError, match=message):
        check_causal_lm(changed(folder, **entries), ModelChanges(adapter=asked))


@pytest.mark.parametrize("is_pickled", [False, True])
def test_matrices_that_are_no_floating_point_numbers_are_refused(folder, is_pickled):
    file = folder / "adapter_model.safetensors"
    matrices = {name: weight.to(torch.int8) for name, weight in load_file(file).items()}
    file.unlink()
    if is_pickled:
        torch.save(matrices, folder / "adapter_model.bin")
    else:
        save_file(matrices, file)
    with pytest.raises(UserError, match=r"lora_A.* holds numbers of the format (I8|int8)"):
        check_causal_lm(str(folder))


def test_broken_files_are_refused(folder):
    (folder / "adapter_model.safetensors").write_bytes(b"nothing")
    with pytest.raises(UserError, match="its adapter cannot be read, copy it again"):
        check_causal_lm(str(folder))
    (folder / "adapter_config.json").write_text("{")
    with pytest.raises(UserError, match=r"adapter_config\.json: cannot be used"):
        check_causal_lm(str(folder))


def test_only_a_closed_list_of_settings_reaches_peft(tmp_path):
    settings = {
        "peft_type": "LORA",
        "r": 4,
        "megatron_core": "own.code",
        "auto_mapping": {"parent_library": "own"},
    }
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    assert read_adapter_config(str(tmp_path), "--model") == {"r": 4}


def test_an_adapter_that_continues_keeps_its_scale(once, said):
    model, folder = once[0], str(once[1])
    again = load_causal_lm(
        folder, "fp32", None, ModelChanges(adapter=settings(4, 32.0, 0.5, "q_proj", True))
    )
    torch.testing.assert_close(logits(again), logits(model), rtol=0, atol=3e-5)
    kept = f"model: the adapter in {folder} is trained further with its layers and scale"
    assert said[-2] == f"{kept}; --lora_module_name, --use_rslora without effect", (
        "32 is the default of --lora_alpha"
    )
    load_causal_lm(folder, "fp32", None, ModelChanges(adapter=settings(4, 16.0, 0.5)))
    assert said[-2] == f"{kept}; --lora_alpha without effect"
    load_causal_lm(folder, "fp32", None, ModelChanges(adapter=settings(4, 8.0, 0.5)))
    assert said[-2] == kept
    assert {layer.lora_dropout["default"].p for layer in adapter_layers(again).values()} == {0.5}
