"""Switching a model between training and generation, without ZeRO (with it: tests/ranks/test_ranks_hybrid.py)."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

from dschat_ppo.engine.hybrid_engine import HybridEngine
from dschat_ppo.runtime.memory_advice import ran_out_of_memory


def test_hooks_checkpointing_and_gradients_are_off_only_while_generating():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    calls = []
    model.register_forward_hook(lambda *_: calls.append("hook"))
    model[0].gradient_checkpointing = True
    with HybridEngine(SimpleNamespace(module=model)).generating() as lent:
        assert not lent(torch.zeros(1, 2)).requires_grad
        assert model[0].gradient_checkpointing is False
        assert not model.training
    assert calls == []
    assert model(torch.zeros(1, 2)).requires_grad
    assert calls == ["hook"]
    assert model[0].gradient_checkpointing is True
    assert model.training


def test_an_error_while_generating_restores_training():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    model[0].gradient_checkpointing = True
    with pytest.raises(KeyError), HybridEngine(SimpleNamespace(module=model)).generating():
        raise KeyError
    assert model.training and model[0].gradient_checkpointing is True and torch.is_grad_enabled()


def test_a_model_in_eval_mode_stays_in_eval_mode():
    model = torch.nn.Linear(2, 2).eval()
    with HybridEngine(SimpleNamespace(module=model)).generating():
        pass
    assert not model.training


def test_adapters_are_merged_while_generating_and_removed_again():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False))
    before = model[0].weight.detach().clone()

    @contextmanager
    def merge(lent, disposable):
        assert not disposable, "nothing was gathered"
        lent[0].weight.data += 1
        yield
        lent[0].weight.data -= 1

    with HybridEngine(SimpleNamespace(module=model), merge=merge).generating() as lent:
        assert torch.equal(lent[0].weight, before + 1)
    torch.testing.assert_close(model[0].weight, before)


def test_adapters_cannot_be_merged_into_weights_that_are_never_whole():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    model[0].weight.ds_id = 0
    with pytest.raises(ValueError, match="merged"):
        HybridEngine(SimpleNamespace(module=model), pinned=False, merge=lambda *_: None)


@pytest.mark.parametrize(("partitioned", "pinned", "collective"), [
    (True, False, True), (True, True, False), (False, False, False),
])  # fmt: skip
def test_forward_passes_are_collective_only_if_layers_are_gathered_one_by_one(partitioned, pinned, collective):
    model = torch.nn.Linear(2, 2)
    if partitioned:
        model.weight.ds_id = 0
    max_over_ranks = HybridEngine(SimpleNamespace(module=model), pinned=pinned).max_over_ranks
    assert (max_over_ranks is not None) is collective
    assert max_over_ranks is None or max_over_ranks(7) == 7, "of one rank"


def test_a_gather_without_memory_leaves_training_as_it_was(monkeypatch):
    """The error reaches the top level, which names the flags that help."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False))
    model[0].gradient_checkpointing = True
    model[0].weight.ds_id, model[0].weight.ds_status = 0, ZeroParamStatus.NOT_AVAILABLE
    model[0].weight.data = torch.empty(0)

    @contextmanager
    def gathered(weights, enabled):
        assert enabled and weights == [model[0].weight]
        raise torch.OutOfMemoryError("CUDA out of memory")
        yield

    monkeypatch.setattr("deepspeed.zero.GatheredParameters", gathered)
    with pytest.raises(torch.OutOfMemoryError) as raised, HybridEngine(SimpleNamespace(module=model)).generating():
        pytest.fail("generates without weights")
    assert ran_out_of_memory(raised.value)
    assert model.training and model[0].gradient_checkpointing is True and torch.is_grad_enabled()
