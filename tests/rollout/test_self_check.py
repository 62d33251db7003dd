"""The self-check at the start of a run: correct engines pass, wrong ones do not."""

import logging
from dataclasses import replace
from functools import partial

import pytest
import torch
from tiny_models import HYBRIDS, model_of, new_model

from dschat_ppo.errors import NonFiniteError, UserError
from dschat_ppo.rollout import attention, continuous_batching, generator
from dschat_ppo.rollout.generator import (
    ENGINES,
    HALF_TOLERANCE,
    GenerationConfig,
    check_engine,
    choose_engine,
)
from dschat_ppo.rollout.kv_cache import DecodeMetadata
from dschat_ppo.rollout.sampling import SamplingParameters, StoppingCriteria

HOW = GenerationConfig(SamplingParameters(0.7, top_p=0.9), StoppingCriteria(50, eos_ids=(3,)), samples=3, rows=5)


def warnings_of(caplog) -> list[str]:
    ours = [record for record in caplog.records if record.name.startswith("dschat_ppo")]
    return [record.getMessage() for record in ours if record.levelno == logging.WARNING]


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "mistral-window"])
def test_continuous_batching_is_kept_if_it_is_right(name, caplog):
    caplog.set_level(logging.INFO)
    assert choose_engine(model_of(name), HOW) == HOW
    assert not warnings_of(caplog)
    assert "continuous batching agrees with" in caplog.text


@pytest.mark.parametrize("name", ["bloom", "falcon", "gpt-neo", "gptj", "gpt-oss"])
def test_other_models_get_padded_batches_and_a_warning(name, caplog):
    model = model_of(name)
    assert choose_engine(model, HOW) == replace(HOW, engine="padded")
    (warning,) = warnings_of(caplog)
    assert type(model).__name__ in warning
    assert "padded" in warning


@pytest.mark.parametrize(("name", "word"), [("phimoe", "mask alone"), ("phi3-longrope", "longest row")])
def test_reasons_that_short_prompts_would_not_show_are_found_in_the_configuration(name, word):
    """Phimoe's window is in its mask only, and longer than every prompt of the check."""
    found = check_engine(model_of(name), HOW, "continuous")
    assert word in found.unsupported
    assert not found.passes(1.0)


def test_a_model_with_few_positions_is_checked_within_them():
    assert choose_engine(new_model("gpt2", n_positions=20), HOW) == HOW


def test_sinks_are_named_in_the_warning(caplog):
    choose_engine(model_of("gpt-oss"), HOW)
    assert "sinks" in warnings_of(caplog)[0]


@pytest.mark.parametrize(("name", "engine"), [*((name, "padded") for name in HYBRIDS), ("rwkv", "recomputed")])
def test_the_first_engine_that_fits_is_taken_and_each_reason_is_one_line(name, engine, caplog):
    """The layers of a hybrid would ask an empty cache for their state; RWKV does not read that of padded batches."""
    assert choose_engine(model_of(name), HOW) == replace(HOW, engine=engine)
    warnings = warnings_of(caplog)
    assert len(warnings) == list(ENGINES).index(engine) and not any("\n" in line for line in warnings)
    assert "carry a state" in warnings[0] or "cannot be replaced" in warnings[0]


@pytest.mark.parametrize("engine", ["continuous", "padded"])
def test_whatever_a_model_raises_in_one_engine_it_runs_by_the_next(engine, monkeypatch, caplog):
    model = new_model("llama")
    forward = model.forward

    def without_cache(past_key_values=None, **inputs):
        if past_key_values is not None:
            raise KeyError("no\nstate")
        return forward(**inputs)

    monkeypatch.setattr(model, "forward", without_cache)
    assert choose_engine(model, replace(HOW, engine=engine)) == replace(HOW, engine="recomputed")
    warnings = warnings_of(caplog)
    assert len(warnings) == list(ENGINES).index("recomputed") - list(ENGINES).index(engine)
    assert all("KeyError" in line and "\n" not in line for line in warnings)


@pytest.mark.parametrize("engine", list(ENGINES))
def test_memory_that_runs_out_is_no_reason_for_another_engine(engine, monkeypatch):
    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    model = new_model("llama")
    monkeypatch.setattr(model, "forward", full)
    with pytest.raises(torch.OutOfMemoryError):
        choose_engine(model, replace(HOW, engine=engine, rows=1))


def test_a_model_that_no_engine_supports_is_an_error(monkeypatch):
    model = new_model("rwkv")
    monkeypatch.setattr(model, "forward", partial(with_other_logits, model.forward))
    with pytest.raises(UserError, match="RwkvForCausalLM.*another model") as problem:
        choose_engine(model, HOW)
    assert "\n" not in str(problem.value)


