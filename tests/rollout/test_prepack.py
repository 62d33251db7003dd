"""Packed weights: nearly the same numbers as plain ones, and no layer stays packed."""

import pytest
import torch
from tiny_models import new_model, plain_logprobs, prompts_of

from dschat_ppo.rollout import prepack
from dschat_ppo.rollout.generator import GenerationConfig, generate
from dschat_ppo.rollout.prepack import can_prepack
from dschat_ppo.rollout.sampling import SamplingParameters
from dschat_ppo.rollout.stopping_criteria import StoppingCriteria

ENGINES = {"continuous": {}, "static": {"static": True}, "padded": {"engine": "padded"}}


def run(model, **how):
    prompts = prompts_of((40, 9, 1, 33, 2, 17, 36, 5))
    return generate(
        model, prompts, torch.arange(8), GenerationConfig(SamplingParameters(), StoppingCriteria(8), rows=8, **how)
    )


needs_prepack = pytest.mark.skipif(
    not can_prepack(torch.nn.Linear(2, 2).bfloat16()), reason="this PyTorch has no packed products"
)


@needs_prepack
@pytest.mark.parametrize("engine", list(ENGINES))
@pytest.mark.parametrize("name", ["phi", "llama", "qwen2"])
def test_packed_weights_give_nearly_the_same_logprobs(name, engine, monkeypatch):
    """Up to bf16 rounding, which is 2^-8 of a number; log-probs of these models go to -10."""
    model, products = new_model(name).bfloat16(), []
    original = prepack.packed_linear
    monkeypatch.setattr(prepack, "packed_linear", lambda *args: products.append(1) or original(*args))
    packed = run(model, **ENGINES[engine])
    assert products
    products.clear()
    plain = run(model, prepack=False, **ENGINES[engine])
    assert not products
    for rollout in (packed, plain):
        difference = (rollout.rollout_logprobs - plain_logprobs(model, rollout)).abs()
        assert difference.max() < 0.2
        assert difference.mean() < 0.03


@needs_prepack
@pytest.mark.parametrize("bias", [False, True])
def test_a_packed_layer_computes_the_plain_product(bias):
    layer = torch.nn.Linear(33, 17, bias=bias).bfloat16()
    for shape in ((5, 33), (2, 3, 33), (1, 1, 33)):
        inputs = torch.randn(shape).bfloat16()
        plain = layer(inputs)
        with prepack.prepacked(torch.nn.Sequential(layer), 4), torch.no_grad():
            torch.testing.assert_close(layer(inputs), plain, atol=2e-2, rtol=2e-2)
            assert "forward" in vars(layer)
        assert torch.equal(layer(inputs), plain)


@needs_prepack
def test_a_weight_is_packed_once(monkeypatch):
    """Two layers of seven weights, and the head."""
    packed, original = [], prepack.packed_product

    def counted(layers, rows):
        packed.extend(layers)
        return original(layers, rows)

    monkeypatch.setattr(prepack, "packed_product", counted)
    model = new_model("llama").bfloat16()
    with prepack.prepacked(model, 4):
        assert len(packed) == len(set(packed)) == 2 * 7 + 1
        assert set(packed) == {module for module in model.modules() if type(module) is torch.nn.Linear}


@needs_prepack
@pytest.mark.parametrize("biases", [(True, True), (False, False), (True, False)])
def test_a_packed_product_of_several_layers_has_their_outputs_one_after_another(biases):
    layers = [torch.nn.Linear(33, 17 - n, bias=bias).bfloat16() for n, bias in enumerate(biases)]
    inputs = torch.randn(5, 33).bfloat16()
    with torch.no_grad():
        expected = torch.cat([layer(inputs) for layer in layers], dim=1)
        torch.testing.assert_close(prepack.packed_product(layers, 4)(inputs), expected, atol=2e-2, rtol=2e-2)


def test_full_precision_is_not_packed():
    assert not can_prepack(torch.nn.Linear(2, 2))
