"""QLoRA as far as a machine without a GPU can test it: what is asked of transformers, and refusals."""

import importlib.util
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from conftest import tiny_config
from test_adapters import LORA
from tiny_models import new_model
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from dschat_ppo.common import extras
from dschat_ppo.config.run_flags import AdapterFlags
from dschat_ppo.config.supervised_flags import LoraFlags
from dschat_ppo.errors import UserError
from dschat_ppo.models import adapters
from dschat_ppo.models.adapters import (
    AdapterSettings,
    adapter_layers,
    adapter_settings,
    add_adapter,
    lora_targets,
    quantised_base,
)
from dschat_ppo.models.loading import load_causal_lm
from dschat_ppo.models.saving import save_model
from dschat_ppo.models.wrapped_models import PolicyModel

HAS_BITSANDBYTES = importlib.util.find_spec("bitsandbytes") is not None
FOUR = AdapterSettings(4, 8.0, 0.0, None, False, False, True, quantise=4)
EIGHT = AdapterSettings(4, 8.0, 0.0, "q_proj", False, False, True, quantise=8)


class Linear4bit(nn.Linear):
    """Stands in for bitsandbytes' class of this name: its weight is packed into integers."""

    def __init__(self, layer: nn.Linear):
        super().__init__(layer.in_features, layer.out_features, bias=layer.bias is not None)
        self.whole = layer.weight.detach()
        self.weight = nn.Parameter(torch.zeros(layer.weight.numel() // 2, 1, dtype=torch.uint8), requires_grad=False)

    def forward(self, x):
        return nn.functional.linear(x, self.whole)


def test_a_gpu_and_the_package_are_needed(monkeypatch):
    flags = AdapterFlags(load_in_8bit=True, only_optimize_lora=True)
    monkeypatch.setattr(adapters.dist, "on_gpu", lambda: False)
    with pytest.raises(UserError, match=r"^--load_in_8bit needs a GPU, and this run has none"):
        adapter_settings(LoraFlags(8), flags)
    assert adapter_settings(LoraFlags(0), flags) is None
    monkeypatch.setattr(adapters.dist, "on_gpu", lambda: True)
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(UserError, match=r"^--load_in_8bit needs the package bitsandbytes: pip install -e \"\.\[q"):
        adapter_settings(LoraFlags(8), flags)
    monkeypatch.setattr(extras, "find_spec", lambda name: SimpleNamespace(origin=name))
    assert adapter_settings(LoraFlags(8), flags).quantise == 8


def test_the_linear_layers_of_the_blocks_are_quantised_and_no_others():
    found = quantised_base(partial(new_model, "mixtral"), FOUR, torch.bfloat16, None)
    config = found["quantization_config"]
    assert config.load_in_4bit and config.bnb_4bit_quant_type == "nf4" and config.bnb_4bit_use_double_quant
    assert config.bnb_4bit_compute_dtype == torch.bfloat16
    assert config.bnb_4bit_quant_storage == torch.uint8, "a floating format would be cast by DeepSpeed"
    model = new_model("mixtral")
    linear = {name for name, layer in model.named_modules() if type(layer) is nn.Linear}
    assert set(config.llm_int8_skip_modules) == linear - set(lora_targets(model, None)) == {"lm_head"}
    assert list(found["device_map"]) == [""]


def test_8_bits_quantise_all_blocks_although_few_layers_have_lora():
    config = quantised_base(partial(new_model, "opt-350m"), EIGHT, torch.float16, None)["quantization_config"]
    assert config.load_in_8bit and not config.load_in_4bit
    assert sorted(config.llm_int8_skip_modules) == ["lm_head", "model.decoder.project_in", "model.decoder.project_out"]


def test_nothing_is_quantised_unless_asked_and_never_under_zero_3():
    assert quantised_base(partial(new_model, "llama"), None, torch.float32, None) == {}
    assert quantised_base(partial(new_model, "llama"), LORA, torch.float32, None) == {}
    with pytest.raises(UserError, match=r"^--load_in_4bit needs ZeRO stage 0, 1 or 2"):
        quantised_base(partial(new_model, "llama"), FOUR, torch.float32, {"zero_optimization": {"stage": 3}})


def test_the_arguments_reach_from_pretrained(assets, monkeypatch):
    seen, load = {}, AutoModelForCausalLM.from_pretrained

    def spy(folder, quantization_config=None, device_map=None, **others):
        if quantization_config is not None:
            seen.update(others, bits=quantization_config, device_map=device_map)
            device_map = None
        return load(folder, device_map=device_map, **others)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", spy)
    model = load_causal_lm(str(assets / "lm"), "bf16", {"zero_optimization": {"stage": 2}}, adapter=FOUR)
    assert seen["bits"].load_in_4bit and seen["dtype"] == torch.bfloat16 and list(seen["device_map"]) == [""]
    assert len(adapter_layers(model)) == 14


def quantised_lm(folder):
    """A model whose block layers are packed, with an adapter; as if it were loaded from `folder`."""
    model = LlamaForCausalLM(tiny_config())
    model.config._name_or_path = str(folder)
    for name in lora_targets(model, None):
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, Linear4bit(model.get_submodule(name)))
    model.is_quantized = True
    add_adapter(model, FOUR)
    return model


def test_a_quantised_model_is_always_saved_as_an_adapter(assets, tmp_path):
    model = quantised_lm(assets / "lm")
    tokenizer = AutoTokenizer.from_pretrained(assets / "lm")
    save_model(SimpleNamespace(module=PolicyModel(model)), tokenizer, tmp_path, merge=True)
    assert (tmp_path / "adapter_config.json").exists() and not (tmp_path / "model.safetensors").exists()
    assert adapter_layers(load_causal_lm(str(tmp_path), "fp32", None)) == {}, "merged into whole weights"


@pytest.mark.skipif(not (torch.cuda.is_available() and HAS_BITSANDBYTES), reason="needs a GPU and bitsandbytes")
@pytest.mark.parametrize("settings", [FOUR, EIGHT])
def test_a_quantised_model_trains_on_a_gpu(assets, settings):
    model = load_causal_lm(str(assets / "lm"), "bf16", {"zero_optimization": {"stage": 2}}, adapter=settings)
    kinds = {type(layer.get_base_layer()).__name__ for layer in adapter_layers(model).values()}
    assert kinds == {"Linear4bit" if settings.quantise == 4 else "Linear8bitLt"}
    ids = torch.randint(3, 300, (2, 9), device="cuda")
    model(input_ids=ids).logits.float().logsumexp(-1).sum().backward()
    assert all(weight.grad is not None for weight in model.parameters() if weight.requires_grad)
