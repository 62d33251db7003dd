"""What a forward pass saves, against hand arithmetic and against a real forward pass."""

import pytest
import torch
from transformers import LlamaConfig, LlamaModel, MixtralConfig, MixtralModel

from dschat_ppo.models.fast_layers import use_fast_layers
from dschat_ppo.models.packing import padded_attention
from dschat_ppo.planner.saved_activations import formula_per_layer, saved_activations

HIDDEN, INTERMEDIATE, HEADS, KEY_HEADS, SIZE = 64, 160, 4, 2, 16


def backbone(device="meta", dtype=torch.bfloat16, layers=3):
    config = LlamaConfig(
        vocab_size=50, hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, num_hidden_layers=layers,
        num_attention_heads=HEADS, num_key_value_heads=KEY_HEADS, max_position_embeddings=512,
    )  # fmt: skip
    with torch.device(device):
        return LlamaModel(config).to(dtype)


def test_a_layer_of_a_llama_saves_what_hand_arithmetic_gives():
    norms = 2 * (4 * 64 + 4 + 2 * 64 + 2 * 64)  # fp32 input, 1 / root, output before and after the weight
    attention = 2 * (64 + 32 + 32 + 64) + 4 * 4  # queries, keys, values, output; a log-sum for each head
    mlp = 4 * 2 * 160
    found = saved_activations(backbone())
    assert found.counted and len(found.layers) == 3
    assert found.layers[1:] == (norms + attention + mlp,) * 2  # the first one saves the rotary table too
    assert formula_per_layer(backbone().config, 2) == norms + attention + mlp
    assert found.layer_input == 2 * 64


def test_the_count_is_that_of_a_real_forward_pass_in_fp32():
    """The kernel of PyTorch on a CPU saves the same as the stand-in of the count."""
    model, tokens = backbone("cpu", torch.float32), 256
    held = {}
    weights = {weight.data_ptr() for weight in model.parameters()}

    def keep(tensor):
        if tensor.untyped_storage().data_ptr() not in weights:
            held[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(input_ids=torch.zeros(1, tokens, dtype=torch.int64), use_cache=False)
    real = sum(tensor.untyped_storage().nbytes() for tensor in held.values()) / tokens
    assert saved_activations(backbone(dtype=torch.float32)).whole == pytest.approx(real, rel=0.02)


def test_layers_with_kernels_save_what_a_real_pass_in_bf16_saves():
    norms = 2 * (2 * 64 + 2 * 64)  # input and output in bf16
    attention = 2 * (64 + 32 + 32 + 64) + 4 * 4
    mlp = 3 * 2 * 160  # both first products and their gated product
    planned, model, held = backbone(), backbone("cpu"), {}
    for made in (planned, model):
        use_fast_layers(made)
    assert saved_activations(planned).layers[1:] == (norms + attention + mlp,) * 2
    weights = {weight.data_ptr() for weight in model.parameters()}

    def keep(tensor):
        if tensor.untyped_storage().data_ptr() not in weights:
            held[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), padded_attention(model, "auto", True):
        model(input_ids=torch.zeros(1, 256, dtype=torch.int64), use_cache=False)
    real = sum(tensor.untyped_storage().nbytes() for tensor in held.values()) / 256
    assert saved_activations(planned).whole == pytest.approx(real, rel=0.02)


def test_frozen_layers_save_less():
    frozen = backbone()
    frozen.requires_grad_(False)
    frozen.layers[0].input_layernorm.weight.requires_grad_(True)
    assert saved_activations(frozen).layers[1] < saved_activations(backbone()).layers[1]


def test_a_tiled_mlp_keeps_its_input_and_one_piece():
    whole, tiled = saved_activations(backbone()), saved_activations(backbone(), tiled=True)
    assert tiled.piece == 4 * 2 * 160 + 2 * 64  # of its input, the weighted output of the norm is saved there too
    assert tiled.layers[1] == whole.layers[1] - tiled.piece + 2 * 64
    assert whole.piece == 0


def test_a_model_that_needs_data_gets_the_formula(monkeypatch):
    with torch.device("meta"):
        model = MixtralModel(MixtralConfig(
            vocab_size=50, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
        )).to(torch.bfloat16)  # fmt: skip

    def refuse(*arguments, **settings):
        raise NotImplementedError("no data")

    monkeypatch.setattr(model, "forward", refuse)
    found = saved_activations(model)
    assert not found.counted
    experts = 4 * 2 * (2 * 96)
    assert found.layers == (2 * (4 * 64 + 4 + 4 * 64) + 2 * (64 + 32 + 32 + 64) + 4 * 4 + experts,) * 2


def test_the_attention_of_the_model_is_as_before():
    model = backbone()
    before = model.config._attn_implementation
    saved_activations(model)
    assert model.config._attn_implementation == before
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
