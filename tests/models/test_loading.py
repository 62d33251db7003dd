"""Loading is strict: heads, layouts, missing and unexpected weights. What is compared again."""

import json
import sys

import pytest
import torch
import transformers as hf
from conftest import tiny_config
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    CodeGenConfig,
    CodeGenForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    GPTJConfig,
    GPTJForCausalLM,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    Qwen2Config,
)

from dschat_ppo.errors import UserError
from dschat_ppo.models import loading
from dschat_ppo.models.loading import (
    check_causal_lm,
    check_sequence_classifier,
    check_vocabulary,
    check_weights,
    load_causal_lm,
    load_config,
    load_sequence_classifier,
    report_length,
    require_length,
)
from dschat_ppo.models.model_files import settings_only
from dschat_ppo.models.scalar_model import ScalarModel
from dschat_ppo.models.tokenizers import load_tokenizer
from dschat_ppo.tools import addition

IDS = torch.tensor([[5, 9, 17, 4, 1, 0, 0], [8, 30, 2, 7, 60, 9, 1]])
LENGTHS = torch.tensor([5, 7])


def scores_of(folder, new_head=False):
    model = ScalarModel(load_sequence_classifier(str(folder), "fp32", None, new_head)).eval()
    with torch.no_grad():
        return model(IDS, LENGTHS, last_only=True)


def expected_scores(model):
    """Scores of each row without padding, by transformers alone."""
    with torch.no_grad():
        return torch.cat([model(ids[:n].unsqueeze(0)).logits[0] for ids, n in zip(IDS, LENGTHS, strict=True)])


def test_public_reward_model_scores_as_in_transformers(assets):
    model = LlamaForSequenceClassification.from_pretrained(assets / "reward").eval()
    torch.testing.assert_close(scores_of(assets / "reward"), expected_scores(model), rtol=0, atol=1e-5)


def test_learned_absolute_positions_and_another_architecture(tmp_path):
    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32, "vocab_size": 100, "initializer_range": 0.5}
    model = GPT2ForSequenceClassification(GPT2Config(**sizes, num_labels=1, pad_token_id=None)).eval()
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(scores_of(tmp_path), expected_scores(model), rtol=0, atol=1e-5)


def test_bidirectional_attention_is_refused(tmp_path):
    Gemma3TextConfig(use_bidirectional_attention=True).save_pretrained(tmp_path)
    for check in (check_causal_lm, lambda folder: check_sequence_classifier(folder, new_head=True)):
        with pytest.raises(UserError, match="use_bidirectional_attention"):
            check(str(tmp_path))


def test_code_in_a_model_folder_is_never_run(tmp_path, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda question: "y")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
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
    settings.write_text(json.dumps({"model_type": "vit", "auto_map": {"AutoModelForCausalLM": "own.Own"}}))
    with pytest.raises(UserError, match="no causal language model for ViTConfig"):
        load_causal_lm(str(tmp_path), "fp32", None)
    assert not (tmp_path / "was run").exists()


def write_deepspeed_chat(model, folder, safe):
    """The weights of a sequence classifier under the names that DeepSpeed-Chat gives them."""
    weights = {f"rwtransformer.{name}": value.clone() for name, value in model.model.state_dict().items()}
    weights["v_head.weight"] = model.score.weight.detach().clone()
    tiny_config(architectures=["LlamaModel"]).save_pretrained(folder)
    if safe:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    else:
        torch.save(weights, folder / "pytorch_model.bin")


@pytest.mark.parametrize("safe", [False, True])
def test_deepspeed_chat_layout_loads(assets, tmp_path, safe):
    model = LlamaForSequenceClassification.from_pretrained(assets / "reward").eval()
    write_deepspeed_chat(model, tmp_path, safe)
    torch.testing.assert_close(scores_of(tmp_path), expected_scores(model), rtol=0, atol=1e-5)


def test_a_model_without_head_is_refused_where_a_trained_head_is_needed(assets):
    with pytest.raises(UserError, match="no trained scalar head"):
        load_sequence_classifier(str(assets / "lm"), "fp32", None, new_head=False)


