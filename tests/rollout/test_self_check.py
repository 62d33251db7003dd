"""The self-check at the start of a run: correct engines pass, wrong ones do not."""

import logging
from dataclasses import replace
from functools import partial

import pytest
import torch
from generation import warnings_of
from tiny_models import HYBRIDS, model_of, new_model

from dschat_ppo.errors import NonFiniteError, UserError
from dschat_ppo.rollout import attention, continuous_batching, decode_kernels, self_check
from dschat_ppo.rollout.continuous_batching import ContinuousBatching
from dschat_ppo.rollout.decode_kernels import AttentionCall
from dschat_ppo.rollout.generation_request import ENGINES, GenerationConfig
from dschat_ppo.rollout.kv_cache import DecodeMetadata, PooledMetadata, RowStates
from dschat_ppo.rollout.sampling import SamplingParameters, StoppingCriteria
from dschat_ppo.rollout.self_check import HALF_TOLERANCE, check_engine, choose_engine

HOW = GenerationConfig(
    SamplingParameters(0.7, top_p=0.9), StoppingCriteria(50, eos_ids=(3,)), samples=3, rows=5
)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "mistral-window", *HYBRIDS])
def test_continuous_batching_is_kept_if_it_is_right(name, caplog):
    caplog.set_level(logging.INFO)
    assert choose_engine(model_of(name), HOW) == HOW
    assert not warnings_of(caplog)
    assert "continuous batching agrees with" in caplog.text


REASONS = [  # why continuous batching does not support the model, and the engine that does
    ("bloom", "cannot be replaced", "padded"),
    ("falcon", "cannot be replaced", "padded"),
    (
        "phimoe",
        "mask alone",
        "padded",
    ),  # its window is in its mask only, and longer than every prompt of the check
    ("phi3-longrope", "longest row", "padded"),
    (
        "rwkv",
        "cannot be replaced",
        "recomputed",
    ),  # it does not read the state of padded batches either
]


@pytest.mark.parametrize(("name", "reason", "engine"), REASONS)
def test_other_models_get_the_first_engine_that_fits_and_a_line_for_each_reason(
    name, reason, engine, caplog
):
    assert choose_engine(model_of(name), HOW) == replace(HOW, engine=engine)
    warnings = warnings_of(caplog)
    assert len(warnings) == list(ENGINES).index(engine) and not any(
        "\n" in line for line in warnings
    )
    assert type(model_of(name)).__name__ in warnings[0] and reason in warnings[0]


def test_a_model_with_few_positions_is_checked_within_them():
    assert choose_engine(new_model("gpt2", n_positions=20), HOW) == HOW


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
    monkeypatch.setattr(attention, "prefill_attention", None)  # it is not called
    assert choose_engine(model_of("llama"), padded) == padded
    right = self_check.plain_logits
    # a little beside them
    monkeypatch.setattr(self_check, "plain_logits", lambda *args: right(*args) * 1.001)
    with pytest.raises(UserError, match="LlamaForCausalLM"):
        choose_engine(model_of("llama"), padded)


# Mistakes that the check must find


def without_mask(call, newest=None):
    return torch.nn.functional.scaled_dot_product_attention(
        call.query, call.key, call.value, scale=call.scale, enable_gqa=True
    )


def with_call(change):
    """A mistake of a function that gets an `AttentionCall`: it gets another one."""

    def mistake(right):
        return lambda *args: right(
            *(change(arg) if isinstance(arg, AttentionCall) else arg for arg in args)
        )

    return mistake


NO_WINDOW = with_call(lambda call: call._replace(window=None))
NO_CAP = with_call(lambda call: call._replace(softcap=None))


