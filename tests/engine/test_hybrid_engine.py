"""Switching a model between training and generation (over ranks:
tests/ranks/test_ranks_hybrid.py)."""

from types import SimpleNamespace

import pytest
import torch
from one_rank import one_rank  # noqa: F401

from dschat_ppo.engine.hybrid_engine import HybridEngine

pytestmark = pytest.mark.usefixtures("one_rank")


def test_hooks_and_gradients_are_off_only_while_generating():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    calls = []
    model.register_forward_hook(lambda *_: calls.append("hook"))
    with HybridEngine(SimpleNamespace(module=model)).generating() as lent:
        assert not lent(torch.zeros(1, 2)).requires_grad
        assert not model.training
    assert calls == []
    assert model(torch.zeros(1, 2)).requires_grad
    assert calls == ["hook"]
    assert model.training


def test_adapters_cannot_be_merged_into_weights_that_are_never_whole():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    model[0].weight.ds_id = 0
    with pytest.raises(ValueError, match="merged"):
        HybridEngine(SimpleNamespace(module=model), pinned=False, merge=lambda *_: None)


@pytest.mark.parametrize(
    ("partitioned", "pinned", "collective"),
    [
        (True, False, True),
        (True, True, False),
        (False, False, False),
    ],
)
def test_forward_passes_are_collective_only_if_layers_are_gathered_one_by_one(
    partitioned, pinned, collective
):
    model = torch.nn.Linear(2, 2)
    if partitioned:
        model.weight.ds_id = 0
    max_over_ranks = HybridEngine(SimpleNamespace(module=model), pinned=pinned).max_over_ranks
    assert (max_over_ranks is not None) is collective
    assert max_over_ranks is None or max_over_ranks(7) == 7, "of one rank"
