"""Parts of a model: counts against hand arithmetic, and activations against a real forward pass."""

import json

import pytest
import torch
import transformers
from every_architecture import ARCHITECTURES
from tiny_models import VOCABULARY, model_of
from transformers import LlamaConfig, LlamaModel, MixtralConfig

from dschat_ppo.config.cli import parse
from dschat_ppo.models.adapters import AdapterSettings
from dschat_ppo.models.fast_layers import use_fast_layers
from dschat_ppo.models.packing import padded_rows
from dschat_ppo.planner.model_parts import parts_of, read_model_configs, saved_activations

ATTENTION, MLP = 64 * 64 + 2 * 64 * 32 + 64 * 64, 3 * 64 * 160
LAYER = ATTENTION + MLP + 2 * 64
LORA = AdapterSettings(8, 32.0, 0.0, None, False, False, freeze_base=True)


def llama(**settings):
    return LlamaConfig(**{
        "vocab_size": 100, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, **settings,
    })  # fmt: skip


def test_a_language_model():
    parts = parts_of(llama(), "bf16", scalar=False)
    assert (parts.embedding, parts.layers, parts.head, parts.other) == (100 * 64, (LAYER,) * 3, 100 * 64, 64)
    assert parts.total == parts.trained == 3 * LAYER + 2 * 6400 + 64
    assert parts.packed == 3 * LAYER + 6400
    assert parts.kv_bytes == 3 * 2 * 2 * 16 * 2  # layers, keys and values, heads, numbers of a head, bytes
    assert parts.cache_bytes(10) == 10 * parts.kv_bytes and parts.vocabulary == 100 and parts.largest == 64 * 160
    hybrid = parts_of(model_of("lfm2").config, "fp32", scalar=False)  # a layer of attention, one with a state
    assert hybrid.cache_bytes(10) == 10 * 2 * 2 * 8 * 4 + 2 * 3 * 32 * 4
    tied = parts_of(llama(tie_word_embeddings=True), "bf16", scalar=False)
    assert (tied.head, tied.total) == (0, 3 * LAYER + 6400 + 64)  # counts once
    assert tied.packed == 3 * LAYER + 6400  # it is still multiplied
    reward = parts_of(llama(), "fp32", scalar=True)
    assert (reward.head, reward.vocabulary, reward.kv_bytes, reward.packed) == (64, 1, 0, 3 * LAYER + 64)


@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_every_architecture_counts(name):
    kind, settings = ARCHITECTURES[name]
    config = getattr(transformers, kind)(**{"vocab_size": VOCABULARY, "pad_token_id": 0, **settings})
    parts = parts_of(config, "bf16", scalar=False)
    assert parts.saved.whole > 0 and len(parts.saved.layers) == len(parts.layers) == 2
    assert parts.kv_bytes > 0 and parts.total >= parts.packed > 0
    assert parts_of(config, "bf16", scalar=True).total > 0


def test_lora_trains_its_matrices_alone():
    parts = parts_of(llama(), "bf16", False, LORA)
    sizes = [(64, 64), (64, 32), (64, 32), (64, 64), (64, 160), (64, 160), (160, 64)]
    assert parts.trained == 3 * sum(8 * (rows + columns) for rows, columns in sizes)
    assert parts.adapted == 3 * (ATTENTION + MLP)
    assert parts.saved.whole < parts_of(llama(), "bf16", False).saved.whole