def test_a_reward_model_is_refused_where_a_language_model_is_needed(assets, tmp_path):
    with pytest.raises(UserError, match=r"reward: is a reward model.* \(score.weight\).*give a causal language model"):
        check_causal_lm(str(assets / "reward"))
    other = damaged(tmp_path / "other", lambda weights: weights.update({"v_head.weight": torch.zeros(1, 32)}))
    with pytest.raises(UserError, match=r"other: is a reward model.* \(v_head.weight\)"):
        check_causal_lm(str(other))


def damaged(folder, change):
    """The folder of a tiny model whose saved weights `change(dict)` has modified."""
    LlamaForCausalLM(tiny_config()).save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def test_missing_weights_are_listed(tmp_path):
    folder = damaged(tmp_path, lambda weights: weights.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(UserError, match=r"missing: model\.layers\.1\.mlp\.up_proj\.weight"):
        load_causal_lm(folder, "fp32", None)


def test_unexpected_weights_are_listed(tmp_path):
    folder = damaged(tmp_path, lambda weights: weights.update({"model.extra.weight": torch.zeros(2)}))
    with pytest.raises(UserError, match=r"unexpected: model\.extra\.weight"):
        load_causal_lm(folder, "fp32", None)


def test_wrong_shapes_are_listed(tmp_path):
    folder = damaged(tmp_path, lambda weights: weights.update({"model.norm.weight": torch.zeros(5)}))
    with pytest.raises(UserError, match=r"wrong shape: model\.norm\.weight"):
        load_causal_lm(folder, "fp32", None)


def test_dropout_override_reaches_the_model(tmp_path):
    GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=50)).save_pretrained(tmp_path)
    rates = {m.p for m in load_causal_lm(str(tmp_path), "fp32", None, 0.0).modules() if isinstance(m, torch.nn.Dropout)}
    assert rates == {0.0}
    rates = {m.p for m in load_causal_lm(str(tmp_path), "fp32", None).modules() if isinstance(m, torch.nn.Dropout)}
    assert rates == {0.1}


_SIZES = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "vocab_size": 50, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
_GPT_NEO = {"num_layers": 2, "num_heads": 2, "attention_types": [[["global", "local"], 1]]}
WITH_NOISE = {
    "seed-oss": hf.SeedOssConfig(**_SIZES, head_dim=8, residual_dropout=0.5, attention_dropout=0.5),
    "starcoder2": hf.Starcoder2Config(**_SIZES, residual_dropout=0.5, embedding_dropout=0.5),
    "gpt-neo": hf.GPTNeoConfig(hidden_size=16, vocab_size=50, resid_dropout=0.5, embed_dropout=0.5, **_GPT_NEO),
    "opt": hf.OPTConfig(
        hidden_size=16, ffn_dim=24, num_hidden_layers=2, num_attention_heads=2, word_embed_proj_dim=16, vocab_size=50,
        dropout=0.5, layerdrop=0.9,
    ),
    "gemma3": hf.Gemma3Config(
        text_config={**_SIZES, "head_dim": 8, "attention_dropout": 0.5},
        vision_config={"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
                       "image_size": 28},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WITH_NOISE)
def test_without_dropout_training_gives_the_numbers_of_evaluation(tmp_path, name):
    config = WITH_NOISE[name]
    kind = hf.Gemma3ForConditionalGeneration if name == "gemma3" else hf.AutoModelForCausalLM
    torch.manual_seed(0)
    (kind(config) if name == "gemma3" else kind.from_config(config)).save_pretrained(tmp_path)
    ids = torch.arange(3, 15).view(1, 12)

    def logits(dropout: float | None, training: bool) -> torch.Tensor:
        model = load_causal_lm(str(tmp_path), "fp32", None, dropout).train(training)
        return model(input_ids=ids).logits

    assert torch.equal(logits(0.0, training=True), logits(None, training=False))
    assert not torch.equal(logits(None, training=True), logits(None, training=False)), "the model has no dropout"


@pytest.mark.parametrize("config", [GPT2Config(), Qwen2Config()])
def test_a_folder_without_tokenizer_is_named(tmp_path, config):
    """transformers makes an empty tokenizer of the model's kind."""
    config.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="--model_name_or_path .*has no tokenizer"):
        load_tokenizer(str(tmp_path), "--model_name_or_path")


