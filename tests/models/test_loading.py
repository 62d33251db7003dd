"""Loading is strict: heads, layouts, missing and unexpected weights, vocabularies and lengths that
fit; classifiers; QLoRA as far as a machine without a GPU can test it."""

import importlib.util
import json
import re
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import transformers as hf
from command_lines import config_of
from conftest import tiny_config
from safetensors.torch import load_file, save_file
from test_adapters import LORA
from tiny_models import new_model
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
)

from dschat_ppo.common import extras
from dschat_ppo.errors import UserError
from dschat_ppo.models.adapters import settings as adapter_settings_module
from dschat_ppo.models.adapters.layers import (
    adapter_layers,
    add_adapter,
    lora_targets,
    quantising_options,
)
from dschat_ppo.models.adapters.settings import AdapterSettings, adapter_settings
from dschat_ppo.models.architectures import check_classifier_config, classifier_class, lm_head_names
from dschat_ppo.models.loading import (
    ModelChanges,
    check_causal_lm,
    check_sequence_classifier,
    load_causal_lm,
    load_config,
    load_sequence_classifier,
    require_length,
)
from dschat_ppo.models.model_folders import settings_only
from dschat_ppo.models.saving import save_model
from dschat_ppo.models.tokenizers import load_tokenizer
from dschat_ppo.models.vocabulary import check_vocabulary, grow_vocabulary
from dschat_ppo.models.weight_comparison import check_weights
from dschat_ppo.models.wrapped_models import PolicyModel, ScalarModel
from dschat_ppo.run.session import naming

IDS = torch.tensor([[5, 9, 17, 4, 1, 0, 0], [8, 30, 2, 7, 60, 9, 1]])
LENGTHS = torch.tensor([5, 7])
ROW = torch.tensor([[5, 9, 2, 4]])


def scores_of(folder, new_head=False):
    model = ScalarModel(load_sequence_classifier(str(folder), "fp32", None, new_head)).eval()
    with torch.no_grad():
        return model(IDS, LENGTHS, last_only=True)


def expected_scores(model):
    """Scores of each row without padding, by transformers alone."""
    with torch.no_grad():
        return torch.cat(
            [model(ids[:n].unsqueeze(0)).logits[0] for ids, n in zip(IDS, LENGTHS, strict=True)]
        )


def test_public_reward_model_scores_as_in_transformers(assets):
    model = LlamaForSequenceClassification.from_pretrained(assets / "reward").eval()
    torch.testing.assert_close(
        scores_of(assets / "reward"), expected_scores(model), rtol=0, atol=1e-5
    )


def test_a_new_head_of_zeros_values_all_tokens_0_and_learns_before_the_body(assets):
    random = load_sequence_classifier(str(assets / "lm"), "fp32", None, new_head=True)
    assert random.score.weight.std() > 0.05, "that of a reward model which step 2 begins"
    model = ScalarModel(
        load_sequence_classifier(str(assets / "lm"), "fp32", None, True, zero_head=True)
    )
    assert torch.equal(model(IDS, LENGTHS), torch.zeros(2, 7))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    head, body = model.classifier.score.weight, model.backbone.layers[0].mlp.down_proj.weight
    for moves in (False, True):
        optimizer.zero_grad()
        (model(IDS, LENGTHS, last_only=True) - 1).square().sum().backward()
        assert head.grad.any() and body.grad.any() == moves
        optimizer.step()


def test_the_head_of_a_reward_model_stays(assets):
    model = load_sequence_classifier(str(assets / "reward"), "fp32", None, True, zero_head=True)
    trained = LlamaForSequenceClassification.from_pretrained(assets / "reward")
    assert torch.equal(model.score.weight, trained.score.weight)


