"""Parts of a model: counts against hand arithmetic."""

import json

import pytest
import transformers
from every_architecture import ARCHITECTURES
from tiny_models import VOCABULARY
from transformers import LlamaConfig, MixtralConfig

from dschat_ppo.config.cli import parse
from dschat_ppo.errors import UserError
from dschat_ppo.models.adapters import AdapterSettings
from dschat_ppo.planner.model_parts import active_parameters, key_value_numbers, parts_of, read_model_configs

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
    assert parts.active == 3 * LAYER + 6400
    assert parts.kv_bytes == 3 * 2 * 2 * 16 * 2  # layers, keys and values, heads, numbers of a head, bytes
    assert parts.heads == 3 * 64 and parts.vocabulary == 100 and parts.largest == 64 * 160


@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_every_architecture_counts(name):
    kind, settings = ARCHITECTURES[name]
    config = getattr(transformers, kind)(**{"vocab_size": VOCABULARY, "pad_token_id": 0, **settings})
    parts = parts_of(config, "bf16", scalar=False)
    assert parts.saved.counted and parts.saved.whole > 0 and len(parts.saved.layers) == len(parts.layers) == 2
    assert parts.kv_bytes > 0 and parts.total >= parts.active > 0
    assert parts_of(config, "bf16", scalar=True).total > 0


def test_keys_and_values_by_their_sizes():
    assert key_value_numbers(llama()) * 2 == parts_of(llama(), "bf16", scalar=False).kv_bytes


def test_a_model_that_needs_data_counts_its_keys_and_values(monkeypatch):
    from dschat_ppo.planner import model_parts

    def refuse(model):
        raise NotImplementedError("no data")

    monkeypatch.setattr(model_parts, "bytes_per_token", refuse)
    assert parts_of(llama(vocab_size=101), "bf16", scalar=False).kv_bytes == 3 * 2 * 2 * 16 * 2


def test_a_tied_head_counts_once():
    parts = parts_of(llama(tie_word_embeddings=True), "bf16", scalar=False)
    assert parts.head == 0 and parts.total == 3 * LAYER + 6400 + 64
    assert parts.active == 3 * LAYER + 6400  # it is still multiplied


def test_a_reward_model():
    parts = parts_of(llama(), "fp32", scalar=True)
    assert parts.head == 64 and parts.vocabulary == 1 and parts.kv_bytes == 0
    assert parts.active == 3 * LAYER + 64


def test_lora_trains_its_matrices_alone():
    parts = parts_of(llama(), "bf16", False, LORA)
    sizes = [(64, 64), (64, 32), (64, 32), (64, 64), (64, 160), (64, 160), (160, 64)]
    assert parts.trained == 3 * sum(8 * (rows + columns) for rows, columns in sizes)
    assert parts.adapted == 3 * (ATTENTION + MLP)
    assert parts.saved.whole < parts_of(llama(), "bf16", False).saved.whole


def test_a_token_multiplies_its_own_experts_alone():
    config = MixtralConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_local_experts=4, num_experts_per_tok=2
    )
    expert = 3 * 64 * 96
    assert active_parameters(config, 2 * (4 * expert + 1000)) == 2 * (2 * expert + 1000)
    assert active_parameters(llama(), 12345) == 12345


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


def test_a_missing_folder_is_named(tmp_path):
    config = parse("sft", ["--model_name_or_path", str(tmp_path / "no"), "--data_path", "d", "--output_dir", "o"])
    with pytest.raises(UserError, match="--model_name_or_path .*no: no such folder"):
        read_model_configs(config)


def test_a_cpu_keeps_less_in_bf16():
    kept = {
        (dtype, on_gpu): parts_of(llama(), dtype, False, on_gpu=on_gpu).saved.whole
        for dtype in ("bf16", "fp32") for on_gpu in (True, False)
    }  # fmt: skip
    assert kept["bf16", False] < 0.9 * kept["bf16", True] and kept["fp32", False] == kept["fp32", True]