@pytest.mark.parametrize("settings", [{}, {"unk_token": "[UNK]"}])
def test_a_tokenizer_without_unknown_token_is_loaded(tmp_path, settings):
    """It refuses a text of other words than its own, as that of the addition task does."""
    addition.make_tokenizer().save_pretrained(tmp_path)
    file = tmp_path / "tokenizer.json"
    content = json.loads(file.read_text())
    content["model"] |= settings
    file.write_text(json.dumps(content))
    tokenizer = load_tokenizer(str(tmp_path), "--model")
    assert tokenizer.decode(tokenizer.encode("12+34=")) == "12+34="


def test_a_tokenizer_that_cannot_encode_its_own_words_is_refused(tmp_path):
    """Every word of the vocabulary becomes another one before it is looked up."""
    addition.make_tokenizer().save_pretrained(tmp_path)
    file = tmp_path / "tokenizer.json"
    content = json.loads(file.read_text())
    content["normalizer"] = {"type": "Prepend", "prepend": "x"}
    file.write_text(json.dumps(content))
    with pytest.raises(UserError, match="--model .*it has no tokenizer, or one that cannot be loaded"):
        load_tokenizer(str(tmp_path), "--model")


def test_vocabulary_that_does_not_fit_is_refused(assets):
    tokenizer = AutoTokenizer.from_pretrained(assets / "lm")
    small = tiny_config(vocab_size=100)
    with pytest.raises(UserError, match=r"--critic_model_name_or_path.*vocabulary of 100.*--resize_vocabulary"):
        check_vocabulary(tokenizer, small, "--critic_model_name_or_path", "folder", other=True)
    check_vocabulary(tokenizer, small, "--model_name_or_path", "folder", resize=True)
    check_vocabulary(tokenizer, load_config(str(assets / "reward"), "f"), "f", str(assets / "reward"), other=True)


_GPT = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 50, "n_positions": 8}
_NEO = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 50, "attention_types": [[["global"], 1]]}
_MASK, _MASKED, _FREQUENCIES = torch.ones(1, 1, 8, 8).tril().bool(), torch.tensor(-1e4), torch.ones(4)
OLD_FILES = {
    "gpt2": (GPT2LMHeadModel, GPT2Config(**_GPT), {"h.0.attn.bias": _MASK, "h.0.attn.masked_bias": _MASKED}),
    "gptj": (
        GPTJForCausalLM, GPTJConfig(**_GPT, rotary_dim=4),
        {"transformer.h.0.attn.bias": _MASK, "transformer.h.0.attn.masked_bias": _MASKED},
    ),
    "gpt_neo": (
        GPTNeoForCausalLM, GPTNeoConfig(**_NEO),
        {"transformer.h.0.attn.attention.bias": _MASK, "transformer.h.0.attn.attention.masked_bias": _MASKED},
    ),
    "gpt_neox": (
        GPTNeoXForCausalLM,
        GPTNeoXConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=50, intermediate_size=32),
        {
            "gpt_neox.layers.0.attention.bias": _MASK, "gpt_neox.layers.0.attention.masked_bias": _MASKED,
            "gpt_neox.layers.0.attention.rotary_emb.inv_freq": _FREQUENCIES,
        },
    ),
    "codegen": (
        CodeGenForCausalLM, CodeGenConfig(**{**_GPT, "n_head": 4}, rotary_dim=4),
        {"transformer.h.0.attn.causal_mask": _MASK},
    ),
    "llama": (LlamaForCausalLM, tiny_config(), {"model.layers.0.self_attn.rotary_emb.inv_freq": _FREQUENCIES}),
}  # fmt: skip


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("name", list(OLD_FILES))
def test_buffers_in_old_files_are_ignored(tmp_path, name, safe):
    kind, config, buffers = OLD_FILES[name]
    model = kind(config).eval()
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file) | buffers
    if safe:
        save_file(weights, file, metadata={"format": "pt"})
    else:
        file.unlink()
        torch.save(weights, tmp_path / "pytorch_model.bin")
    loaded = load_causal_lm(str(tmp_path), "fp32", None).eval()
    with torch.no_grad():
        torch.testing.assert_close(loaded(IDS[:, :5] % 50).logits, model(IDS[:, :5] % 50).logits)
    assert check_sequence_classifier(str(tmp_path), new_head=True)