def with_other_logits(forward, **inputs):
    """Logits that differ from one pass to the next."""
    output = forward(**inputs)
    return replace(output, logits=torch.randn_like(output.logits))


def test_log_probs_that_are_not_finite_are_an_error():
    model = new_model("llama")
    model.model.layers[0].mlp.down_proj.weight.data.fill_(float("nan"))
    with pytest.raises(NonFiniteError, match="log-probs of LlamaForCausalLM are not finite"):
        choose_engine(model, HOW)


def test_padded_batches_are_kept_and_checked(monkeypatch):
    padded = replace(HOW, engine="padded")
    monkeypatch.setattr(attention, "causal_attention", None)  # it is not called
    assert choose_engine(model_of("llama"), padded) == padded
    monkeypatch.setattr(generator, "plain_logits", lambda model, rollout: torch.zeros(*rollout.response_ids.shape, 48))
    with pytest.raises(UserError, match="LlamaForCausalLM"):
        choose_engine(model_of("llama"), padded)


# Mistakes that the check must find


def another_scale(monkeypatch):
    original = attention.causal_attention
    monkeypatch.setattr(
        attention, "causal_attention", lambda q, k, v, scale, window, cap: original(q, k, v, scale * 1.1, window, cap)
    )


def not_causal(monkeypatch):
    def everything(query, key, value, scale, window, softcap):
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, scale=scale, enable_gqa=True)

    monkeypatch.setattr(attention, "causal_attention", everything)


def no_window_in_prefill(monkeypatch):
    original = attention.causal_attention
    monkeypatch.setattr(
        attention, "causal_attention", lambda q, k, v, scale, window, cap: original(q, k, v, scale, None, cap)
    )


def no_cap_in_prefill(monkeypatch):
    original = attention.causal_attention
    monkeypatch.setattr(
        attention, "causal_attention", lambda q, k, v, scale, window, cap: original(q, k, v, scale, window, None)
    )


def no_mask_in_steps(monkeypatch):
    monkeypatch.setattr(DecodeMetadata, "newest", property(lambda self: torch.full_like(self.slots, self.length)))


def no_window_in_steps(monkeypatch):
    original = attention.decode_attention
    monkeypatch.setattr(
        attention,
        "decode_attention",
        lambda batch, layer, query, scale, _, cap: original(batch, layer, query, scale, None, cap),
    )


def no_cap_in_steps(monkeypatch):
    original = attention.decode_attention
    monkeypatch.setattr(attention, "decode_attention", lambda *args: original(*args[:-1], None))


def positions_one_later(monkeypatch):
    original = continuous_batching.position_arguments

    def later(model, positions):
        return original(model, positions + (positions.shape[1] == 1))

    monkeypatch.setattr(continuous_batching, "position_arguments", later)


def keys_of_another_row(monkeypatch):
    original = DecodeMetadata.rows.func
    monkeypatch.setattr(DecodeMetadata, "rows", property(lambda self: original(self).roll(1)))


MISTAKES = [
    ("llama", another_scale), ("llama", not_causal), ("llama", no_mask_in_steps), ("llama", positions_one_later),
    ("llama", keys_of_another_row), ("gpt2", positions_one_later), ("gpt2", not_causal),
    ("mistral-window", no_window_in_prefill), ("mistral-window", no_window_in_steps), ("gemma2", no_cap_in_prefill),
    ("gemma2", no_cap_in_steps), ("gemma3", no_window_in_steps), ("gemma3", no_window_in_prefill),
]  # fmt: skip


@pytest.mark.parametrize(("name", "mistake"), MISTAKES, ids=[f"{name}-{made.__name__}" for name, made in MISTAKES])
def test_a_mistake_of_continuous_batching_is_found(name, mistake, monkeypatch, caplog):
    mistake(monkeypatch)
    assert choose_engine(model_of(name), HOW) == replace(HOW, engine="padded")
    assert "does not fit" in warnings_of(caplog)[0]


def test_the_check_covers_prefixes_that_samples_share(monkeypatch):
    """Wrong scores of a shared prefix do not pass."""
    original = attention.prefix_scores
    monkeypatch.setattr(attention, "prefix_scores", lambda prefix, layer, query: original(prefix, layer, query) * 0)
    assert not check_engine(model_of("llama"), HOW, "continuous").passes(1e-3)


def test_the_check_changes_neither_weights_nor_torchs_random_state():
    model = new_model("llama")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    streams = torch.get_rng_state()
    choose_engine(model, HOW)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), streams)


def test_half_precision_passes_with_a_coarse_tolerance():
    model = new_model("llama").bfloat16()
    found = check_engine(model, HOW, "continuous")
    assert 1e-4 < max(found.logprob_difference, found.greedy_shortfall) < HALF_TOLERANCE
    assert choose_engine(model, HOW) == HOW
