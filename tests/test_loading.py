"""Loading is strict: heads, layouts, missing and unexpected weights."""

import logging

import pytest
import torch
from conftest import tiny_config
from transformers import (
    AutoTokenizer,
    GPT2Config,
    GPT2ForSequenceClassification,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
)

from dschat_ppo.common.logging import logger
from dschat_ppo.errors import UserError
from dschat_ppo.models.forward import last_token_scores
from dschat_ppo.models.loading import check_vocabulary, load_causal_lm, load_config, load_sequence_classifier
from dschat_ppo.models.scalar_head import ScalarModel

IDS = torch.tensor([[5, 9, 17, 4, 1, 0, 0], [8, 30, 2, 7, 60, 9, 1]])
MASK = torch.tensor([[1, 1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1, 1]])


@pytest.fixture
def said():
    """Messages logged while the test runs."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger().addHandler(handler)
    yield lines
    logger().removeHandler(handler)


def scores_of(folder, new_head=False):
    model = ScalarModel(load_sequence_classifier(str(folder), "fp32", None, new_head)).eval()
    with torch.no_grad():
        return last_token_scores(model, IDS, MASK)


def expected_scores(model):
    """Row by row without padding, by transformers alone."""
    with torch.no_grad():
        return torch.cat([model(ids[mask.bool()].unsqueeze(0)).logits[0] for ids, mask in zip(IDS, MASK, strict=True)])


def test_public_reward_model_scores_as_in_transformers(assets):
    model = LlamaForSequenceClassification.from_pretrained(assets / "reward").eval()
    torch.testing.assert_close(scores_of(assets / "reward"), expected_scores(model), rtol=0, atol=1e-5)


def test_learned_absolute_positions_and_another_architecture(tmp_path):
    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32, "vocab_size": 100, "initializer_range": 0.5}
    model = GPT2ForSequenceClassification(GPT2Config(**sizes, num_labels=1, pad_token_id=None)).eval()
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(scores_of(tmp_path), expected_scores(model), rtol=0, atol=1e-5)


def test_left_padding_gives_the_same_scores(assets):
    model = ScalarModel(load_sequence_classifier(str(assets / "reward"), "fp32", None, False)).eval()
    left_ids, left_mask = IDS.roll(2, dims=1), MASK.roll(2, dims=1)
    with torch.no_grad():
        right = last_token_scores(model, IDS, MASK)[:1]
        left = last_token_scores(model, left_ids, left_mask)[:1]
    torch.testing.assert_close(left, right, rtol=0, atol=1e-5)


@pytest.mark.parametrize("safe", [False, True])
def test_deepspeed_chat_layout_loads(assets, tmp_path, safe):
    from safetensors.torch import save_file

    model = LlamaForSequenceClassification.from_pretrained(assets / "reward").eval()
    weights = {
        k.replace("model.", "rwtransformer.", 1): v.clone() for k, v in model.model.state_dict(prefix="model.").items()
    }
    weights["v_head.weight"] = model.score.weight.detach().clone()
    config = tiny_config(architectures=["LlamaModel"])
    config.save_pretrained(tmp_path)
    if safe:
        save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    else:
        torch.save(weights, tmp_path / "pytorch_model.bin")
    torch.testing.assert_close(scores_of(tmp_path), expected_scores(model), rtol=0, atol=1e-5)


def test_base_model_gets_a_new_head_and_says_so(assets, said):
    load_sequence_classifier(str(assets / "lm"), "fp32", None, new_head=True)
    assert any("no scalar head" in line and "new one" in line for line in said)


def test_labelled_model_does_not_say_that_its_head_is_new(assets, said):
    load_sequence_classifier(str(assets / "reward"), "fp32", None, new_head=True)
    assert not any("head" in line for line in said)


def test_reward_model_without_head_is_refused_where_a_trained_one_is_needed(assets):
    with pytest.raises(UserError, match="no trained scalar head"):
        load_sequence_classifier(str(assets / "lm"), "fp32", None, new_head=False)


def test_several_labels_are_refused(tmp_path):
    LlamaForSequenceClassification(tiny_config(num_labels=3)).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="3 labels"):
        load_sequence_classifier(str(tmp_path), "fp32", None, new_head=True)


def damaged(folder, change):
    """A saved tiny model whose weights went through `change(dict)`."""
    from safetensors.torch import load_file, save_file

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
    from transformers import GPT2LMHeadModel

    GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=50)).save_pretrained(tmp_path)
    rates = {m.p for m in load_causal_lm(str(tmp_path), "fp32", None, 0.0).modules() if isinstance(m, torch.nn.Dropout)}
    assert rates == {0.0}
    rates = {m.p for m in load_causal_lm(str(tmp_path), "fp32", None).modules() if isinstance(m, torch.nn.Dropout)}
    assert rates == {0.1}


def test_vocabulary_that_does_not_fit_is_refused(assets):
    tokenizer = AutoTokenizer.from_pretrained(assets / "lm")
    small = tiny_config(vocab_size=100)
    with pytest.raises(UserError, match=r"--critic_model_name_or_path.*vocabulary of 100"):
        check_vocabulary(tokenizer, small, "--critic_model_name_or_path", "folder", other=True)
    check_vocabulary(tokenizer, load_config(str(assets / "reward"), "f"), "f", str(assets / "reward"), other=True)