def test_code_in_a_model_folder_is_never_run(tmp_path, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda question: "y")
    monkeypatch.setattr(
        "transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules")
    )
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'was run')!r}, 'w')\nclass Own: pass\n")
    settings = tmp_path / "config.json"
    settings.write_text(json.dumps({"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}))
    with pytest.raises(UserError, match="custom code"):
        load_config(str(tmp_path), "--model")
    words = {"auto_map": {"AutoTokenizer": ["own.Own", None]}, "tokenizer_class": "Own"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(words))
    settings.write_text(json.dumps({"model_type": "own"}))
    with pytest.raises(UserError, match="custom code"):
        load_tokenizer(str(tmp_path), "--model")
    settings.write_text(
        json.dumps({"model_type": "vit", "auto_map": {"AutoModelForCausalLM": "own.Own"}})
    )
    with pytest.raises(UserError, match="no causal language model for ViTConfig"):
        load_causal_lm(str(tmp_path), "fp32", None)
    assert not (tmp_path / "was run").exists()


def write_deepspeed_chat(model, folder, safe):
    """The weights of a sequence classifier under the names that DeepSpeed-Chat gives them."""
    weights = {
        f"rwtransformer.{name}": value.clone() for name, value in model.model.state_dict().items()
    }
    weights["v_head.weight"] = model.score.weight.detach().clone()
    tiny_config(architectures=["LlamaModel"]).save_pretrained(folder)
    if safe:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    else:
        torch.save(weights, folder / "pytorch_model.bin")


def test_a_reward_model_is_refused_where_a_language_model_is_needed(assets, tmp_path):
    with pytest.raises(
        UserError,
        match=r"reward: is a reward model.* \(score.weight\).*give a causal language model",
    ):
        check_causal_lm(str(assets / "reward"))
    other = damaged(
        tmp_path / "other", lambda weights: weights.update({"v_head.weight": torch.zeros(1, 32)})
    )
    with pytest.raises(UserError, match=r"other: is a reward model.* \(v_head.weight\)"):
        check_causal_lm(str(other))


def damaged(folder, change):
    """The folder of a tiny model whose saved weights `change(dict)` has modified."""
    LlamaForCausalLM(tiny_config()).save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


UP = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("dtype", "written"),
    [
        (torch.int8, "I8"),
        (torch.uint8, "U8"),
        (torch.int64, "I64"),
        (torch.bool, "BOOL"),
        (torch.float8_e4m3fn, "F8_E4M3"),
        (torch.complex64, "C64"),
    ],
)
@pytest.mark.parametrize("is_pickled", [False, True])
def test_weights_that_are_no_floating_point_numbers_are_refused(
    tmp_path, dtype, written, is_pickled
):
    """No scale says what they stand for, so a cast would train other numbers."""
    folder = damaged(tmp_path / "lm", lambda weights: weights.update({UP: weights[UP].to(dtype)}))
    file = "model.safetensors"
    if is_pickled:
        file = "pytorch_model.bin"
        torch.save(load_file(tmp_path / "lm/model.safetensors"), tmp_path / "lm" / file)
        (tmp_path / "lm/model.safetensors").unlink()
        written = str(dtype).removeprefix("torch.")
    said = f"{UP} in {file} holds numbers of the format {written}, which cannot be trained"
    for check in (check_causal_lm, lambda path: check_sequence_classifier(path, new_head=True)):
        with pytest.raises(UserError, match=re.escape(said)):
            check(folder)


def test_weights_in_each_floating_point_format_are_loaded(tmp_path):
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        value = torch.linspace(0, 1, 64 * 32).view(64, 32).to(dtype)

        def change(weights, value=value):
            weights[UP] = value

        weight = load_causal_lm(damaged(tmp_path / str(dtype), change), "fp32", None)
        torch.testing.assert_close(weight.get_parameter(UP).to(dtype), value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: weights.pop(UP), f"missing: {UP}"),
        (
            lambda weights: weights.update({"model.extra.weight": torch.zeros(2)}),
            "unexpected: model.extra.weight",
        ),
        (
            lambda weights: weights.update({"model.norm.weight": torch.zeros(5)}),
            "wrong shape: model.norm.weight",
        ),
    ],
)
def test_weights_that_do_not_fit_are_listed(tmp_path, change, message):
    with pytest.raises(UserError, match=message):
        load_causal_lm(damaged(tmp_path, change), "fp32", None)


_SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 50,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
WITH_NOISE = {
    "starcoder2": hf.Starcoder2Config(**_SIZES, residual_dropout=0.5, embedding_dropout=0.5),
    "opt": hf.OPTConfig(
        hidden_size=16,
        ffn_dim=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        word_embed_proj_dim=16,
        vocab_size=50,
        dropout=0.5,
        layerdrop=0.9,
    ),
    "gemma3": hf.Gemma3Config(
        text_config={**_SIZES, "head_dim": 8, "attention_dropout": 0.5},
        vision_config={
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 28,
        },
    ),
}


