"""LoRA: which layers get it, its formula by hand, and what trains."""

import math
import sys

import pytest
import torch
from tiny_models import new_model
from torch import nn

from dschat_ppo.config.run_flags import AdapterFlags
from dschat_ppo.config.supervised_flags import LoraFlags
from dschat_ppo.errors import UserError
from dschat_ppo.models.adapters import (
    AdapterSettings,
    adapter_layers,
    adapter_settings,
    add_adapter,
    is_adapter_parameter,
    load_merged,
    lora_targets,
)
from dschat_ppo.models.loading import load_sequence_classifier

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


@torch.no_grad()
def logits(model, ids=IDS):
    return model.eval()(input_ids=ids).logits


# Layers


def test_the_default_is_all_linear_layers_of_the_blocks():
    names = lora_targets(new_model("llama"), None)
    parts = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
    parts += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    assert names == [f"model.layers.{layer}.{part}" for layer in (0, 1) for part in parts]


@pytest.mark.parametrize(
    "name", ["gpt2", "opt-350m", "falcon", "bloom", "gpt-oss", "mamba", "rwkv", "granite-hybrid", "electra"]
)
def test_every_adapter_of_every_architecture_gets_a_gradient(name):
    model = new_model(name)
    add_adapter(model, LORA)
    train_a_little(model)  # B is not 0
    ids = torch.randint(2, 40, (2, 12), generator=torch.Generator().manual_seed(1))
    model(input_ids=ids, use_cache=False).logits.logsumexp(-1).sum().backward()
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    assert trained and all(is_adapter_parameter(name) for name in trained)
    assert [name for name, weight in trained.items() if weight.grad is None or not weight.grad.any()] == []


def test_routers_and_tensors_of_experts_get_none():
    for name in ("mixtral", "gpt-oss"):
        model = new_model(name)
        for layer in model.model.layers:
            layer.mlp.gate = torch.nn.Linear(32, 4)
        names = {target.rpartition(".")[2] for target in lora_targets(model, None)}
        assert names == {"q_proj", "k_proj", "v_proj", "o_proj"}
    dense = new_model("llama")
    dense.model.layers[0].mlp.gate = torch.nn.Linear(32, 4)
    assert "model.layers.0.mlp.gate" in lora_targets(dense, None), "without experts a gate is an ordinary layer"


@pytest.mark.parametrize(("names", "tied", "message"), [
    ("lm_head,q_proj", True, "lm_head,q_proj: no layer of LlamaForCausalLM that can get LoRA has 'lm_head'"),
    ("decoder.", False, "decoder.: no layer of LlamaForCausalLM .*down_proj, gate_proj, k_proj, lm_head, o_proj"),
    ("q_proj,v_prj", False, "q_proj,v_prj: .* has 'v_prj' in its name"), (",", False, ",: "),
])  # fmt: skip
def test_names_that_are_not_found_end_in_one_line_with_names_that_are(names, tied, message):
    assert lora_targets(new_model("llama"), "lm_head,q_proj")[-1] == "lm_head"
    with pytest.raises(UserError, match=f"^--actor_lora_module_name {message}"):
        lora_targets(new_model("llama", tie_word_embeddings=tied), names, "--actor_lora_module_name")


# Formulas


@pytest.mark.parametrize(("name", "rslora", "scale"), [("llama", False, 8 / 4), ("gpt2", True, 8 / math.sqrt(4))])
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
    found = []
    for seed, drawn in ((3, 5), (3, 0), (4, 0)):
        model = new_model("llama")
        before = logits(model, IDS % 48)
        torch.manual_seed(seed)
        torch.rand(drawn)
        state = torch.get_rng_state()
        add_adapter(model, LORA)
        assert torch.equal(torch.get_rng_state(), state)
        assert torch.equal(logits(model, IDS % 48), before)
        found.append(next(iter(adapter_layers(model).values())).lora_A["default"].weight)
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])
    assert found[0].abs().max() <= 1 / math.sqrt(32), "Kaiming's uniform distribution with a = sqrt(5)"


# What trains


def test_only_lora_and_a_score_head_train_with_a_frozen_base(assets):
    model = new_model("llama")
    add_adapter(model, LORA)
    assert all(weight.requires_grad is is_adapter_parameter(name) for name, weight in model.named_parameters())
    model = load_sequence_classifier(str(assets / "reward"), "fp32", None, False, adapter=LORA)
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    assert {name for name in trained if not is_adapter_parameter(name)} == {"score.weight"}


def test_without_a_frozen_base_all_but_the_weights_under_the_adapter_train():
    model = new_model("llama")
    model.lm_head.requires_grad_(False)
    add_adapter(model, AdapterSettings(4, 8.0, 0.0, "q_proj", False, False, freeze_base=False))
    frozen = {name for name, weight in model.named_parameters() if not weight.requires_grad}
    under = {f"model.layers.{layer}.self_attn.q_proj.base_layer.weight" for layer in range(2)}
    assert frozen == {"lm_head.weight", *under}, "lm_head.weight was frozen before"


# Settings


def test_a_missing_package_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)  # an import of it would raise ModuleNotFoundError
    with pytest.raises(UserError, match=r'^LoRA needs the package peft: pip install -e "\.\[lora\]"$'):
        adapter_settings(LoraFlags(5), AdapterFlags())
    with pytest.raises(UserError, match=r"^the adapter folder out/sft needs the package peft: pip install"):
        load_merged(nn.Linear(1, 1), "out/sft")
