"""LoRA: which layers get it, its formula by hand, what trains; merges against peft's own; models
over one base."""

import copy
import math
import sys

import pytest
import torch
from adapter_folders import RANK, save_adapter
from command_lines import config_of
from peft import LoraConfig, PeftModel, inject_adapter_in_model
from tiny_models import new_model
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from dschat_ppo.errors import UserError
from dschat_ppo.models.adapters.layers import (
    adapter_layers,
    add_adapter,
    is_adapter_parameter,
    lora_targets,
)
from dschat_ppo.models.adapters.merging import adapters_merged, load_merged
from dschat_ppo.models.adapters.settings import AdapterSettings, adapter_settings
from dschat_ppo.models.adapters.shared_base import classifier_over_base, model_over_base
from dschat_ppo.models.loading import ModelChanges, load_causal_lm, load_sequence_classifier

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
    "name",
    [
        "gpt2",
        "opt-350m",
        "falcon",
        "bloom",
        "gpt-oss",
        "mamba",
        "rwkv",
        "granite-hybrid",
        "electra",
    ],
)
def test_every_adapter_of_every_architecture_gets_a_gradient(name):
    model = new_model(name)
    add_adapter(model, LORA)
    train_a_little(model)  # B is not 0
    ids = torch.randint(2, 40, (2, 12), generator=torch.Generator().manual_seed(1))
    model(input_ids=ids, use_cache=False).logits.logsumexp(-1).sum().backward()
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    assert trained and all(is_adapter_parameter(name) for name in trained)
    assert [
        name for name, weight in trained.items() if weight.grad is None or not weight.grad.any()
    ] == []


def test_routers_and_tensors_of_experts_get_none():
    for name in ("mixtral", "gpt-oss"):
        model = new_model(name)
        for layer in model.model.layers:
            layer.mlp.gate = torch.nn.Linear(32, 4)
        names = {target.rpartition(".")[2] for target in lora_targets(model, None)}
        assert names == {"q_proj", "k_proj", "v_proj", "o_proj"}
    dense = new_model("llama")
    dense.model.layers[0].mlp.gate = torch.nn.Linear(32, 4)
    assert "model.layers.0.mlp.gate" in lora_targets(dense, None), (
        "without experts a gate is an ordinary layer"
    )


@pytest.mark.parametrize(
    ("names", "tied", "message"),
    [
        (
            "lm_head,q_proj",
            True,
            "lm_head,q_proj: no layer of LlamaForCausalLM that can get LoRA has 'lm_head'",
        ),
        (
            "decoder.",
            False,
            (
                "decoder.: no layer of LlamaForCausalLM .*down_proj, gate_proj, k_proj, lm_head,"
                " o_proj"
            ),
        ),
        ("q_proj,v_prj", False, "q_proj,v_prj: .* has 'v_prj' in its name"),
        (",", False, ",: "),
    ],
)
def test_names_that_are_not_found_end_in_one_line_with_names_that_are(names, tied, message):
    assert lora_targets(new_model("llama"), "lm_head,q_proj")[-1] == "lm_head"
    with pytest.raises(UserError, match=f"^--actor_lora_module_name {message}"):
        lora_targets(
            new_model("llama", tie_word_embeddings=tied), names, "--actor_lora_module_name"
        )


# Formulas


@pytest.mark.parametrize(
    ("name", "rslora", "scale"), [("llama", False, 8 / 4), ("gpt2", True, 8 / math.sqrt(4))]
)
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
    assert found[0].abs().max() <= 1 / math.sqrt(32), (
        "Kaiming's uniform distribution with a = sqrt(5)"
    )


# What trains


def test_only_lora_and_a_score_head_train_with_a_frozen_base(assets):
    model = new_model("llama")
    add_adapter(model, LORA)
    assert all(
        weight.requires_grad is is_adapter_parameter(name)
        for name, weight in model.named_parameters()
    )
    model = load_sequence_classifier(
        str(assets / "reward"), "fp32", None, False, ModelChanges(adapter=LORA)
    )
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
    # an import of it would raise ModuleNotFoundError
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(
        UserError, match=r'^LoRA needs the package peft: pip install -e "\.\[lora\]"$'
    ):
        adapter_settings(config_of("sft", "--lora_dim", "5"))
    with pytest.raises(
        UserError, match=r"^the adapter folder out/sft needs the package peft: pip install"
    ):
        load_merged(nn.Linear(1, 1), "out/sft")


