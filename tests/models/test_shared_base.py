"""Models over one frozen base: what they share, what they do not, and that they compute what loaded models compute."""

import pytest
import torch
from adapter_folders import RANK, save_adapter
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from dschat_ppo.engine.rlhf_engine import classifier_over_base, model_over_base
from dschat_ppo.models.adapters import AdapterSettings, adapter_layers, is_adapter_parameter
from dschat_ppo.models.loading import load_causal_lm

IDS = torch.tensor([[5, 6, 7, 8, 40]])
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
    lm = load_causal_lm(str(adapters / "lm_adapter"), "fp32", None, adapter=SETTINGS).eval()
    tree = model_over_base(lm).eval()
    assert own_parameters(tree, lm) == set()
    assert not adapter_layers(tree) and not hasattr(tree, "peft_config")
    assert {id(m) for m in tree.modules()}.isdisjoint(id(m) for m in lm.modules())
    base = AutoModelForCausalLM.from_pretrained(adapters / "lm").eval()
    assert set(tree.state_dict()) == set(base.state_dict()), "its names are those of a plain model"
    assert torch.equal(tree(IDS).logits, base(IDS).logits)
    assert not torch.equal(lm(IDS).logits, base(IDS).logits)


@torch.no_grad()
def test_a_classifier_over_the_base_is_the_one_that_peft_loads(adapters):
    lm = load_causal_lm(str(adapters / "lm"), "fp32", None, adapter=SETTINGS)
    base = model_over_base(lm)
    tree = classifier_over_base(base, str(adapters / "scalar_adapter")).eval()
    plain = AutoModelForSequenceClassification.from_pretrained(adapters / "lm", num_labels=1)
    peft_model = PeftModel.from_pretrained(plain, adapters / "scalar_adapter").eval()
    hidden = tree.base_model(IDS).last_hidden_state
    found = tree.score(hidden)[:, -1]
    plain.config.pad_token_id = None
    torch.testing.assert_close(found, peft_model(IDS).logits, rtol=1e-5, atol=1e-5)
    own = own_parameters(tree, lm)
    assert {name for name in own if not is_adapter_parameter(name)} == {"score.weight"}
    assert {name for name, p in tree.named_parameters() if p.requires_grad} == own, "adapter and head train, no more"
    assert tree.config is tree.base_model.config and tree.config.num_labels == 1
    assert lm.config.num_labels != 1 or lm.config is not tree.config
    assert not any(weight.is_meta for weight in (*tree.parameters(), *tree.buffers()))


def test_a_new_head_is_zero(adapters):
    base = model_over_base(load_causal_lm(str(adapters / "lm"), "fp32", None, adapter=SETTINGS))
    head = classifier_over_base(base, str(adapters / "lm"), SETTINGS).score.weight
    assert torch.equal(head, torch.zeros(1, 32)) and head.requires_grad


def test_checkpointing_and_mode_of_one_model_do_not_affect_another(adapters):
    lm = load_causal_lm(str(adapters / "lm"), "fp32", None, adapter=SETTINGS).eval()
    tree = model_over_base(lm).eval()
    lm.train()
    lm.gradient_checkpointing_enable()
    assert not tree.training and not any(getattr(m, "gradient_checkpointing", False) for m in tree.modules())
