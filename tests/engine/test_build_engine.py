"""Engines from models: parameter groups, optimizer, schedule, modes."""

import pytest
import torch
from one_rank import one_rank  # noqa: F401
from torch import nn

from dschat_ppo.common import dist
from dschat_ppo.engine.build_engine import (
    OptimizerSettings,
    build_optimizer,
    eval_engine,
    parameter_groups,
    train_engine,
)
from dschat_ppo.engine.ds_config import eval_config, train_config
from dschat_ppo.engine.optimizer_step import learning_rate

SETTINGS = OptimizerSettings(0.5, 0.1, "linear", 2, 6, (0.8, 0.9), 1e-6)


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


def test_partitioned_parameters_are_grouped_by_their_whole_shape():
    model = nn.Linear(3, 2)
    model.weight.data, model.weight.ds_shape = torch.empty(0), (2, 3)  # as ZeRO-3 leaves it
    assert [len(group["params"]) for group in parameter_groups(model, 0.1)] == [1, 1]


def test_the_optimizer_is_adamw_with_the_settings():
    optimizer = build_optimizer(nn.Linear(3, 2), SETTINGS, train_config(2, "fp32", False, 1, 1.0))
    assert type(optimizer) is torch.optim.AdamW
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    for group in optimizer.param_groups:
        assert (group["lr"], group["betas"], group["eps"]) == (0.5, (0.8, 0.9), 1e-6)


@pytest.mark.usefixtures("one_rank")
def test_a_training_engine_is_in_training_mode_and_warms_up():
    engine = train_engine(nn.Linear(3, 2).eval(), train_config(0, "fp32", False, 1, 1.0), SETTINGS)
    assert engine.module.training
    rates = []
    for _ in range(6):
        rates.append(learning_rate(engine))
        engine.backward(engine(torch.ones(1, 3, device=dist.device())).sum(), scale_wrt_gas=False)
        engine.step()
    assert rates == pytest.approx([0, 0.25, 0.5, 0.375, 0.25, 0.125])


@pytest.mark.usefixtures("one_rank")
def test_an_evaluating_engine_has_no_dropout_and_no_gradients():
    model = nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5)).train()
    engine = eval_engine(model, eval_config(2, "fp32", False, 1))
    first, second = (engine(torch.ones(1, 3, device=dist.device())) for _ in range(2))
    assert torch.equal(first, second) and not first.requires_grad and not engine.module.training
