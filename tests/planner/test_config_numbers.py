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

from dschat_ppo.planner import model_parts, saved_activations
from dschat_ppo.planner.config_numbers import (
    PlanError,
    counting,
    head_size,
    needs_data,
    number_of,
    required_number,
)
from dschat_ppo.planner.model_parts import parts_of

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


def test_operators_that_need_data():
    for read in (lambda x: x.item(), lambda x: x.tolist(), torch.nonzero):
        with pytest.raises(RuntimeError) as found:
            read(torch.zeros(1, device="meta"))
        assert needs_data(found.value)
    assert not needs_data(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))


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


@pytest.mark.parametrize(("module", "name"), [(saved_activations, "_run"), (model_parts, "bytes_per_token")])
def test_a_failing_pass_is_no_plan_and_one_without_data_an_estimate(monkeypatch, module, name):
    def failing(problem):
        def fail(*_):
            raise problem

        monkeypatch.setattr(module, name, fail)
        model_parts._parts_of.cache_clear()
        return parts_of(llama(), "bf16", scalar=False)

    whole = parts_of(llama(), "bf16", scalar=False)
    estimated = failing(RuntimeError("Tensor.item() cannot be called on meta tensors"))
    assert estimated.kv_bytes == whole.kv_bytes and estimated.saved.counted == (module is model_parts)
    for problem in (RuntimeError("sizes do not match"), AttributeError("no attribute 'layerz'"), TypeError("bad")):
        with pytest.raises(PlanError, match="Llama.*without weights: |Llama.*its keys and values: "):
            failing(problem)
    model_parts._parts_of.cache_clear()


def test_a_model_without_a_head_is_named(monkeypatch):
    monkeypatch.setattr(transformers.LlamaForCausalLM, "get_output_embeddings", lambda self: None)
    with pytest.raises(PlanError, match="LlamaForCausalLM: its embedding and head: 'NoneType'"):
        parts_of(llama(vocab_size=VOCABULARY + 1), "bf16", scalar=False)