@pytest.mark.parametrize("name", WITH_NOISE)
def test_without_dropout_training_gives_the_numbers_of_evaluation(tmp_path, name):
    config = WITH_NOISE[name]
    kind = hf.Gemma3ForConditionalGeneration if name == "gemma3" else hf.AutoModelForCausalLM
    torch.manual_seed(0)
    (kind(config) if name == "gemma3" else kind.from_config(config)).save_pretrained(tmp_path)
    ids = torch.arange(3, 15).view(1, 12)

    def logits(dropout: float | None, training: bool) -> torch.Tensor:
        model = load_causal_lm(str(tmp_path), "fp32", None, ModelChanges(dropout)).train(training)
        return model(input_ids=ids).logits

    assert torch.equal(logits(0.0, training=True), logits(None, training=False))
    assert not torch.equal(logits(None, training=True), logits(None, training=False)), (
        "the model has no dropout"
    )


def test_vocabulary_that_does_not_fit_is_refused(assets):
    tokenizer = AutoTokenizer.from_pretrained(assets / "lm")
    small = tiny_config(vocab_size=100)
    with pytest.raises(
        UserError, match=r"--critic_model_name_or_path.*vocabulary of 100.*--resize_vocabulary"
    ):
        check_vocabulary(tokenizer, small, "--critic_model_name_or_path", "folder", other=True)
    check_vocabulary(tokenizer, small, "--model_name_or_path", "folder", resize=True)
    check_vocabulary(
        tokenizer, tiny_config(vocab_size=len(tokenizer)), "--model_name_or_path", "folder"
    )
    check_vocabulary(
        tokenizer, load_config(str(assets / "reward"), "f"), "f", str(assets / "reward"), other=True
    )


@pytest.mark.parametrize("safe", [True, False])
def test_buffers_in_old_files_are_ignored(tmp_path, safe):
    model = hf.GPT2LMHeadModel(
        hf.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=50, n_positions=8)
    ).eval()
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    buffers = {
        "h.0.attn.bias": torch.ones(1, 1, 8, 8).tril().bool(),
        "h.0.attn.masked_bias": torch.tensor(-1e4),
    }
    if safe:
        save_file(load_file(file) | buffers, file, metadata={"format": "pt"})
    else:
        torch.save(load_file(file) | buffers, tmp_path / "pytorch_model.bin")
        file.unlink()
    loaded = load_causal_lm(str(tmp_path), "fp32", None).eval()
    with torch.no_grad():
        torch.testing.assert_close(loaded(IDS[:, :5] % 50).logits, model(IDS[:, :5] % 50).logits)
    assert check_sequence_classifier(str(tmp_path), new_head=True)


def test_rows_beyond_learned_positions_are_refused_and_beyond_rotary_ones_warned_of(tmp_path, said):
    hf.GPT2Config(n_positions=32).save_pretrained(tmp_path / "gpt2")
    tiny_config(max_position_embeddings=64).save_pretrained(tmp_path / "rotary")
    require_length(str(tmp_path / "gpt2"), 32, "--max_seq_len")
    with pytest.raises(UserError, match=r"--max_seq_len of 33 tokens.*32 positions"):
        require_length(str(tmp_path / "gpt2"), 33, "--max_seq_len")
    hf.RobertaConfig(max_position_embeddings=40, pad_token_id=1).save_pretrained(
        tmp_path / "after padding"
    )
    require_length(str(tmp_path / "after padding"), 38, "--max_seq_len")
    with pytest.raises(UserError, match="39 tokens goes beyond the 38 positions"):
        require_length(str(tmp_path / "after padding"), 39, "--max_seq_len")
    folder = str(tmp_path / "rotary")
    require_length(folder, 64, "--max_seq_len")
    assert not said
    for _ in range(2):
        require_length(folder, 4 * 64, "--max_seq_len")
    assert said == [
        f"--max_seq_len of 256 tokens goes beyond the 64 positions of {folder}; it was not trained"
        " on longer rows: lower it"
    ]
    with pytest.raises(UserError, match="64 positions"):
        require_length(folder, 4 * 64 + 1, "--max_seq_len")


