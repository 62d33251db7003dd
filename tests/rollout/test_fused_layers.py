"""Fused decoder layers: the numbers of the models' own layers, and of no layer that computes
something else."""

import pytest
import torch
from generation import ENGINES, run
from tiny_models import CONTINUOUS, new_model, plain_logprobs
from transformers.models.llama import modeling_llama

from dschat_ppo.rollout import fused_layers as module
from dschat_ppo.rollout.attention import RolloutAttention, attention_replaced
from dschat_ppo.rollout.fused_layers import can_prepack, fp32_logits, fused_layers, joint_product
from dschat_ppo.rollout.kv_cache import DecodeMetadata, KVCache, PrefillMetadata, RolloutCache

OF_LLAMAS_FORM = ["llama", "mistral", "mistral-window", "qwen2", "qwen2-window", "gemma"]
LENGTHS = torch.tensor([11, 3, 7])  # of prompts; windows of the models are shorter than the longest


def plain(layers):
    """A product of linear layers without packed weights."""
    weight = torch.cat([layer.weight for layer in layers])
    bias = None if layers[0].bias is None else torch.cat([layer.bias for layer in layers])
    return lambda states: torch.nn.functional.linear(states, weight, bias)


def random_biases(model):
    """Transformers makes biases zero, which would hide that one is missing."""
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data = torch.randn(parameter.shape, generator=generator).to(parameter) / 8
    return model


@torch.no_grad()
def prefill_and_step(model) -> list[torch.Tensor]:
    """Logits of three prompts, then of one more token in each row."""
    attention, cache = RolloutAttention(), KVCache(3, 16)
    rows, places = torch.arange(3).repeat_interleave(11), torch.arange(11).repeat(3)
    ids = torch.arange(33).view(3, 11) % 29 + 3
    found = []
    with attention_replaced(model, attention):
        for metadata, tokens, positions in (
            (
                PrefillMetadata(cache, rows, places, rows, places),
                ids,
                torch.arange(11).expand(3, -1),
            ),
            ([DecodeMetadata(0, cache, LENGTHS)], ids[:, :1], LENGTHS.unsqueeze(1)),
        ):
            attention.metadata = metadata
            output = model(
                input_ids=tokens,
                position_ids=positions,
                past_key_values=RolloutCache(),
                use_cache=True,
            )
            found.append(output.logits)
    return found


@pytest.mark.parametrize("name", CONTINUOUS)
def test_layers_of_llamas_form_compute_the_same_logits(name):
    model = random_biases(new_model(name))
    expected, layers = prefill_and_step(model), fused_layers(model, plain)
    assert [layer.self_attn.layer_idx for layer, _ in layers] == (
        [0, 1] if name in OF_LLAMAS_FORM else []
    )
    for layer, forward in layers:
        layer.forward = forward
    for found, own in zip(prefill_and_step(model), expected, strict=True):
        torch.testing.assert_close(found, own, atol=2e-5, rtol=1e-5)
    if name.endswith("-window"):  # the test can see a window that is not passed on
        for _, forward in layers:
            forward._settings = {**forward._settings, "sliding_window": None}
        assert (prefill_and_step(model)[1] - expected[1]).abs().max() > 1e-3


def test_a_fused_layer_calls_the_attention_of_the_model():
    """Outside a rollout too: the probe of memory for a KV cache runs then."""
    model, ids = new_model("llama", attn_implementation="eager"), torch.arange(3, 14).unsqueeze(0)
    expected = model(input_ids=ids).logits
    for layer, forward in fused_layers(model, plain):
        layer.forward = forward
    torch.testing.assert_close(model(input_ids=ids).logits, expected, atol=2e-5, rtol=1e-5)
    assert model.config._attn_implementation == "eager"