ROW = torch.tensor([[5, 9, 3, 7, 2, 2, 8]])


def adapted(name: str, dtype=torch.float32, **settings) -> nn.Module:
    """A tiny model with a random adapter on all its linear layers."""
    model = new_model(name).to(dtype)
    targets = ["c_attn", "c_proj"] if name == "gpt2" else ["q_proj", "v_proj", "down_proj"]
    config = LoraConfig(
        r=3, lora_alpha=6, target_modules=targets, fan_in_fan_out=name == "gpt2", **settings
    )
    inject_adapter_in_model(config, model)
    for path, weight in model.named_parameters():
        if "lora_B" in path:
            nn.init.normal_(weight, std=0.1)
        if "lora_magnitude" in path:
            weight.data *= 1.5
    return model.eval()


def tensors(model: nn.Module) -> list[tuple[str, int, torch.Tensor]]:
    return [
        (name, weight.data_ptr(), weight.detach().clone())
        for name, weight in model.named_parameters()
    ]


@pytest.mark.parametrize(
    ("name", "settings", "dtype", "on_host"),
    [
        ("llama", {}, torch.float32, False),
        ("llama", {"use_rslora": True}, torch.bfloat16, True),
        ("llama", {"use_dora": True}, torch.bfloat16, False),
        ("gpt2", {}, torch.bfloat16, False),
        ("gpt2", {"use_dora": True}, torch.float32, True),
    ],
)
def test_weights_inside_are_those_of_pefts_merge_and_come_back_bit_for_bit(
    name, settings, dtype, on_host
):
    model = adapted(name, dtype, **settings)
    by_peft = copy.deepcopy(model).float()
    for layer in adapter_layers(by_peft).values():
        layer.merge()
    before, layers = tensors(model), adapter_layers(model)
    wanted = {
        path: layer.get_base_layer().weight for path, layer in adapter_layers(by_peft).items()
    }
    for _ in range(3):
        with adapters_merged(model, originals_on_host=on_host):
            assert not adapter_layers(model)
            for path, weight in wanted.items():
                layer = model.get_submodule(path)
                assert type(layer).__name__ in ("Linear", "Conv1D") and layer.weight.dtype == dtype
                torch.testing.assert_close(
                    layer.weight,
                    weight.to(dtype),
                    rtol=2e-2 if dtype != torch.float32 else 1e-6,
                    atol=1e-6,
                )
            if dtype == torch.float32:
                torch.testing.assert_close(
                    model(ROW).logits, by_peft(ROW).logits, rtol=1e-4, atol=1e-4
                )
    assert adapter_layers(model) == layers
    after = tensors(model)
    assert [entry[:2] for entry in after] == [entry[:2] for entry in before], "a weight has moved"
    assert all(torch.equal(a[2], b[2]) for a, b in zip(after, before, strict=True))


@pytest.mark.parametrize("is_partition", [False, True])
def test_disposable_weights_are_merged_in_place_and_restored_only_if_they_are_the_partition_itself(
    is_partition,
):
    """On one rank ZeRO-3 gathers no copy; otherwise it drops the copy."""
    model = adapted("llama")
    layer = model.model.layers[1].mlp.down_proj
    weight, kept = layer.base_layer.weight, model.model.layers[0].mlp.down_proj.base_layer.weight
    weight.ds_tensor = weight.data.view(-1) if is_partition else torch.zeros(3)
    address, before, other = weight.data_ptr(), weight.detach().clone(), kept.detach().clone()
    with adapters_merged(model, disposable=[weight]):
        inside = weight.detach().clone()
        assert (weight.data_ptr() == address) is not is_partition and not torch.equal(
            inside, before
        )
    assert torch.equal(weight, before if is_partition else inside)
    assert torch.equal(kept, other)


def test_an_error_inside_restores_the_model():
    model = adapted("llama")
    before, layers = tensors(model), adapter_layers(model)
    with pytest.raises(KeyError), adapters_merged(model):
        raise KeyError
    assert adapter_layers(model) == layers
    assert all(
        torch.equal(a[2], b[2]) and a[1] == b[1]
        for a, b in zip(tensors(model), before, strict=True)
    )