@pytest.fixture
def folder(tmp_path):
    LlamaForCausalLM(tiny_config()).save_pretrained(tmp_path)
    return tmp_path


def test_weights_are_compared_once_and_a_folder_without_any_is_refused_unless_settings_alone_count(
    folder, monkeypatch, said
):
    compared, read = [], AutoModelForCausalLM.from_pretrained
    monkeypatch.setattr(
        AutoModelForCausalLM,
        "from_pretrained",
        lambda *given, **more: compared.append(given) or read(*given, **more),
    )
    config = AutoConfig.from_pretrained(folder)
    for _ in range(2):
        assert check_weights(AutoModelForCausalLM, str(folder), config) == set()
    (folder / "model.safetensors").unlink()
    with settings_only():
        assert check_weights(AutoModelForCausalLM, str(folder), config) == set()
        assert check_weights(LlamaForSequenceClassification, str(folder), config) == set()
    assert compared == [(str(folder),)]
    assert said == [
        f"note: {folder} holds no weights, so they are not compared with its config.json"
    ]
    with pytest.raises(UserError, match="its weights cannot be read"):
        check_weights(AutoModelForCausalLM, str(folder), config)


# Rows for added tokens: the mean of the old ones


def test_new_rows_are_the_mean_and_old_logits_stay():
    torch.manual_seed(0)
    model = LlamaForCausalLM(tiny_config(vocab_size=10)).eval()
    table, head = (
        model.model.embed_tokens.weight.detach().clone(),
        model.lm_head.weight.detach().clone(),
    )
    with torch.no_grad():
        before = model(ROW).logits
        assert grow_vocabulary(model, 13)
        after = model(ROW).logits
    assert after.shape == (1, 4, 13)
    torch.testing.assert_close(after[..., :10], before)
    torch.testing.assert_close(after[..., 10:], before.mean(dim=-1, keepdim=True).expand(1, 4, 3))
    for weight, old in ((model.model.embed_tokens.weight, table), (model.lm_head.weight, head)):
        assert torch.equal(weight[:10], old)
        torch.testing.assert_close(weight[10:], (sum(old) / 10).expand(3, 32))
    assert (
        model.config.vocab_size
        == model.model.embed_tokens.num_embeddings
        == model.lm_head.out_features
        == 13
    )


def test_tied_weights_stay_one_parameter_and_the_bias_of_a_head_grows_too():
    model = LlamaForCausalLM(tiny_config(vocab_size=10, tie_word_embeddings=True))
    grow_vocabulary(model, 12)
    assert (
        model.lm_head.weight is model.model.embed_tokens.weight
        and model.lm_head.weight.shape == (12, 32)
    )
    config = hf.GPTJConfig(
        n_embd=16, n_layer=1, n_head=2, vocab_size=10, n_positions=8, rotary_dim=4
    )
    model = hf.GPTJForCausalLM(config)
    torch.nn.init.normal_(model.lm_head.bias)
    old = model.lm_head.bias.detach().clone()
    grow_vocabulary(model, 12)
    torch.testing.assert_close(model.lm_head.bias, torch.cat([old, old.mean().expand(2)]))


def test_a_model_with_other_weights_per_token_is_refused():
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    model = hf.BertLMHeadModel(hf.BertConfig(**sizes, vocab_size=50, is_decoder=True))
    with pytest.raises(
        UserError, match=r"--resize_vocabulary: BertLMHeadModel keeps a row.*cls\.predictions\.bias"
    ):
        grow_vocabulary(model, 52)


def test_models_are_loaded_with_rows_for_their_tokenizers(assets, tmp_path):
    """Actor and reference get the same rows; a reward model has only an embedding."""
    tokenizer = AutoTokenizer.from_pretrained(assets / "lm")
    added = tokenizer.add_tokens(["<tool>", "</tool>"])
    for name, kind in {"lm": LlamaForCausalLM, "reward": LlamaForSequenceClassification}.items():
        kind(tiny_config(vocab_size=len(tokenizer) - added, num_labels=1)).save_pretrained(
            tmp_path / name
        )
        tokenizer.save_pretrained(tmp_path / name)
    actor, reference = (
        load_causal_lm(str(tmp_path / "lm"), "bf16", None, ModelChanges(resize=True))
        for _ in range(2)
    )
    reward = load_sequence_classifier(
        str(tmp_path / "reward"), "bf16", None, new_head=False, changes=ModelChanges(resize=True)
    )
    for model in (actor, reference, reward):
        assert model.config.vocab_size == len(model.get_input_embeddings().weight) == len(tokenizer)
    assert torch.equal(actor.lm_head.weight, reference.lm_head.weight)
    assert torch.equal(actor.model.embed_tokens.weight, reference.model.embed_tokens.weight)
    assert (
        load_causal_lm(str(tmp_path / "lm"), "bf16", None).config.vocab_size
        == len(tokenizer) - added
    )


