"""Weights that are not finite: found in whole and divided models, told alike on every rank, never saved."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from dschat_ppo.common import dist
from dschat_ppo.errors import NonFiniteError
from dschat_ppo.models.saving import require_finite_weights

NAN, INF = math.nan, math.inf


def engine_with(value: float, dtype: torch.dtype = torch.float32) -> SimpleNamespace:
    """One weight of its model's last layer is `value`; there are an empty and a frozen parameter too."""
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    model.empty = nn.Parameter(torch.zeros(0))
    model[0].requires_grad_(False)
    model[1].weight.data[1, 4] = value
    return SimpleNamespace(module=model.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_bad_weight_is_named(dtype):
    require_finite_weights("actor", engine_with(-6e4, dtype))
    for value in (NAN, INF, -INF):
        with pytest.raises(NonFiniteError, match=r"^actor: weights are not finite \(rank 0: 1\.weight\): an update"):
            require_finite_weights("actor", engine_with(value, dtype))


def test_what_fp16_does_not_hold_is_found_in_fp16_alone():
    require_finite_weights("critic", engine_with(7e4))
    with pytest.raises(NonFiniteError, match=r"^critic: .*1\.weight"):
        require_finite_weights("critic", engine_with(7e4, torch.float16))


def test_several_bad_weights_are_counted_in_one_line():
    engine = engine_with(NAN)
    for layer in engine.module:
        layer.bias.data[0] = INF
    with pytest.raises(NonFiniteError) as raised:
        require_finite_weights("model", engine)
    assert "(rank 0: 0.bias and 2 more)" in str(raised.value) and len(str(raised.value).splitlines()) == 1


def test_the_first_rank_that_has_one_is_named_on_every_rank(monkeypatch):
    monkeypatch.setattr(dist, "first_problem", lambda mine: mine or "rank 1: 0.weight")
    with pytest.raises(NonFiniteError, match=r"\(rank 1: 0\.weight\)"):
        require_finite_weights("model", engine_with(0.0))


@pytest.mark.parametrize(
    ("rank", "place", "bad"), [(0, 2, True), (1, 2, True), (2, 0, True), (2, 1, False), (3, 0, False)]
)
def test_partitions_are_looked_at_up_to_their_end(monkeypatch, rank, place, bad):
    """Seven numbers over four ranks: three, three, one, none. What fills the partitions up is no weight."""
    monkeypatch.setenv("RANK", str(rank))
    model = nn.Linear(7, 1, bias=False)
    part = torch.zeros(3)
    part[place] = NAN
    for name, value in {"ds_id": 0, "ds_tensor": part, "ds_numel": 7}.items():
        setattr(model.weight, name, value)
    model.weight.data = torch.full((0,), NAN)
    engine = SimpleNamespace(module=model)
    if bad:
        with pytest.raises(NonFiniteError, match=rf"rank {rank}: weight\)"):
            require_finite_weights("actor", engine)
    else:
        require_finite_weights("actor", engine)
