"""Where a NaN of an optimizer step came from."""

import math

import torch
from torch import nn

from dschat_ppo.engine.optimizer_step import (
    gradient_fault,
    largest_gradient,
    loss_fault,
    random_state,
    set_random_state,
)

NAN, INF = math.nan, math.inf


def test_the_first_bad_loss_is_named_with_all_losses():
    assert loss_fault(torch.tensor([0.5, -3.0, 0.0]), []) is None
    fault = loss_fault(torch.tensor([0.5, INF, NAN]), [])
    assert (fault.kind, fault.rank, fault.micro_batch) == ("loss", 0, 1)
    assert str(fault.numbers) == "[[0.5, inf, nan]]"
    assert loss_fault(torch.tensor([0.5, -INF]), []) is not None


def test_a_gradient_is_bad_itself_or_only_in_its_norm():
    bad, large = gradient_fault(torch.tensor([9.0, 0.5, NAN]), []), gradient_fault(torch.tensor([1.0, 3e38, 2.0]), [])
    assert (bad.kind, bad.micro_batch) == ("gradient", 2)
    assert (large.kind, large.micro_batch) == ("norm", 1)


def test_the_largest_gradient_is_absolute_and_nan_if_any_is():
    model = nn.Linear(2, 1, bias=False)
    with largest_gradient(model) as largest:
        assert largest() == 0
        model(torch.tensor([[2.0, -5.0]])).sum().backward()
        assert largest() == 5
        model(torch.tensor([[1.0, NAN]])).sum().backward()
        assert largest().isnan()
    with largest_gradient(model) as largest:
        pass
    model(torch.tensor([[2.0, -5.0]])).sum().backward()
    assert largest() == 0, "hooks are removed"


def test_random_numbers_repeat_after_the_state_is_restored():
    state = random_state()
    first = torch.rand(3)
    set_random_state(state)
    assert torch.equal(torch.rand(3), first)
