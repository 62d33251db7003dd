"""Memory that runs out while generating, and what generation leaves behind."""

import gc
import logging
import weakref

import pytest
import torch
from tiny_models import model_of, new_model, plain_logprobs, prompts_of, tokens_of

from dschat_ppo.rollout import attention, continuous_batching, padded_batches, prepack
from dschat_ppo.rollout.generator import GenerationConfig, generate
from dschat_ppo.rollout.kv_cache import KVCache
from dschat_ppo.rollout.prepack import can_prepack
from dschat_ppo.rollout.sampling import SamplingParameters
from dschat_ppo.rollout.stopping_criteria import StoppingCriteria

MESSAGE = "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried 8 bytes"
LENGTHS = (40, 9, 1, 33, 2, 17, 36, 5)
PENALTY = SamplingParameters(temperature=1.3, repetition_penalty=1.5)  # its marks of seen tokens must be taken back too
WAYS = {
    "continuous": {"samples": 1},
    "shared": {"samples": 3},
    "static": {"samples": 1, "static": True},
    "static samples": {"samples": 3, "static": True},
}


def run(rows: int = 8, model=None, sampling=PENALTY, stopping=None, **how):
    settings = GenerationConfig(sampling, stopping or StoppingCriteria(12, eos_ids=(3, 5, 8, 17)), rows=rows, **how)
    seeds = torch.arange(len(LENGTHS) * settings.samples)
    return generate(model or model_of("llama"), prompts_of(LENGTHS), seeds, settings)


def assert_same(found, expected) -> None:
    assert tokens_of(found) == tokens_of(expected)
    assert torch.equal(found.finish_reason, expected.finish_reason)
    torch.testing.assert_close(found.rollout_logprobs, expected.rollout_logprobs, atol=2e-5, rtol=0)


def warnings_of(caplog) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name.startswith("dschat_ppo") and r.levelno == logging.WARNING]


def fail_at(monkeypatch, method: str, when) -> None:
    """`KVCache.method` runs out of memory where `when(number of the call, cache)`."""
    original, calls = getattr(KVCache, method), []

    def failing(self, *args):
        calls.append(1)
        if when(len(calls), self):
            raise RuntimeError(MESSAGE)
        return original(self, *args)

    monkeypatch.setattr(KVCache, method, failing)


# Out of memory


@pytest.mark.parametrize(
    ("method", "call"),
    [("write_prefill", 1), ("write_prefill", 2), ("write_decode", 1), ("write_decode", 12), ("move_rows", 1)],
)
@pytest.mark.parametrize("way", list(WAYS))
def test_once_out_of_memory_gives_the_same_answers_with_half_the_rows(way, method, call, monkeypatch, caplog):
    expected = run(**WAYS[way])
    fail_at(monkeypatch, method, lambda number, _: number == call)
    found = run(**WAYS[way])
    (warning,) = warnings_of(caplog)
    assert "out of memory with 8 rows" in warning
    assert "with 4" in warning
    assert_same(found, expected)


@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("most", [1, 2, 5])
def test_rows_are_halved_until_they_fit(way, most, monkeypatch, caplog):
    expected = run(**WAYS[way])
    fail_at(monkeypatch, "write_decode", lambda _, cache: cache.rows > most)
    assert_same(run(**WAYS[way]), expected)
    assert len(warnings_of(caplog)) == {1: 3, 2: 2, 5: 1}[most]


@pytest.mark.parametrize("way", list(WAYS))
def test_a_single_row_that_does_not_fit_is_an_error(way, monkeypatch, caplog):
    fail_at(monkeypatch, "write_decode", lambda *_: True)
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        run(**WAYS[way])
    assert len(warnings_of(caplog)) == 3  # 8, 4, 2


