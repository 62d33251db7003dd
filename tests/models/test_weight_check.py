"""Weights of a checkpoint against those of its model: what is compared again, and what is not."""

import pytest
import torch
from conftest import tiny_config
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM, LlamaForSequenceClassification

from dschat_ppo.errors import UserError
from dschat_ppo.models import weight_check
from dschat_ppo.models.model_files import settings_only
from dschat_ppo.models.weight_check import check_weights


@pytest.fixture
def folder(tmp_path):
    LlamaForCausalLM(tiny_config()).save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def compared(monkeypatch):
    """The classes whose models were compared."""
    found, compare = [], weight_check._compare
    monkeypatch.setattr(weight_check, "_compare", lambda kind, *rest: found.append(kind) or compare(kind, *rest))
    return found


def change(folder, **added):
    file = folder / "model.safetensors"
    save_file(load_file(file) | added, file, metadata={"format": "pt"})


def test_a_model_that_fits_is_compared_once(folder, compared):
    for _ in range(3):
        config = AutoConfig.from_pretrained(folder)
        assert check_weights(AutoModelForCausalLM, str(folder), config) == set()
    assert compared == [AutoModelForCausalLM]


def test_another_class_or_config_is_another_comparison(folder, compared):
    config = AutoConfig.from_pretrained(folder, num_labels=1)
    check_weights(LlamaForCausalLM, str(folder), config)
    head = {"score.weight"}
    assert check_weights(LlamaForSequenceClassification, str(folder), config, None, head, {"lm_head.weight"}) == head
    config.hidden_act = "gelu"
    check_weights(LlamaForCausalLM, str(folder), config)
    assert compared == [LlamaForCausalLM, LlamaForSequenceClassification, LlamaForCausalLM]


def test_changed_files_are_compared_again(folder, compared):
    config = AutoConfig.from_pretrained(folder)
    check_weights(AutoModelForCausalLM, str(folder), config)
    change(folder, extra=torch.zeros(2))
    with pytest.raises(UserError, match="unexpected: extra"):
        check_weights(AutoModelForCausalLM, str(folder), config)
    assert len(compared) == 2


def test_a_model_that_does_not_fit_is_refused_each_time(folder):
    config = AutoConfig.from_pretrained(folder)
    config.intermediate_size += 1
    for _ in range(2):
        with pytest.raises(UserError, match="wrong shape: model.layers.0.mlp.down_proj.weight, "):
            check_weights(AutoModelForCausalLM, str(folder), config)


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


def test_weights_that_are_there_are_compared_also_where_settings_alone_count(folder):
    change(folder, **{"model.other.weight": torch.zeros(1)})
    with settings_only(), pytest.raises(UserError, match="unexpected: model.other.weight"):
        check_weights(AutoModelForCausalLM, str(folder), AutoConfig.from_pretrained(folder))
