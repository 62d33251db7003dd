"""Which parameters the states of an engine hold; tests/ranks saves and loads them."""

import pytest
import torch
from torch import nn

from dschat_ppo.checkpoint.engine_state import PARAMETER_NAMES, model_states, trained_shapes, trained_state
from dschat_ppo.errors import UserError


def test_a_folder_without_states_is_named(tmp_path):
    with pytest.raises(UserError, match=r"actor: holds no states of an engine \(state/\*_model_states.pt is missing\)"):
        model_states(tmp_path / "actor")


def test_the_trained_state_has_all_names_of_what_trains_and_the_buffers():
    module = nn.ModuleDict({"a": nn.Linear(2, 3, bias=False), "b": nn.Linear(2, 3), "c": nn.BatchNorm1d(3)})
    module["b"].weight = module["a"].weight  # tied
    module["c"].register_buffer("scratch", torch.zeros(1), persistent=False)
    module["c"].requires_grad_(False)
    buffers = {"c.running_mean", "c.running_var", "c.num_batches_tracked"}
    assert trained_state(module).keys() == {"a.weight", "b.weight", "b.bias"} | buffers
    module["a"].weight.requires_grad_(False)  # under both names
    assert trained_state(module).keys() == {"b.bias"} | buffers


def test_what_a_quantised_layer_stores_beside_its_frozen_weight_is_left_out():
    """bitsandbytes stores `weight.absmax` and others, or `SCB`, which are neither parameters nor buffers."""

    class Quantised(nn.Linear):
        def _save_to_state_dict(self, destination, prefix, keep_vars):
            super()._save_to_state_dict(destination, prefix, keep_vars)
            destination |= {f"{prefix}weight.absmax": torch.zeros(1), f"{prefix}SCB": torch.zeros(1)}

    layer = Quantised(2, 2)
    layer.weight.requires_grad_(False)
    assert len(layer.state_dict()) == 4 and trained_state(layer).keys() == {"bias"}


def test_shapes_are_those_of_all_groups_or_of_the_weights_at_stage_0():
    shapes = [{"b": torch.Size([3]), "a": torch.Size([2, 2])}, {"c": torch.Size([1])}]
    found = trained_shapes({"param_shapes": shapes, "module": {}})
    assert list(found.items()) == [("b", (3,)), ("a", (2, 2)), ("c", (1,))]
    common = {"param_shapes": None, "module": {"x": torch.zeros(2), "y": torch.zeros(4, 1)}}
    assert trained_shapes(common | {PARAMETER_NAMES: ["y"]}) == {"y": (4, 1)}