FLAG = "--critic_model_name_or_path"


@pytest.mark.parametrize(
    ("config", "kind", "reason"),
    [
        (
            hf.DistilBertConfig(num_labels=1),
            "DistilBertForSequenceClassification",
            "no causal language model for",
        ),
        (
            hf.BartConfig(num_labels=1),
            "BartForSequenceClassification",
            "Classification has no head named 'score'",
        ),
        (tiny_config(num_labels=3), "LlamaForSequenceClassification", "3 labels"),
    ],
)
def test_an_unusable_critic_is_refused_by_flag_and_folder_before_its_weights_are_read(
    config, kind, reason, tmp_path
):
    config.architectures = [kind]
    config.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no weights")  # reading it would be another error
    with pytest.raises(UserError, match=rf"^{FLAG} {tmp_path}: .*{reason}[^\n]*$"), naming(FLAG):
        check_sequence_classifier(str(tmp_path), new_head=True)


def test_decoders_with_or_without_a_head_pass_the_check_of_the_configuration(tmp_path):
    for kind in ("LlamaForSequenceClassification", "LlamaForCausalLM", None):
        tiny_config(num_labels=1, architectures=kind and [kind]).save_pretrained(tmp_path)
        check_classifier_config(load_config(str(tmp_path), FLAG), str(tmp_path))
    assert classifier_class(tiny_config()) is hf.LlamaForSequenceClassification


def test_other_decoders_get_a_class_with_the_head_over_the_backbone_and_are_loaded_again(tmp_path):
    config = hf.CodeGenConfig(
        vocab_size=60, n_positions=40, n_embd=32, n_layer=1, n_head=4, rotary_dim=4
    )
    kind = classifier_class(config)
    assert kind.__name__ == "CodeGenWithScalarHead"
    model = kind(config)
    assert model.score.weight.shape == (1, 32) and model.score.bias is None
    weights, backbone = (
        dict(model.named_parameters()),
        dict(hf.CodeGenForCausalLM(config).named_parameters()),
    )
    assert weights.keys() - {"score.weight"} == backbone.keys() - lm_head_names(config)
    model.save_pretrained(tmp_path)
    again = load_sequence_classifier(str(tmp_path), "fp32", None, new_head=False)
    assert torch.equal(again.score.weight, model.score.weight)


HAS_BITSANDBYTES = importlib.util.find_spec("bitsandbytes") is not None
FOUR = AdapterSettings(4, 8.0, 0.0, None, False, False, True, quantise=4)
EIGHT = AdapterSettings(4, 8.0, 0.0, "q_proj", False, False, True, quantise=8)


