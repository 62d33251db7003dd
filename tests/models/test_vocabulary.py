"""Rows for added tokens: the mean of the old ones, in embedding and head, tied or not."""

import pytest
import torch
from conftest import tiny_config
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertLMHeadModel,
    GPTJConfig,
    GPTJForCausalLM,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
)

from dschat_ppo.errors import UserError
from dschat_ppo.models.loading import grow_vocabulary, load_causal_lm, load_sequence_classifier

IDS = torch.tensor([[5, 9, 2, 4]])


def test_new_rows_are_the_mean_and_old_logits_stay():
    torch.manual_seed(0)
    model = LlamaForCausalLM(tiny_config(vocab_size=10)).eval()
    table, head = model.model.embed_tokens.weight.detach().clone(), model.lm_head.weight.detach().clone()
    with torch.no_grad():
        before = model(IDS).logits
        assert grow_vocabulary(model, 13)
        after = model(IDS).logits
    assert after.shape == (1, 4, 13)
    torch.testing.assert_close(after[..., :10], before)
    torch.testing.assert_close(after[..., 10:], before.mean(dim=-1, keepdim=True).expand(1, 4, 3))
    for weight, old in ((model.model.embed_tokens.weight, table), (model.lm_head.weight, head)):
        assert torch.equal(weight[:10], old)
        torch.testing.assert_close(weight[10:], (sum(old) / 10).expand(3, 32))
    assert model.config.vocab_size == model.model.embed_tokens.num_embeddings == model.lm_head.out_features == 13


def test_tied_weights_stay_one_parameter():
    model = LlamaForCausalLM(tiny_config(vocab_size=10, tie_word_embeddings=True))
    grow_vocabulary(model, 12)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.lm_head.weight.shape == (12, 32)


def test_the_bias_of_a_head_grows_too():
    model = GPTJForCausalLM(GPTJConfig(n_embd=16, n_layer=1, n_head=2, vocab_size=10, n_positions=8, rotary_dim=4))
    torch.nn.init.normal_(model.lm_head.bias)
    old = model.lm_head.bias.detach().clone()
    grow_vocabulary(model, 12)
    torch.testing.assert_close(model.lm_head.bias, torch.cat([old, old.mean().expand(2)]))


def test_a_model_with_other_weights_per_token_is_refused():
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = BertLMHeadModel(BertConfig(**sizes, vocab_size=50, is_decoder=True))
    with pytest.raises(UserError, match=r"--resize_vocabulary: BertLMHeadModel keeps a row.*cls\.predictions\.bias"):
        grow_vocabulary(model, 52)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_models_are_loaded_with_rows_for_their_tokenizers(assets, tmp_path, dtype):
    """Actor and reference get the same rows; a reward model has only an embedding."""
    tokenizer = AutoTokenizer.from_pretrained(assets / "lm")
    added = tokenizer.add_tokens(["<tool>", "</tool>"])
    for name, kind in {"lm": LlamaForCausalLM, "reward": LlamaForSequenceClassification}.items():
        kind(tiny_config(vocab_size=len(tokenizer) - added, num_labels=1)).save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    actor, reference = (load_causal_lm(str(tmp_path / "lm"), dtype, None, resize=True) for _ in range(2))
    reward = load_sequence_classifier(str(tmp_path / "reward"), dtype, None, new_head=False, resize=True)
    for model in (actor, reference, reward):
        assert model.config.vocab_size == len(model.get_input_embeddings().weight) == len(tokenizer)
    assert torch.equal(actor.lm_head.weight, reference.lm_head.weight)
    assert torch.equal(actor.model.embed_tokens.weight, reference.model.embed_tokens.weight)
    assert load_causal_lm(str(tmp_path / "lm"), dtype, None).config.vocab_size == len(tokenizer) - added