def test_experts_are_not_packed():
    config = MixtralConfig(
        vocab_size=100, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    parts = parts_of(config, "bf16", scalar=False)
    assert sum(parts.layers) - (parts.packed - 6400) == 2 * 4 * 3 * 64 * 96


def model_folder(root, name, kind):
    (root / name).mkdir()
    config = llama(vocab_size=VOCABULARY, architectures=[kind]).to_dict()
    (root / name / "config.json").write_text(json.dumps(config))
    return str(root / name)


def test_configurations_are_those_of_the_roles(tmp_path):
    actor, critic = (model_folder(tmp_path, name, f"LlamaFor{kind}")
                     for name, kind in (("a", "CausalLM"), ("c", "SequenceClassification")))  # fmt: skip
    words = ["--actor_model_name_or_path", actor, "--critic_model_name_or_path", critic]
    words += ["--data_path", "d", "--output_dir", "o"]
    assert list(read_model_configs(parse("ppo", words))) == ["actor", "reference", "critic", "reward"]
    grpo = ["--advantage_estimator", "grpo", "--n_samples_per_prompt", "4", "--kl_coef", "0", "--use_reward_model",
            "False", "--reward_function", "length"]  # fmt: skip
    assert list(read_model_configs(parse("ppo", [*words, *grpo]))) == ["actor"]
    one = parse("sft", ["--model_name_or_path", actor, "--data_path", "d", "--output_dir", "o"])
    assert read_model_configs(one)["model"].hidden_size == 64


def test_a_cpu_keeps_less_in_bf16():
    kept = {
        (dtype, on_gpu): parts_of(llama(), dtype, False, on_gpu=on_gpu).saved.whole
        for dtype in ("bf16", "fp32") for on_gpu in (True, False)
    }  # fmt: skip
    assert kept["bf16", False] < 0.9 * kept["bf16", True] and kept["fp32", False] == kept["fp32", True]


TEXT = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}  # fmt: skip


@pytest.mark.parametrize(("kind", "settings"), [
    ("Gemma3Config", {"text_config": TEXT, "vision_config": {"num_hidden_layers": 1}}),
    # pad_token_id must be a number
    ("ModernBertDecoderConfig", {**TEXT, "layer_types": ["full_attention"] * 2, "is_decoder": True, "pad_token_id": 0}),
    # settings of each layer
    ("Gemma4TextConfig", {**TEXT, "hidden_size_per_layer_input": 0, "layer_types": ["full_attention"] * 2,
                          "global_head_dim": 8}),
    # attention gets its mask by name
    ("DogeConfig", TEXT),
])  # fmt: skip
def test_unusual_architectures_are_planned(kind, settings):
    parts = parts_of(getattr(transformers, kind)(**settings), "bf16", scalar=False)
    assert len(parts.layers) == 2 and parts.hidden == 32


def backbone(device="meta", dtype=torch.bfloat16):
    with torch.device(device):
        return LlamaModel(llama(vocab_size=50)).to(dtype)


def test_a_layer_of_a_llama_saves_what_hand_arithmetic_gives():
    norms = 2 * (4 * 64 + 4 + 2 * 64 + 2 * 64)  # fp32 input, 1 / root, output before and after the weight
    attention = 2 * (64 + 32 + 32 + 64) + 4 * 4  # queries, keys, values, output; a log-sum for each head
    mlp = 4 * 2 * 160
    found = saved_activations(backbone())
    assert len(found.layers) == 3
    assert found.layers[1:] == (norms + attention + mlp,) * 2  # the first one saves the rotary table too
    assert found.layer_input == 2 * 64


def saved_by_a_pass(model) -> float:
    """Bytes per token that a real forward pass over 256 tokens saves, without weights."""
    held, weights = {}, {weight.data_ptr() for weight in model.parameters()}

    def keep(tensor):
        if tensor.untyped_storage().data_ptr() not in weights:
            held[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(input_ids=torch.zeros(1, 256, dtype=torch.int64), use_cache=False)
    return sum(tensor.untyped_storage().nbytes() for tensor in held.values()) / 256


def test_the_count_is_that_of_a_real_forward_pass_in_fp32():
    """The kernel of PyTorch on a CPU saves the same as the stand-in of the count."""
    real = saved_by_a_pass(backbone("cpu", torch.float32))
    assert saved_activations(backbone(dtype=torch.float32)).whole == pytest.approx(real, rel=0.02)


def test_layers_with_kernels_save_what_a_real_pass_in_bf16_saves():
    norms = 2 * (2 * 64 + 2 * 64)  # input and output in bf16
    attention = 2 * (64 + 32 + 32 + 64) + 4 * 4
    mlp = 3 * 2 * 160  # both first products and their gated product
    planned, model = backbone(), backbone("cpu")
    for made in (planned, model):
        use_fast_layers(made)
    assert saved_activations(planned).layers[1:] == (norms + attention + mlp,) * 2
    with padded_rows(model, "auto", True).running():
        assert saved_activations(planned).whole == pytest.approx(saved_by_a_pass(model), rel=0.02)