def fail_once_with_rows(monkeypatch, most: int) -> None:
    """Padded batches of more than `most` rows run out of memory in their third token."""
    original = padded_batches.PaddedBatches._forward

    def failing(self, ids, mask, cache):
        if len(ids) > most and mask.shape[1] == 42:
            raise RuntimeError(MESSAGE)
        return original(self, ids, mask, cache)

    monkeypatch.setattr(padded_batches.PaddedBatches, "_forward", failing)


@pytest.mark.parametrize("most", [1, 3, 5])
def test_padded_batches_go_on_with_fewer_rows(most, monkeypatch, caplog):
    expected = run(engine="padded")
    fail_once_with_rows(monkeypatch, most)
    assert_same(run(engine="padded"), expected)
    assert len(warnings_of(caplog)) == {1: 3, 3: 2, 5: 1}[most]


def test_a_padded_batch_of_one_row_that_does_not_fit_is_an_error(monkeypatch):
    fail_once_with_rows(monkeypatch, 0)
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        run(engine="padded")


def test_other_errors_are_not_taken_for_a_lack_of_memory(monkeypatch, caplog):
    def fail(*_):
        raise RuntimeError("shape mismatch")

    monkeypatch.setattr(KVCache, "write_decode", fail)
    with pytest.raises(RuntimeError, match="shape"):
        run()
    assert not warnings_of(caplog)


def test_the_gpus_own_error_is_a_lack_of_memory_too(monkeypatch, caplog):
    expected, original, calls = run(), KVCache.write_decode, []

    def failing(self, *args):
        calls.append(1)
        if len(calls) == 5:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return original(self, *args)

    monkeypatch.setattr(KVCache, "write_decode", failing)
    assert_same(run(), expected)
    assert len(warnings_of(caplog)) == 1


# What generation leaves behind

ENGINES = {"continuous": {}, "static": {"static": True}, "padded": {"engine": "padded"}}


class State:
    """All that generation could leave changed in a model."""

    def __init__(self, model):
        self.model = model
        self.hook = model.model.layers[0].register_forward_hook(lambda *_: None)
        self.weights = {name: value.clone() for name, value in model.state_dict().items()}
        self.facts = self.look()

    def look(self) -> list:
        modules = list(self.model.modules())
        return [
            self.model.config._attn_implementation,
            self.model.config.to_dict(),
            [p.data_ptr() for p in self.model.parameters()],
            [p.requires_grad for p in self.model.parameters()],
            [module.training for module in modules],
            [sorted(vars(module)) for module in modules],
            [dict(module._forward_hooks) for module in modules],
            [dict(module._forward_pre_hooks) for module in modules],
            [dict(module._backward_hooks) for module in modules],
            [getattr(module.forward, "__func__", None) for module in modules],
            torch.is_grad_enabled(),
            list(attention._active),
        ]

    def assert_unchanged(self) -> None:
        assert self.look() == self.facts
        assert not attention._active
        assert all(torch.equal(self.weights[name], value) for name, value in self.model.state_dict().items())
        assert all(p.grad is None for p in self.model.parameters())
        self.hook.remove()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("engine", list(ENGINES))
def test_the_model_is_left_as_it_was(engine, implementation, dtype):
    model = new_model("llama", attn_implementation=implementation).to(dtype)
    state = State(model)
    assert state.facts[0] == implementation
    run(model=model, **ENGINES[engine])
    state.assert_unchanged()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("engine", list(ENGINES))
def test_the_model_is_left_as_it_was_after_an_error_inside(engine, dtype, monkeypatch):
    def fail(*_, **__):
        raise KeyboardInterrupt

    model = new_model("llama").to(dtype)
    state = State(model)
    monkeypatch.setattr(padded_batches if engine == "padded" else continuous_batching, "sample", fail)
    with pytest.raises(KeyboardInterrupt):
        run(model=model, **ENGINES[engine])
    state.assert_unchanged()


needs_prepack = pytest.mark.skipif(
    not can_prepack(torch.nn.Linear(2, 2).bfloat16()), reason="this PyTorch has no packed products"
)