def test_a_layer_that_rotates_a_part_of_each_head_runs_itself():
    """GLM 4 of mixtures of experts, for example: its first layers have Llama's form otherwise."""
    model = new_model("llama")
    [layer, _], seen = model.model.layers, []
    for one, forward in fused_layers(model, plain):
        one.forward = forward
    layer.forward._original = lambda states, **given: seen.append(given.keys()) or states
    states, angles = torch.randn(2, 3, 32), torch.ones(2, 3, layer.self_attn.head_dim // 2)
    assert layer(states, position_embeddings=(angles, angles)) is states
    assert seen == [{"attention_mask", "position_embeddings", "past_key_values"}]


class WithFactor(modeling_llama.LlamaDecoderLayer):
    """Of Llama's form, but what the MLP computes counts 2 % less, as with a factor of the residual
    connection."""

    def forward(self, hidden_states, **kwargs):
        attended = hidden_states + self.self_attn(self.input_layernorm(hidden_states), **kwargs)[0]
        return attended + 0.98 * self.mlp(self.post_attention_layernorm(attended))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_that_computes_something_else_is_not_fused(dtype, monkeypatch):
    model = new_model("llama").to(dtype)
    first, second = model.model.layers
    for product in (second.self_attn.o_proj, second.mlp.down_proj):
        product.weight.data /= 64  # beside states of size 1, rounding would hide the factor
    second.__class__ = WithFactor
    monkeypatch.setattr(module, "_AGREED", {})
    assert [layer for layer, _ in fused_layers(model, plain)] == [first]
    first.self_attn.q_proj.forward = first.self_attn.q_proj.forward  # somebody else's function
    assert fused_layers(model, plain) == []
    del first.self_attn.q_proj.forward
    module._AGREED.clear()
    with monkeypatch.context() as patch:  # no rotation
        patch.setattr(modeling_llama, "apply_rotary_pos_emb", lambda q, k, cos, sin: (q, k))
        assert fused_layers(model, plain) == []
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", lambda q: q)  # a TypeError
    assert fused_layers(model, plain) == []


def test_rounding_is_told_from_another_number():
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(1000, generator=generator, dtype=torch.float64)
    exact = numbers.bfloat16()
    assert module._close((numbers * (1 + 2**-10)).bfloat16(), exact)
    assert not module._close((numbers * (1 + 2**-7)).bfloat16(), exact)
    assert not module._close(exact[:10], exact)


# Weights side by side


def laid_flat(layers, kinds=("weight", "bias")):
    """Put the weights of the layers one after another into one tensor, and their biases into
    another."""
    for kind in kinds:
        parts = [part for layer in layers if (part := getattr(layer, kind)) is not None]
        flat = torch.cat([part.detach().flatten() for part in parts]) if parts else torch.empty(0)
        for part, place in zip(parts, flat.split([part.numel() for part in parts]), strict=True):
            part.data = place.view_as(part)
    return layers


@pytest.mark.parametrize("biases", ["none", "all", "one"])
@pytest.mark.parametrize("flat", [(), ("weight",), ("weight", "bias")])
def test_weights_side_by_side_make_one_product(biases, flat, monkeypatch):
    layers = [
        torch.nn.Linear(6, size, bias=biases == "all" or size == biases) for size in (4, 2, 3)
    ]
    if biases == "one":
        layers[1] = torch.nn.Linear(6, 2)
        layers[0].bias = layers[2].bias = None
    laid_flat(layers, flat)
    states, calls, linear = torch.randn(5, 6), [], torch._C._nn.linear
    expected = torch.cat([layer(states) for layer in layers], dim=1)
    monkeypatch.setattr(torch._C._nn, "linear", lambda *given: calls.append(1) or linear(*given))
    torch.testing.assert_close(joint_product(layers)(states), expected)
    assert calls == [1] * (
        (biases == "none" and "weight" in flat) or (biases == "all" and "bias" in flat)
    )
    layers[0].weight.data += 1  # the product reads the weights, and not a copy
    torch.testing.assert_close(joint_product(layers)(states)[:, :4], layers[0](states))


def test_only_weights_that_follow_one_another_are_joined():
    flat = torch.arange(24.0)
    first, second, third = flat[:8].view(2, 4), flat[8:12].view(1, 4), flat[12:24].view(3, 4)
    assert torch.equal(module.adjoining([first, second, third]), flat.view(6, 4))
    for wrong in ([first, third], [second, first], [first, second.clone()], [third.t(), third.t()]):
        assert module.adjoining(wrong) is None


def test_the_logits_of_a_head_are_fp32_and_the_head_is_restored(monkeypatch):
    """The products themselves: tests/algorithms/test_token_logprobs.py."""
    model, states = new_model("llama").bfloat16(), torch.randn(2, 3, 32).bfloat16()
    asked, original = [], module.fp32_product
    monkeypatch.setattr(
        module, "fp32_product", lambda *given: asked.append(given[1:]) or original(*given)
    )
    with fp32_logits(model), torch.no_grad():
        logits = model.lm_head(states)
    assert logits.dtype == torch.float32 and torch.equal(logits, model.lm_head(states).float())
    assert [given[0] is model.lm_head.weight for given in asked] == [
        True
    ] and "forward" not in vars(model.lm_head)


# Packed weights

needs_prepack = pytest.mark.skipif(
    not can_prepack(torch.nn.Linear(2, 2).bfloat16()), reason="this PyTorch has no packed products"
)


@needs_prepack
@pytest.mark.parametrize(
    ("name", "engine"),
    [*(("llama", engine) for engine in ENGINES), ("phi", "continuous"), ("qwen2", "static")],
)
def test_packed_weights_give_nearly_the_same_logprobs(name, engine, monkeypatch):
    """Up to bf16 rounding, which is 2^-8 of a number; log-probs of these models go to -10."""
    model, products = new_model(name).bfloat16(), []
    original = module.packed_linear
    monkeypatch.setattr(
        module, "packed_linear", lambda *args: products.append(1) or original(*args)
    )
    packed = run(model, rows=8, **ENGINES[engine])
    assert products
    products.clear()
    plain = run(model, rows=8, prepack=False, **ENGINES[engine])
    assert not products
    for rollout in (packed, plain):
        difference = (rollout.rollout_logprobs - plain_logprobs(model, rollout, 1.3)).abs()
        assert difference.max() < 0.2
        assert difference.mean() < 0.03


@needs_prepack
def test_a_weight_is_packed_once(monkeypatch):
    """Two layers of seven weights, and the head."""
    packed, original = [], module.packed_product

    def counted(layers):
        packed.extend(layers)
        return original(layers)

    monkeypatch.setattr(module, "packed_product", counted)
    model, states = new_model("llama").bfloat16(), torch.randn(2, 3, 32).bfloat16()
    plain = model.lm_head(states)
    with module.fused(model), torch.no_grad():
        torch.testing.assert_close(model.lm_head(states), plain, atol=2e-2, rtol=2e-2)
        assert len(packed) == len(set(packed)) == 2 * 7 + 1
        assert set(packed) == {
            module for module in model.modules() if type(module) is torch.nn.Linear
        }


@needs_prepack
@pytest.mark.parametrize("biases", [(False, False), (True, False)])
def test_a_packed_product_of_several_layers_has_their_outputs_one_after_another(biases):
    layers = [torch.nn.Linear(33, 17 - n, bias=bias).bfloat16() for n, bias in enumerate(biases)]
    inputs = torch.randn(5, 33).bfloat16()
    with torch.no_grad():
        expected = torch.cat([layer(inputs) for layer in layers], dim=1)
        torch.testing.assert_close(
            module.packed_product(layers)(inputs), expected, atol=2e-2, rtol=2e-2
        )
