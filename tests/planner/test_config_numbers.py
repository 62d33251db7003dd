"""Numbers of configurations, and models that the planner does not understand: one named error, never another."""

import copy
from types import SimpleNamespace

import pytest
import torch
import transformers
from every_architecture import ARCHITECTURES
from published_configs import PUBLISHED
from tiny_models import VOCABULARY
from transformers import LlamaConfig

from dschat_ppo.planner import model_parts
from dschat_ppo.planner import saved_activations as saved_activations_module
from dschat_ppo.planner.config_numbers import (
    NeedsDataError,
    PlanError,
    counting,
    head_size,
    number_of,
    required_number,
)
from dschat_ppo.planner.model_parts import parts_of
from dschat_ppo.planner.saved_activations import saved_activations

ODD = ("hidden_size", "num_attention_heads", "num_hidden_layers", "intermediate_size", "num_key_value_heads",
       "head_dim", "max_position_embeddings", "pad_token_id", "num_experts_per_tok")  # fmt: skip


def made_up(**settings):
    return SimpleNamespace(**settings)


def test_a_number_is_the_first_that_is_set():
    config = made_up(a=3, b=None, c=0, d=[2, None, 7], e=4)
    assert number_of(config, "a", "e") == 3
    assert number_of(config, "missing", "b", "c", "e") == 4
    assert number_of(config, "d") == 7  # of a number for each layer, the largest
    assert number_of(config, "b", "c", "missing") is None


@pytest.mark.parametrize("value", ["64", 2.5, -1, True, {"a": 1}, [3, "x"]])
def test_what_is_no_number_is_named(value):
    with pytest.raises(PlanError, match="SimpleNamespace: 'size' is .*no number"):
        number_of(made_up(size=value), "size")


def test_a_missing_number_is_named():
    with pytest.raises(PlanError, match="SimpleNamespace has no 'hidden_size', which the planner needs"):
        required_number(made_up(hidden_size=None), "hidden_size")


def test_the_size_of_a_head():
    assert head_size(made_up(head_dim=9, hidden_size=64, num_attention_heads=4)) == 9
    assert head_size(made_up(head_dim=None, hidden_size=64, num_attention_heads=4)) == 16


def test_a_setting_that_transformers_keeps_for_each_layer():
    class PerLayer:
        per_layer_attributes = frozenset({"head_dim"})
        per_layer_config = (made_up(head_dim=8), made_up(head_dim=16))

        @property
        def head_dim(self):
            raise RuntimeError("'head_dim' is a per-layer attribute")

    assert number_of(PerLayer(), "head_dim") == 16


def test_exceptions_of_a_library_are_quoted():
    with pytest.raises(PlanError, match="XConfig: a model without weights: KeyError: 'sizes'") as found, \
            counting("XConfig: a model without weights"):  # fmt: skip
        {}["sizes"]
    assert isinstance(found.value.__cause__, KeyError)
    with pytest.raises(PlanError, match="^no size$"), counting("outside"):
        raise PlanError("no size")


@pytest.mark.parametrize("read", [lambda x: x.item(), lambda x: x.tolist(), torch.nonzero])
def test_operators_that_need_data(read):
    with pytest.raises(NeedsDataError, match="^a pass: "), counting("a pass"):
        read(torch.zeros(1, device="meta"))


def test_other_operators_that_fail_need_no_data():
    with pytest.raises(PlanError) as found, counting("a pass"):
        torch.zeros(2, 3, device="meta") @ torch.zeros(2, 3, device="meta")
    assert type(found.value) is PlanError and isinstance(found.value.__cause__, RuntimeError)


def mutilated(config, name, value=None):
    """A configuration with an odd value of a setting, which transformers does not see when it is set."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    vars(text)[text.attribute_map.get(name, name)] = value
    return config


def planned(config):
    """Whether the planner counts a model; any exception but its own fails the test."""
    try:
        assert parts_of(config, "bf16", scalar=False).total > 0
    except PlanError as problem:
        assert str(problem)
        return False
    return True


@pytest.mark.parametrize("name", list(PUBLISHED))
def test_published_models_are_planned_and_no_mutilated_one_ends_a_run(name):
    config, _ = PUBLISHED[name]
    assert planned(config)
    for setting in ODD[:3]:
        assert not planned(mutilated(config, setting)), setting


@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_no_mutilated_architecture_ends_a_run(name):
    kind, settings = ARCHITECTURES[name]
    config = getattr(transformers, kind)(**{"vocab_size": VOCABULARY, "pad_token_id": 0, **settings})
    assert planned(config)
    for setting in ODD:
        planned(mutilated(config, setting))
        planned(mutilated(config, setting, "many"))


TEXT = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}  # fmt: skip


@pytest.mark.parametrize(("kind", "settings"), [
    # no setting pad_token_id
    ("CodeGenConfig", {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4}),
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
    assert len(parts.layers) == 2 and parts.hidden == 32 and parts.heads == 2 * 4 * 8


def llama(**settings):
    return LlamaConfig(**{**TEXT, "max_position_embeddings": 64, **settings})


NO_DATA = RuntimeError("Tensor.item() cannot be called on meta tensors")
MISTAKES = (RuntimeError("sizes do not match"), AttributeError("no attribute 'layerz'"), TypeError("bad"))


def raising(problem):
    def fail(*_, **__):
        raise problem

    return fail


def test_keys_and_values_are_estimated_only_where_the_pass_needs_data(monkeypatch):
    counted = parts_of(llama(), "bf16", scalar=False).kv_bytes
    for vocabulary, problem in enumerate([NO_DATA, *MISTAKES], VOCABULARY + 1):
        monkeypatch.setattr(model_parts, "bytes_per_token", raising(problem))
        if problem is NO_DATA:
            assert parts_of(llama(vocab_size=vocabulary), "bf16", scalar=False).kv_bytes == counted
        else:
            with pytest.raises(PlanError, match="LlamaForCausalLM: its keys and values: "):
                parts_of(llama(vocab_size=vocabulary), "bf16", scalar=False)


def test_activations_are_estimated_only_where_the_pass_needs_data(monkeypatch):
    with torch.device("meta"):
        model = transformers.LlamaModel(llama())
    for problem in (NO_DATA, *MISTAKES):
        monkeypatch.setattr(model, "forward", raising(problem))
        if problem is NO_DATA:
            assert not saved_activations(model).counted
        else:
            with pytest.raises(PlanError, match="LlamaConfig: its forward pass without weights: "):
                saved_activations(model)
        assert "warn_if_padding_and_no_attention_mask" not in vars(model)


def test_mistakes_of_the_planner_itself_stay_what_they_are(monkeypatch):
    with torch.device("meta"):
        model = transformers.LlamaModel(llama())
    monkeypatch.setattr(saved_activations_module, "_note", raising(AttributeError("ours")))
    with pytest.raises(AttributeError, match="ours"):
        saved_activations(model)


def test_a_model_without_a_head_is_named(monkeypatch):
    monkeypatch.setattr(transformers.LlamaForCausalLM, "get_output_embeddings", lambda self: None)
    with pytest.raises(PlanError, match="LlamaForCausalLM: its embedding and head: 'NoneType'"):
        parts_of(llama(vocab_size=VOCABULARY + 99), "bf16", scalar=False)
