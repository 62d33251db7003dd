"""DeepSpeed configurations and parameter groups."""

import json

import pytest
from torch import nn

from dschat_ppo.engine.build_engine import parameter_groups
from dschat_ppo.engine.ds_config import eval_config, merge, read_overlay, train_config
from dschat_ppo.errors import UserError


def test_biases_and_norms_do_not_decay():
    model = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2), nn.Embedding(5, 2))
    groups = parameter_groups(model, 0.1)
    decayed = {id(p) for p in groups[0]["params"]}
    assert groups[0]["weight_decay"] == 0.1
    assert groups[1]["weight_decay"] == 0.0
    assert decayed == {id(model[0].weight), id(model[2].weight)}
    assert len(groups[1]["params"]) == 3


def test_frozen_parameters_are_in_no_group():
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    assert {id(p) for group in parameter_groups(model, 0.1) for p in group["params"]} == {
        id(p) for p in model[1].parameters()
    }


def test_offload_moves_optimizer_and_at_stage_3_parameters():
    for stage, keys in (
        (1, {"offload_optimizer"}),
        (2, {"offload_optimizer"}),
        (3, {"offload_optimizer", "offload_param"}),
    ):
        zero = train_config(stage, "bf16", offload=True, world_size=2, max_grad_norm=1.0)["zero_optimization"]
        assert {key for key, value in zero.items() if value == {"device": "cpu"}} == keys
        zero = train_config(stage, "bf16", offload=False, world_size=2, max_grad_norm=1.0)["zero_optimization"]
        assert not any(value == {"device": "cpu"} for value in zero.values())


def test_eval_engines_are_partitioned_at_stage_3_only():
    stages = [eval_config(stage, "fp32", False, 1)["zero_optimization"]["stage"] for stage in range(4)]
    assert stages == [0, 0, 0, 3]


def test_overlay_wins_level_by_level_and_changes_neither():
    base = {"a": {"x": 1, "y": 2}, "b": 3}
    overlay = {"a": {"y": 5, "z": 6}, "c": [1]}
    assert merge(base, overlay) == {"a": {"x": 1, "y": 5, "z": 6}, "b": 3, "c": [1]}
    assert base == {"a": {"x": 1, "y": 2}, "b": 3}
    config = train_config(3, "bf16", False, 2, 1.0, {"zero_optimization": {"overlap_comm": True}})
    assert config["zero_optimization"]["overlap_comm"] is True
    assert config["zero_optimization"]["stage"] == 3


@pytest.mark.parametrize("text", ["{", "[1]", json.dumps({"gradient_accumulation_steps": 4})])
def test_overlay_files_that_cannot_be_used_are_named(tmp_path, text):
    path = tmp_path / "mine.json"
    path.write_text(text)
    with pytest.raises(UserError, match=r"--deepspeed_config .*mine\.json"):
        read_overlay(str(path))


@pytest.mark.parametrize(
    "settings", [{"bf16": {"check_grad_overflow": False}}, {"zero_optimization": {"compute_grad_norm": False}}]
)
def test_checks_of_gradients_cannot_be_turned_off(tmp_path, settings):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(settings))
    with pytest.raises(UserError, match=r"mine\.json: .* false would let gradients"):
        read_overlay(str(path))
    path.write_text(json.dumps(settings).replace("false", "true"))
    assert read_overlay(str(path)) != {}


def test_no_overlay_is_empty():
    assert read_overlay(None) == {}
