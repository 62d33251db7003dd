"""Adapters merged into whole weights, against peft's own merge and against the unmerged model."""

import copy

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from tiny_models import new_model
from torch import nn

from dschat_ppo.models.adapters import adapter_layers, merged

IDS = torch.tensor([[5, 9, 3, 7, 2, 2, 8]])


def adapted(name: str, dtype=torch.float32, **settings) -> nn.Module:
    """A tiny model with a random adapter on all its linear layers."""
    model = new_model(name).to(dtype)
    targets = ["c_attn", "c_proj"] if name == "gpt2" else ["q_proj", "v_proj", "down_proj"]
    config = LoraConfig(r=3, lora_alpha=6, target_modules=targets, fan_in_fan_out=name == "gpt2", **settings)
    inject_adapter_in_model(config, model)
    for path, weight in model.named_parameters():
        if "lora_B" in path:
            nn.init.normal_(weight, std=0.1)
        if "lora_magnitude" in path:
            weight.data *= 1.5
    return model.eval()


def tensors(model: nn.Module) -> list[tuple[str, int, torch.Tensor]]:
    return [(name, weight.data_ptr(), weight.detach().clone()) for name, weight in model.named_parameters()]


@pytest.mark.parametrize(("name", "settings", "dtype", "on_host"), [
    ("llama", {}, torch.float32, False), ("llama", {"use_rslora": True}, torch.bfloat16, True),
    ("llama", {"use_dora": True}, torch.bfloat16, False), ("gpt2", {}, torch.bfloat16, False),
    ("gpt2", {"use_dora": True}, torch.float32, True),
])  # fmt: skip
def test_weights_inside_are_those_of_pefts_merge_and_come_back_bit_for_bit(name, settings, dtype, on_host):
    model = adapted(name, dtype, **settings)
    by_peft = copy.deepcopy(model).float()
    for layer in adapter_layers(by_peft).values():
        layer.merge()
    before, layers = tensors(model), adapter_layers(model)
    wanted = {path: layer.get_base_layer().weight for path, layer in adapter_layers(by_peft).items()}
    for _ in range(3):
        with merged(model, originals_on_host=on_host):
            assert not adapter_layers(model)
            for path, weight in wanted.items():
                layer = model.get_submodule(path)
                assert type(layer).__name__ in ("Linear", "Conv1D") and layer.weight.dtype == dtype
                torch.testing.assert_close(
                    layer.weight, weight.to(dtype), rtol=2e-2 if dtype != torch.float32 else 1e-6, atol=1e-6
                )
            if dtype == torch.float32:
                torch.testing.assert_close(model(IDS).logits, by_peft(IDS).logits, rtol=1e-4, atol=1e-4)
    assert adapter_layers(model) == layers
    after = tensors(model)
    assert [entry[:2] for entry in after] == [entry[:2] for entry in before], "a weight has moved"
    assert all(torch.equal(a[2], b[2]) for a, b in zip(after, before, strict=True))


@pytest.mark.parametrize("is_partition", [False, True])
def test_disposable_weights_are_merged_in_place_and_restored_only_if_they_are_the_partition_itself(is_partition):
    """On one rank ZeRO-3 gathers no copy; otherwise it drops the copy."""
    model = adapted("llama")
    layer = model.model.layers[1].mlp.down_proj
    weight, kept = layer.base_layer.weight, model.model.layers[0].mlp.down_proj.base_layer.weight
    weight.ds_tensor = weight.data.view(-1) if is_partition else torch.zeros(3)
    address, before, other = weight.data_ptr(), weight.detach().clone(), kept.detach().clone()
    with merged(model, disposable=[weight]):
        inside = weight.detach().clone()
        assert (weight.data_ptr() == address) is not is_partition and not torch.equal(inside, before)
    assert torch.equal(weight, before if is_partition else inside)
    assert torch.equal(kept, other)


def test_an_error_inside_restores_the_model():
    model = adapted("llama")
    before, layers = tensors(model), adapter_layers(model)
    with pytest.raises(KeyError), merged(model):
        raise KeyError
    assert adapter_layers(model) == layers
    assert all(torch.equal(a[2], b[2]) and a[1] == b[1] for a, b in zip(tensors(model), before, strict=True))


def test_a_quantised_layer_keeps_its_adapter_beside_it():
    model = adapted("llama")
    layer = model.model.layers[0].self_attn.q_proj
    layer.base_layer.weight = nn.Parameter(layer.base_layer.weight.to(torch.int8), requires_grad=False)
    with merged(model):
        assert adapter_layers(model) == {"model.layers.0.self_attn.q_proj": layer}
