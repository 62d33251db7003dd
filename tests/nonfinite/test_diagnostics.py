"""Which numbers, weights, gradients and module outputs are not finite; splitting records into rows."""

import math

import pytest
import torch
from tiny_experience import experience, with_bad
from torch import nn

from dschat_ppo.nonfinite.diagnostics import bad_gradients, bad_places, bad_weights, first_bad_output

NAN, INF = math.nan, math.inf


def test_bad_places_are_checked_inside_the_response_mask_only():
    assert bad_places(experience()) == {}
    found = bad_places(experience(
        advantages=with_bad(NAN, (0, 2), (0, 1), (2, 1)),  # the last is outside
        values=with_bad(-INF, (1, 0)),  # of an empty answer
        scores=torch.tensor([1.0, INF, NAN]),
        source_scores=with_bad(NAN, (0, 0), shape=(3, 2)),  # may have a weight of 0
    ))  # fmt: skip
    assert found == {"advantages": [[0, 1], [0, 2]], "scores": [[1], [2]]}


def test_bad_weights_and_gradients_are_listed_by_name():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    assert bad_weights(model) == bad_gradients(model) == []
    model[0].bias.data[1] = INF
    model[1].weight.grad = torch.tensor([[0.0, NAN]])
    model[1].bias.grad = torch.zeros(1)
    assert bad_weights(model) == ["0.bias"]
    assert bad_gradients(model) == ["1.weight"]


class Pieces(nn.Module):
    """Gives its input in a dict, a tuple and a list."""

    def forward(self, x):
        return {"a": (torch.ones(1), [x]), "b": None, "c": torch.ones(1, dtype=torch.long)}


@pytest.mark.parametrize(("value", "place"), [(NAN, "0"), (2.0, None)])
def test_the_first_bad_output_is_named_with_the_state_of_its_inputs(value, place):
    model = nn.Sequential(nn.Identity(), nn.ReLU(), Pieces())
    with first_bad_output(model) as outputs:
        model(torch.tensor([value]))
    assert outputs == ([] if place is None else [f"{place} (Identity; so are its inputs)"])


def test_outputs_in_nested_containers_are_checked_and_hooks_are_removed():
    class Root(Pieces):
        def forward(self, x):
            return super().forward(x.log())

    model = Root()
    with first_bad_output(model) as outputs:
        model(torch.tensor([0.0]))
        model(torch.tensor([NAN]))
    assert outputs == ["the model (Root; its inputs are finite)"], "the first one is kept"
    with first_bad_output(model) as outputs:
        pass
    model(torch.tensor([0.0]))
    assert outputs == []
