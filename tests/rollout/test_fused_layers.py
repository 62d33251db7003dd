"""Fused decoder layers, and rotary positions of queries and keys together: the numbers of the models' own layers and
functions, and of no layer that computes something else."""

import sys

import pytest
import torch
from generation import ENGINES, run
from tiny_models import CONTINUOUS, new_model, plain_logprobs
from transformers.models.llama import modeling_llama

from dschat_ppo.rollout import fused_layers as module
from dschat_ppo.rollout.attention import RolloutAttention, RolloutCache, installed
from dschat_ppo.rollout.fused_layers import (
    FUNCTION,
    FusedRotary,
    can_prepack,
    fused_layers,
    fused_rotary,
)
from dschat_ppo.rollout.kv_cache import DecodeMetadata, KVCache, PrefillMetadata

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
    with installed(model, attention):
        for metadata, tokens, positions in (
            (PrefillMetadata(cache, rows, places, rows, places), ids, torch.arange(11).expand(3, -1)),
            ([DecodeMetadata(0, cache, LENGTHS)], ids[:, :1], LENGTHS.unsqueeze(1)),
        ):
            attention.metadata = metadata
            output = model(input_ids=tokens, position_ids=positions, past_key_values=RolloutCache(), use_cache=True)
            found.append(output.logits)
    return found


@pytest.mark.parametrize("name", CONTINUOUS)
def test_layers_of_llamas_form_compute_the_same_logits(name):
    model = random_biases(new_model(name))
    expected, layers = prefill_and_step(model), fused_layers(model, plain)
    assert [layer.self_attn.layer_idx for layer, _ in layers] == ([0, 1] if name in OF_LLAMAS_FORM else [])
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
    layer.forward._own = lambda states, **given: seen.append(given.keys()) or states
    states, angles = torch.randn(2, 3, 32), torch.ones(2, 3, layer.self_attn.head_dim // 2)
    assert layer(states, position_embeddings=(angles, angles)) is states
    assert seen == [{"attention_mask", "position_embeddings", "past_key_values"}]


class WithFactor(modeling_llama.LlamaDecoderLayer):
    """Of Llama's form, but what the MLP computes counts 2 % less, as with a factor of the residual connection."""

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


# Rotary positions


ROTARY = [name for name in CONTINUOUS if name not in ("gpt2", "opt", "opt-350m", "electra")]


def step(model) -> torch.Tensor:
    """Logits of one token in each of three rows, at different positions."""
    attention, rows = RolloutAttention(), torch.arange(3)
    attention.metadata = PrefillMetadata(KVCache(3, 1), rows, rows * 0, rows, rows * 0)
    with installed(model, attention), torch.no_grad():
        return model(
            input_ids=torch.tensor([[5], [9], [20]]), position_ids=torch.tensor([[0], [7], [31]]),
            past_key_values=RolloutCache(), use_cache=True,
        ).logits  # fmt: skip


@pytest.mark.parametrize(("name", "dtype"), [*((name, torch.float32) for name in ROTARY), ("llama", torch.bfloat16)])
def test_a_step_has_the_same_bits(name, dtype):
    model = new_model(name).to(dtype)
    expected, original = step(model), vars(sys.modules[type(model).__module__])[FUNCTION]
    with fused_rotary(model):
        assert isinstance(vars(sys.modules[type(model).__module__])[FUNCTION], FusedRotary)
        for _ in range(2):
            assert torch.equal(step(model), expected)
    assert vars(sys.modules[type(model).__module__])[FUNCTION] is original


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def test_the_angles_are_those_of_the_call(monkeypatch):
    """Two kinds of layers with own angles, other rows in the next step, and memory for a few angles."""
    rotate = FusedRotary(modeling_llama.apply_rotary_pos_emb)
    for count in (3, 3, 5, 2):
        angles = [(random(count, 1, 8).cos(), random(count, 1, 8).sin()), (random(count, 1, 8), random(count, 1, 8))]
        for cos, sin in angles * 3:
            for heads in (2, 4):
                q, k = random(count, 4, 1, 8), random(count, heads, 1, 8)
                expected = modeling_llama.apply_rotary_pos_emb(q, k, cos, sin)
                assert all(map(torch.equal, rotate(q, k, cos, sin), expected))
    assert len(rotate._factors) == 4


def test_whole_prompts_and_other_arguments_are_left_to_the_model():
    calls = []

    def original(*args, **kwargs):
        calls.append((len(args), kwargs))
        return args[:2]

    rotate, cos = FusedRotary(original), random(2, 3, 8)
    rotate(random(2, 4, 3, 8), random(2, 2, 3, 8), cos, cos)
    rotate(random(2, 4, 1, 8), random(2, 2, 1, 8), cos[:, :1, :4], cos[:, :1, :4])  # a part of each head
    rotate(random(2, 1, 4, 8), random(2, 1, 2, 8), cos[:, :1], cos[:, :1], unsqueeze_dim=2)
    assert calls == [(4, {}), (4, {}), (4, {"unsqueeze_dim": 2})]


def interleaved(q, k, cos, sin, unsqueeze_dim=1):
    return tuple(x * cos.unsqueeze(1) + x.roll(1, -1) * sin.unsqueeze(1) for x in (q, k))


@pytest.mark.parametrize("function", [interleaved, lambda q: q], ids=["interleaved", "other arguments"])
def test_a_function_that_computes_something_else_is_kept(function, monkeypatch):
    monkeypatch.setattr(modeling_llama, FUNCTION, function)
    with fused_rotary(new_model("llama")):
        assert getattr(modeling_llama, FUNCTION) is function


# Packed weights

needs_prepack = pytest.mark.skipif(
    not can_prepack(torch.nn.Linear(2, 2).bfloat16()), reason="this PyTorch has no packed products"
)


@needs_prepack
@pytest.mark.parametrize(
    ("name", "engine"), [*(("llama", engine) for engine in ENGINES), ("phi", "continuous"), ("qwen2", "static")]
)
def test_packed_weights_give_nearly_the_same_logprobs(name, engine, monkeypatch):
    """Up to bf16 rounding, which is 2^-8 of a number; log-probs of these models go to -10."""
    model, products = new_model(name).bfloat16(), []
    original = module.packed_linear
    monkeypatch.setattr(module, "packed_linear", lambda *args: products.append(1) or original(*args))
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
    with module.prepacked(model), torch.no_grad():
        torch.testing.assert_close(model.lm_head(states), plain, atol=2e-2, rtol=2e-2)
        assert len(packed) == len(set(packed)) == 2 * 7 + 1
        assert set(packed) == {module for module in model.modules() if type(module) is torch.nn.Linear}


@needs_prepack
@pytest.mark.parametrize("biases", [(False, False), (True, False)])
def test_a_packed_product_of_several_layers_has_their_outputs_one_after_another(biases):
    layers = [torch.nn.Linear(33, 17 - n, bias=bias).bfloat16() for n, bias in enumerate(biases)]
    inputs = torch.randn(5, 33).bfloat16()
    with torch.no_grad():
        expected = torch.cat([layer(inputs) for layer in layers], dim=1)
        torch.testing.assert_close(module.packed_product(layers)(inputs), expected, atol=2e-2, rtol=2e-2)
