"""The reference moves towards the actor: by hand, with its state, and never to a number that is not finite."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from dschat_ppo.engine import reference_sync
from dschat_ppo.engine.reference_sync import ReferenceSync
from dschat_ppo.errors import NonFiniteError


def engine_of(model: nn.Module) -> SimpleNamespace:
    """Stands for an engine around a policy."""
    module = nn.Module()
    module.lm = model
    return SimpleNamespace(module=module)


def models(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(3)
    return nn.Linear(3, 2).to(dtype), nn.Linear(3, 2).to(dtype)


def sync_of(actor: nn.Module, reference: nn.Module, mixup: float) -> ReferenceSync:
    return ReferenceSync(engine_of(actor), engine_of(reference), mixup)


@pytest.mark.parametrize("piece", [1, 4, 2**24])
def test_the_reference_moves_by_the_formula_and_reports_how_far(monkeypatch, piece):
    monkeypatch.setattr(reference_sync, "PIECE", piece)
    actor, reference = (nn.Linear(2, 1) for _ in range(2))
    for model, numbers in ((actor, [4.0, -8.0, 1.0]), (reference, [0.0, 0.0, 5.0])):
        model.weight.data, model.bias.data = torch.tensor([numbers[:2]]), torch.tensor(numbers[2:])
    moved = sync_of(actor, reference, 0.25).update()
    assert (reference.weight.tolist(), reference.bias.tolist()) == ([[1.0, -2.0]], [4.0])
    assert moved == pytest.approx((1 + 4 + 1) ** 0.5 / 5)
    assert (actor.weight.tolist(), actor.bias.tolist()) == ([[4.0, -8.0]], [1.0])


def test_half_precision_is_mixed_in_fp32_and_rounded_once():
    actor, reference = models(torch.bfloat16)
    old = reference.weight.detach().clone()
    expected = np.float32(0.3) * actor.weight.detach().float().numpy()
    expected = torch.from_numpy(expected + np.float32(1 - 0.3) * old.float().numpy()).to(torch.bfloat16)
    sync_of(actor, reference, 0.3).update()
    assert reference.weight.dtype == torch.bfloat16 and torch.equal(reference.weight, expected)
    in_half = 0.3 * actor.weight.detach() + (1 - 0.3) * old
    assert not torch.equal(in_half, expected), "else the test shows nothing"


def test_a_share_of_one_copies_the_actor_to_the_last_bit_and_a_second_sync_moves_nothing():
    actor, reference = models(torch.bfloat16)
    sync = sync_of(actor, reference, 1.0)
    assert sync.update() > 0
    assert torch.equal(reference.weight, actor.weight) and torch.equal(reference.bias, actor.bias)
    assert reference.weight.data_ptr() != actor.weight.data_ptr()
    assert sync.update() == 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_an_actor_that_is_not_finite_leaves_the_reference_as_it_is(bad):
    actor, reference = models()
    before = [weight.detach().clone() for weight in reference.parameters()]
    actor.bias.data[1] = bad
    with pytest.raises(NonFiniteError, match=r"^actor: weights are not finite \(rank 0: lm.bias\)"):
        sync_of(actor, reference, 0.5).update()
    assert all(torch.equal(one, other) for one, other in zip(before, reference.parameters(), strict=True))


def test_the_state_restores_the_reference_in_place(monkeypatch):
    actor, reference = models()
    sync = sync_of(actor, reference, 0.5)
    sync.update()
    state = {name: part.clone() for name, part in sync.state_dict().items()}
    _, fresh = models()
    other = sync_of(actor, fresh, 0.5)
    assert other.has_layout_of(state) and not torch.equal(fresh.weight, reference.weight)
    other.load_state_dict(state)
    assert torch.equal(fresh.weight, reference.weight) and torch.equal(fresh.bias, reference.bias)
    _, fresh = models()
    assert sync_of(actor, fresh, 0.5).load_parts([state, {}])
    assert torch.equal(fresh.weight, reference.weight)
    assert not sync_of(actor, fresh, 0.5).load_parts([{}])
    monkeypatch.setenv("RANK", "1")
    assert sync.state_dict() == {} and not sync.has_layout_of({}), "whole tensors are saved by rank 0 alone"
