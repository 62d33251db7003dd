"""Generation leaves the model as it was, also after an error inside."""

import gc
import weakref
from contextlib import nullcontext

import pytest
import torch
import transformers
from generation import ENGINES, run
from tiny_models import new_model

from dschat_ppo.rollout import attention, fused_layers, kv_cache, sequence_buffers


class State:
    """Everything in a model that generation could change."""

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
        assert all(
            torch.equal(self.weights[name], value)
            for name, value in self.model.state_dict().items()
        )
        assert all(p.grad is None for p in self.model.parameters())
        self.hook.remove()


def fail(*_, **__):
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("dtype", "implementation"), [(torch.float32, "sdpa"), (torch.bfloat16, "eager")]
)
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("engine", list(ENGINES))
def test_the_model_is_left_as_it_was_also_after_an_error_inside(
    engine, fails, dtype, implementation, monkeypatch
):
    model = new_model("llama", attn_implementation=implementation).to(dtype)
    state = State(model)
    assert state.facts[0] == implementation
    if fails:
        monkeypatch.setattr(sequence_buffers, "sample", fail)
    with pytest.raises(KeyboardInterrupt) if fails else nullcontext():
        run(model, **ENGINES[engine])
    state.assert_unchanged()


@pytest.mark.skipif(
    not fused_layers.can_prepack(torch.nn.Linear(2, 2).bfloat16()),
    reason="this PyTorch has no packed products",
)
@pytest.mark.parametrize(("name", "most"), [("llama", 6), ("phi", 4)])
def test_an_error_while_packing_leaves_no_layer_packed(name, most, monkeypatch):
    """In the second fused layer, and without fused layers."""
    model, original, calls = new_model(name).bfloat16(), fused_layers.packed_product, []

    def failing(*args, **kwargs):
        calls.append(1)
        if len(calls) == most:
            raise RuntimeError("no memory")
        return original(*args, **kwargs)

    state = State(model)
    monkeypatch.setattr(fused_layers, "packed_product", failing)
    with pytest.raises(RuntimeError, match="no memory"):
        run(model)
    state.assert_unchanged()


@pytest.mark.parametrize("engine", list(ENGINES))
def test_nothing_keeps_the_kv_cache_alive_after_generation(engine, monkeypatch):
    """Reference counts alone free it: the garbage collector, which may run much later, is off."""
    seen = []

    def noting(original):
        def call(cache, *args, **kwargs):
            found = original(cache, *args, **kwargs)
            # of transformers' own caches
            layers = [vars(layer) for layer in getattr(cache, "layers", [])]
            held = [
                x for layer in layers for x in layer.values() if isinstance(x, torch.Tensor)
            ] or found
            seen.extend([weakref.ref(cache), *map(weakref.ref, held)])
            return found

        return call

    monkeypatch.setattr(kv_cache.KVCache, "layer", noting(kv_cache.KVCache.layer))
    monkeypatch.setattr(transformers.Cache, "update", noting(transformers.Cache.update))
    model = new_model("llama")
    gc.collect()
    gc.disable()
    try:
        rollout = run(model, **ENGINES[engine])
        assert len(seen) > 10 and rollout.response_mask.any()
        assert [reference for reference in seen if reference() is not None] == []
    finally:
        gc.enable()