PREFILL = (attention, "prefill_attention")
STEP = (attention, "products_attention")
POSITIONS = continuous_batching, "position_arguments"
MISTAKES = [  # name of a model, what is wrong, and how it replaces an attribute of an object
    ("llama", "scale", PREFILL, with_call(lambda call: call._replace(scale=call.scale * 1.1))),
    ("llama", "not causal", PREFILL, lambda right: without_mask),
    ("gpt2", "not causal", PREFILL, lambda right: without_mask),
    ("mistral-window", "no window", PREFILL, NO_WINDOW),
    ("gemma3", "no window", PREFILL, NO_WINDOW),
    ("gemma2", "no cap", PREFILL, NO_CAP),
    ("mistral-window", "no window", STEP, NO_WINDOW),
    ("gemma3", "no window", STEP, NO_WINDOW),
    ("gemma2", "no cap", STEP, NO_CAP),
    (
        "llama",
        "prompts that samples share",
        (decode_kernels, "by_prompt"),
        lambda right: lambda *args: right(*args) * 0,
    ),
    (
        "llama",
        "keys of another row",
        (DecodeMetadata, "rows"),
        lambda right: property(lambda self: right.func(self).roll(1)),
    ),
    (
        "llama",
        "later slots",
        (DecodeMetadata, "newest"),
        lambda right: property(lambda self: torch.full_like(self.slots, self.length)),
    ),
    (
        "lfm2",
        "states of another row",
        (RowStates, "of"),
        lambda right: lambda self, rows: right(self, rows[::-1]),
    ),
    (
        "qwen3-next",
        "no mask of padding",
        (ContinuousBatching, "_forward"),
        lambda right: (
            lambda self, ids, positions, cache, **mask: right(self, ids, positions, cache)
        ),
    ),
    *(
        (
            name,
            "positions one later",
            POSITIONS,
            lambda right: (
                lambda model, positions: right(model, positions + (positions.shape[1] == 1))
            ),
        )
        for name in ("llama", "gpt2")
    ),
]


@pytest.mark.parametrize(
    ("name", "wrong", "place", "mistake"), MISTAKES, ids=[f"{m[0]} {m[1]}" for m in MISTAKES]
)
def test_a_mistake_of_continuous_batching_is_found(
    name, wrong, place, mistake, monkeypatch, caplog
):
    owner, attribute = place
    monkeypatch.setattr(owner, attribute, mistake(vars(owner)[attribute]))
    assert choose_engine(model_of(name), HOW) == replace(HOW, engine="padded")
    assert "does not fit" in warnings_of(caplog)[0]


def seen_after_others(change):
    """A mistake of `prefill_attention` where tokens come after cached ones: `change` makes another
    call and `newest`."""

    def mistake(right):
        return lambda call, newest=None: right(
            *((call, newest) if newest is None else change(call, newest))
        )

    return mistake


OF_EPISODES = [
    (
        "llama",
        "a later key",
        PREFILL,
        seen_after_others(lambda call, newest: (call, newest + 1)),
    ),
    (
        "llama",
        "not its own key",
        PREFILL,
        seen_after_others(lambda call, newest: (call, (newest - 1).clamp_min(0))),
    ),
    (
        "mistral-window",
        "no window",
        PREFILL,
        seen_after_others(lambda call, newest: (call._replace(window=None), newest)),
    ),
    (
        "llama",
        "keys of another row",
        (PooledMetadata, "read"),
        lambda right: lambda self, layer: tuple(part.roll(1, 0) for part in right(self, layer)),
    ),
    (
        "gpt2",
        "positions one later",
        POSITIONS,
        lambda right: (
            lambda model, positions: right(
                model, positions + (positions[0, 0] > 0) * (positions.shape[1] > 1)
            )
        ),
    ),
    (
        "llama",
        "one token less",
        (ContinuousBatching, "_extends"),
        lambda right: (
            lambda self, counts: right(
                self, {row: count - 1 for row, count in counts.items() if count > 1}
            )
        ),
    ),
]


@pytest.mark.parametrize(
    ("name", "wrong", "place", "mistake"), OF_EPISODES, ids=[f"{m[0]} {m[1]}" for m in OF_EPISODES]
)
def test_a_mistake_after_an_observation_is_found(name, wrong, place, mistake, monkeypatch):
    assert choose_engine(model_of(name), HOW, has_partner=True) == HOW
    owner, attribute = place
    monkeypatch.setattr(owner, attribute, mistake(vars(owner)[attribute]))
    assert choose_engine(model_of(name), HOW, has_partner=False) == HOW
    assert choose_engine(model_of(name), HOW, has_partner=True) == replace(HOW, engine="padded")


def test_the_check_does_not_change_torchs_random_state():
    streams = torch.get_rng_state()
    choose_engine(model_of("llama"), HOW)
    assert torch.equal(torch.get_rng_state(), streams)


def test_half_precision_passes_with_a_coarse_tolerance():
    model = new_model("llama").bfloat16()
    difference, reason = check_engine(model, HOW, "continuous")
    assert 1e-4 < difference < HALF_TOLERANCE and not reason
    assert choose_engine(model, HOW) == HOW