def test_a_tokenizer_model_alone_asks_for_sentencepiece(tmp_path, monkeypatch):
    tiny_config().save_pretrained(tmp_path)
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>\x15\x00\x00\x00\x00\x18\x02")
    with pytest.raises(UserError, match=r'--model .*pip install -e "\.\[sentencepiece\]"'):
        load_tokenizer(str(tmp_path), "--model")
    (tmp_path / "tokenizer.model").write_text("IQ== 0\nIg== 1\n")  # a file of tiktoken
    with pytest.raises(UserError, match="tokenizer") as raised:
        load_tokenizer(str(tmp_path), "--model")
    assert "sentencepiece" not in str(raised.value)


@pytest.mark.parametrize("load", [load_causal_lm, lambda *a: load_sequence_classifier(*a, new_head=True)])
def test_truncated_weights_are_named(tmp_path, load):
    LlamaForCausalLM(tiny_config()).save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(UserError, match="read"):
        load(str(tmp_path), "fp32", None)


def test_rows_beyond_learned_positions_are_refused_and_beyond_rotary_ones_warned_about(tmp_path, said):
    GPT2Config(n_positions=32).save_pretrained(tmp_path / "gpt2")
    tiny_config().save_pretrained(tmp_path / "llama")
    require_length(str(tmp_path / "gpt2"), 32, "--max_seq_len")
    with pytest.raises(UserError, match="--max_seq_len of 33 tokens.*32 positions"):
        require_length(str(tmp_path / "gpt2"), 33, "--max_seq_len")
    for length in (128, 129):
        require_length(str(tmp_path / "llama"), length, "--max_seq_len")
        report_length([str(tmp_path / "llama")], length, "--max_seq_len", is_default=False)
    assert len(said) == 1
    assert "129 tokens" in said[0]
    with pytest.raises(UserError, match="128 positions"):
        require_length(str(tmp_path / "llama"), 513, "--max_seq_len")


def test_a_default_length_beyond_the_positions_of_models_is_one_note(tmp_path, said):
    for name, positions in (("long", 256), ("short", 64), ("middle", 128)):
        tiny_config(max_position_embeddings=positions).save_pretrained(tmp_path / name)
    folders = [str(tmp_path / name) for name in ("long", "short", "middle")]
    report_length(folders, 200, "--max_seq_len", is_default=True)
    [line] = said
    assert line.startswith("note: --max_seq_len: the default of 200 tokens") and f"64 positions of {folders[1]}" in line
    report_length(folders, 64, "--max_seq_len", is_default=False)
    assert len(said) == 1
    report_length(folders, 65, "--max_seq_len", is_default=False)
    assert said[1].startswith("--max_seq_len of 65 tokens goes beyond the 64 positions") and "not trained" in said[1]
    require_length(folders[1], 65, "--max_seq_len")
    assert len(said) == 2


@pytest.fixture
def folder(tmp_path):
    LlamaForCausalLM(tiny_config()).save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def compared(monkeypatch):
    """The classes whose models were compared."""
    found, compare = [], loading._compare
    monkeypatch.setattr(loading, "_compare", lambda kind, *rest: found.append(kind) or compare(kind, *rest))
    return found


def change(folder, **added):
    file = folder / "model.safetensors"
    save_file(load_file(file) | added, file, metadata={"format": "pt"})


def test_a_model_that_fits_is_compared_once(folder, compared):
    for _ in range(3):
        config = AutoConfig.from_pretrained(folder)
        assert check_weights(AutoModelForCausalLM, str(folder), config) == set()
    assert compared == [AutoModelForCausalLM]


def test_a_folder_without_weights_is_refused_unless_settings_alone_count(folder, compared, said):
    (folder / "model.safetensors").unlink()
    config = AutoConfig.from_pretrained(folder)
    with settings_only():
        assert check_weights(AutoModelForCausalLM, str(folder), config) == set()
        assert check_weights(LlamaForSequenceClassification, str(folder), config) == set()
    assert compared == []
    assert said == [f"note: {folder} holds no weights, so they are not compared with its config.json"]
    with pytest.raises(UserError, match="its weights cannot be read"):
        check_weights(AutoModelForCausalLM, str(folder), config)