def test_a_quantised_layer_keeps_its_adapter_beside_it():
    model = adapted("llama")
    layer = model.model.layers[0].self_attn.q_proj
    layer.base_layer.weight = nn.Parameter(
        layer.base_layer.weight.to(torch.int8), requires_grad=False
    )
    with adapters_merged(model):
        assert adapter_layers(model) == {"model.layers.0.self_attn.q_proj": layer}


SHORT_ROW = torch.tensor([[5, 6, 7, 8, 40]])
SETTINGS = AdapterSettings(RANK, 8.0, 0.0, None, rslora=False, dora=False, freeze_base=True)


@pytest.fixture(scope="module")
def adapters(assets):
    save_adapter(assets / "lm", assets / "lm_adapter", scalar=False, seed=3)
    save_adapter(assets / "lm", assets / "scalar_adapter", scalar=True, seed=4)
    return assets


def own_parameters(model, other) -> set[str]:
    held = {id(parameter) for parameter in other.parameters()}
    return {name for name, parameter in model.named_parameters() if id(parameter) not in held}


@torch.no_grad()
def test_without_the_adapter_it_is_the_base(adapters):
    lm = load_causal_lm(
        str(adapters / "lm_adapter"), "fp32", None, ModelChanges(adapter=SETTINGS)
    ).eval()
    tree = model_over_base(lm).eval()
    assert own_parameters(tree, lm) == set()
    assert not adapter_layers(tree) and not hasattr(tree, "peft_config")
    assert {id(m) for m in tree.modules()}.isdisjoint(id(m) for m in lm.modules())
    base = AutoModelForCausalLM.from_pretrained(adapters / "lm").eval()
    assert set(tree.state_dict()) == set(base.state_dict()), "its names are those of a plain model"
    assert torch.equal(tree(SHORT_ROW).logits, base(SHORT_ROW).logits)
    assert not torch.equal(lm(SHORT_ROW).logits, base(SHORT_ROW).logits)


@torch.no_grad()
def test_a_classifier_over_the_base_is_the_one_that_peft_loads(adapters):
    lm = load_causal_lm(str(adapters / "lm"), "fp32", None, ModelChanges(adapter=SETTINGS))
    base = model_over_base(lm)
    tree = classifier_over_base(base, str(adapters / "scalar_adapter")).eval()
    plain = AutoModelForSequenceClassification.from_pretrained(adapters / "lm", num_labels=1)
    peft_model = PeftModel.from_pretrained(plain, adapters / "scalar_adapter").eval()
    hidden = tree.base_model(SHORT_ROW).last_hidden_state
    found = tree.score(hidden)[:, -1]
    plain.config.pad_token_id = None
    torch.testing.assert_close(found, peft_model(SHORT_ROW).logits, rtol=1e-5, atol=1e-5)
    own = own_parameters(tree, lm)
    assert {name for name in own if not is_adapter_parameter(name)} == {"score.weight"}
    assert {name for name, p in tree.named_parameters() if p.requires_grad} == own, (
        "adapter and head train, no more"
    )
    assert tree.config is tree.base_model.config and tree.config.num_labels == 1
    assert lm.config.num_labels != 1 or lm.config is not tree.config
    assert not any(weight.is_meta for weight in (*tree.parameters(), *tree.buffers()))


def test_a_new_head_is_zero(adapters):
    base = model_over_base(
        load_causal_lm(str(adapters / "lm"), "fp32", None, ModelChanges(adapter=SETTINGS))
    )
    head = classifier_over_base(base, str(adapters / "lm"), SETTINGS).score.weight
    assert torch.equal(head, torch.zeros(1, 32)) and head.requires_grad


def test_checkpointing_and_mode_of_one_model_do_not_affect_another(adapters):
    lm = load_causal_lm(str(adapters / "lm"), "fp32", None, ModelChanges(adapter=SETTINGS)).eval()
    tree = model_over_base(lm).eval()
    lm.train()
    lm.gradient_checkpointing_enable()
    assert not tree.training and not any(
        getattr(m, "gradient_checkpointing", False) for m in tree.modules()
    )