class Linear4bit(nn.Linear):
    """Stands in for bitsandbytes' class of this name: its weight is packed into integers."""

    def __init__(self, layer: nn.Linear):
        super().__init__(layer.in_features, layer.out_features, bias=layer.bias is not None)
        self.whole = layer.weight.detach()
        self.weight = nn.Parameter(
            torch.zeros(layer.weight.numel() // 2, 1, dtype=torch.uint8), requires_grad=False
        )

    def forward(self, x):
        return nn.functional.linear(x, self.whole)


def test_a_gpu_and_the_package_are_needed(monkeypatch):
    words = "--lora_dim 8 --load_in_8bit --only_optimize_lora"
    config = config_of("sft", *words.split())
    monkeypatch.setattr(adapter_settings_module.dist, "on_gpu", lambda: False)
    with pytest.raises(UserError, match=r"^--load_in_8bit needs a GPU, and this run has none"):
        adapter_settings(config)
    assert adapter_settings(config_of("sft")) is None
    assert adapter_settings(config, quantises=False).quantise == 0
    monkeypatch.setattr(adapter_settings_module.dist, "on_gpu", lambda: True)
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(
        UserError, match=r"^--load_in_8bit needs the package bitsandbytes: pip install -e \"\.\[q"
    ):
        adapter_settings(config)
    monkeypatch.setattr(extras, "find_spec", lambda name: SimpleNamespace(origin=name))
    assert adapter_settings(config).quantise == 8


def test_the_linear_layers_of_the_blocks_are_quantised_and_no_others():
    found = quantising_options(partial(new_model, "mixtral"), FOUR, torch.bfloat16, None)
    config = found["quantization_config"]
    assert (
        config.load_in_4bit
        and config.bnb_4bit_quant_type == "nf4"
        and config.bnb_4bit_use_double_quant
    )
    assert config.bnb_4bit_compute_dtype == torch.bfloat16
    assert config.bnb_4bit_quant_storage == torch.uint8, (
        "a floating format would be cast by DeepSpeed"
    )
    model = new_model("mixtral")
    linear = {name for name, layer in model.named_modules() if type(layer) is nn.Linear}
    assert (
        set(config.llm_int8_skip_modules) == linear - set(lora_targets(model, None)) == {"lm_head"}
    )
    assert list(found["device_map"]) == [""]


def test_8_bits_quantise_all_blocks_although_few_layers_have_lora():
    config = quantising_options(partial(new_model, "opt-350m"), EIGHT, torch.float16, None)[
        "quantization_config"
    ]
    assert config.load_in_8bit and not config.load_in_4bit
    assert sorted(config.llm_int8_skip_modules) == [
        "lm_head",
        "model.decoder.project_in",
        "model.decoder.project_out",
    ]


def test_nothing_is_quantised_unless_asked_and_never_under_zero_3():
    assert quantising_options(partial(new_model, "llama"), None, torch.float32, None) == {}
    assert quantising_options(partial(new_model, "llama"), LORA, torch.float32, None) == {}
    with pytest.raises(UserError, match=r"^--load_in_4bit needs ZeRO stage 0, 1 or 2"):
        quantising_options(
            partial(new_model, "llama"), FOUR, torch.float32, {"zero_optimization": {"stage": 3}}
        )


def test_the_arguments_reach_from_pretrained(assets, monkeypatch):
    seen, load = {}, AutoModelForCausalLM.from_pretrained

    def spy(folder, quantization_config=None, device_map=None, **others):
        if quantization_config is not None:
            seen.update(others, bits=quantization_config, device_map=device_map)
            device_map = None
        return load(folder, device_map=device_map, **others)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", spy)
    model = load_causal_lm(
        str(assets / "lm"), "bf16", {"zero_optimization": {"stage": 2}}, ModelChanges(adapter=FOUR)
    )
    assert (
        seen["bits"].load_in_4bit
        and seen["dtype"] == torch.bfloat16
        and list(seen["device_map"]) == [""]
    )
    assert len(adapter_layers(model)) == 14


def quantised_lm(folder):
    """A model whose block layers are packed, with an adapter; as if it were loaded from
    `folder`."""
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
    save_model(SimpleNamespace(module=PolicyModel(model)), tokenizer, tmp_path)
    assert (tmp_path / "adapter_config.json").exists() and not (
        tmp_path / "model.safetensors"
    ).exists()
    assert adapter_layers(load_causal_lm(str(tmp_path), "fp32", None)) == {}, (
        "merged into whole weights"
    )


@pytest.mark.skipif(
    not (torch.cuda.is_available() and HAS_BITSANDBYTES), reason="needs a GPU and bitsandbytes"
)
@pytest.mark.parametrize("settings", [FOUR, EIGHT])
def test_a_quantised_model_trains_on_a_gpu(assets, settings):
    model = load_causal_lm(
        str(assets / "lm"),
        "bf16",
        {"zero_optimization": {"stage": 2}},
        ModelChanges(adapter=settings),
    )
    kinds = {type(layer.get_base_layer()).__name__ for layer in adapter_layers(model).values()}
    assert kinds == {"Linear4bit" if settings.quantise == 4 else "Linear8bitLt"}
    ids = torch.randint(3, 300, (2, 9), device="cuda")
    model(input_ids=ids).logits.float().logsumexp(-1).sum().backward()
    assert all(weight.grad is not None for weight in model.parameters() if weight.requires_grad)