@needs_prepack
def test_an_error_while_packing_leaves_no_layer_packed(monkeypatch):
    model, original, calls = new_model("llama").bfloat16(), prepack.packed_forward, []

    def failing(*args):
        calls.append(1)
        if len(calls) == 4:
            raise RuntimeError(MESSAGE)
        return original(*args)

    state = State(model)
    monkeypatch.setattr(prepack, "packed_forward", failing)
    with pytest.raises(RuntimeError, match="allocate"):
        run(model=model)
    state.assert_unchanged()


@needs_prepack
@pytest.mark.parametrize("engine", list(ENGINES))
def test_packed_weights_give_nearly_the_same_logprobs(engine, monkeypatch):
    """Up to bf16 rounding, which is 2^-8 of a number; log-probs of these models go to -10."""
    model, products = new_model("phi").bfloat16(), []
    original = prepack._linear
    monkeypatch.setattr(prepack, "_linear", lambda *args: products.append(1) or original(*args))
    sampling, stopping = SamplingParameters(), StoppingCriteria(8)
    packed = run(model=model, sampling=sampling, stopping=stopping, **ENGINES[engine])
    assert products
    products.clear()
    plain = run(model=model, sampling=sampling, stopping=stopping, prepack=False, **ENGINES[engine])
    assert not products
    for rollout in (packed, plain):
        difference = (rollout.rollout_logprobs - plain_logprobs(model, rollout)).abs()
        assert difference.max() < 0.2
        assert difference.mean() < 0.03


@needs_prepack
@pytest.mark.parametrize("bias", [False, True])
def test_a_packed_layer_is_the_layer(bias):
    layer = torch.nn.Linear(33, 17, bias=bias).bfloat16()
    for shape in ((5, 33), (2, 3, 33), (1, 1, 33)):
        inputs = torch.randn(shape).bfloat16()
        plain = layer(inputs)
        with prepack.prepacked(torch.nn.Sequential(layer), 4), torch.no_grad():
            torch.testing.assert_close(layer(inputs), plain, atol=2e-2, rtol=2e-2)
            assert "forward" in vars(layer)
        assert torch.equal(layer(inputs), plain)


def test_full_precision_is_not_packed():
    assert not can_prepack(torch.nn.Linear(2, 2))


@pytest.fixture
def caches(monkeypatch):
    """Weak references to every cache that is made, with the garbage collector switched off."""
    references, original = [], KVCache.__init__

    def noting(self, *args):
        original(self, *args)
        references.append(weakref.ref(self))

    monkeypatch.setattr(KVCache, "__init__", noting)
    gc.collect()
    gc.disable()
    yield references
    gc.enable()


@pytest.mark.parametrize("samples", [1, 3])
def test_keys_and_values_are_released_after_the_call(samples, caches):
    run(samples=samples)
    assert caches
    assert not [cache for cache in caches if cache() is not None]


def test_keys_and_values_are_released_while_others_are_at_work(caches):
    """Growing, merging and retiring leave no copies: at the end, about as many caches as batches."""
    alive = []
    original = KVCache.write_decode

    def watching(self, *args):
        alive.append(sum(cache() is not None for cache in caches))
        return original(self, *args)

    KVCache.write_decode = watching
    try:
        run(rows=5)
    finally:
        KVCache.write_decode = original
    assert max(alive) <= 6


def test_the_fixed_store_is_released_after_the_call(caches):
    run(static=True)
    assert caches
    assert not [cache for cache in caches if cache() is not None]


def test_keys_and_values_are_released_after_an_error(caches, monkeypatch):
    fail_at(monkeypatch, "write_decode", lambda number, _: number == 9)
    monkeypatch.setattr(continuous_batching, "is_out_of_memory", lambda problem: False)
    with pytest.raises(RuntimeError, match="allocate"):
        run()
    assert caches
    gc.collect()  # the traceback is a cycle of its own
    assert not [cache for cache in caches if cache() is not None]
