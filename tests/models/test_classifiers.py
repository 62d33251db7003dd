"""Reward models and critics: causal, with one label and a head `score`, or refused before any weight is read."""

import pytest
import torch
import transformers as hf
from conftest import tiny_config

from dschat_ppo.errors import UserError
from dschat_ppo.models.architectures import check_classifier_config, classifier_class, lm_head_names
from dschat_ppo.models.loading import check_sequence_classifier, load_config, load_sequence_classifier
from dschat_ppo.run.session import naming

FLAG = "--critic_model_name_or_path"


@pytest.mark.parametrize(("config", "kind", "reason"), [
    (hf.DistilBertConfig(num_labels=1), "DistilBertForSequenceClassification", "no causal language model for"),
    (hf.BartConfig(num_labels=1), "BartForSequenceClassification", "Classification has no head named 'score'"),
    (tiny_config(num_labels=3), "LlamaForSequenceClassification", "3 labels"),
])  # fmt: skip
def test_an_unusable_critic_is_refused_by_flag_and_folder_before_its_weights_are_read(config, kind, reason, tmp_path):
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
    config = hf.CodeGenConfig(vocab_size=60, n_positions=40, n_embd=32, n_layer=1, n_head=4, rotary_dim=4)
    kind = classifier_class(config)
    assert kind.__name__ == "CodeGenWithScalarHead"
    model = kind(config)
    assert model.score.weight.shape == (1, 32) and model.score.bias is None
    weights, backbone = dict(model.named_parameters()), dict(hf.CodeGenForCausalLM(config).named_parameters())
    assert weights.keys() - {"score.weight"} == backbone.keys() - lm_head_names(config)
    model.save_pretrained(tmp_path)
    again = load_sequence_classifier(str(tmp_path), "fp32", None, new_head=False)
    assert torch.equal(again.score.weight, model.score.weight)
