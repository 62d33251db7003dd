"""The moving average of the actor's weights."""

import json

import numpy as np
import pytest
import torch
from launch import forked, succeed
from pretended_gpu import moved, pretended_gpu
from torch import nn

from dschat_ppo.config.cli import parse
from dschat_ppo.engine import moving_average
from dschat_ppo.engine.moving_average import MovingAverage, whole_averages
from dschat_ppo.errors import UserError


def test_the_average_matches_the_formula_also_after_a_resume():
    model = nn.Linear(3, 2).to(torch.bfloat16)
    average = MovingAverage(model, 0.75)
    expected = model.weight.detach().float().numpy().copy()
    for step in range(5):
        with torch.no_grad():
            model.weight += 0.25 * (step + 1)
        expected = 0.75 * expected + 0.25 * model.weight.detach().float().numpy()
        average.update()
        if step == 2:
            state = {name: part.clone() for name, part in average.state_dict().items()}
            average = MovingAverage(model, 0.75)
            assert average.has_layout_of(state)
            average.load_state_dict(state)
    found = average.gathered()
    assert found["weight"].dtype == torch.bfloat16 and found["weight"].shape == (2, 3)
    np.testing.assert_allclose(average.state_dict()["weight"].numpy(), expected, rtol=1e-6)


def test_partitions_of_saved_ranks_are_joined():
    average = MovingAverage(nn.Linear(5, 1, bias=False), 0.5)
    parts = ([0.0, 1.0], [2.0, 3.0], [4.0, 99.0])  # the last one is padded
    states = [{"weight": torch.tensor(part)} for part in parts]
    assert not average.has_layout_of(states[0])
    assert average.load_parts(states)
    assert average.gathered()["weight"].tolist() == [[0.0, 1.0, 2.0, 3.0, 4.0]]


def partitioned(numel: int, size: int) -> nn.Module:
    """A model whose one weight is partitioned into pieces of this size, marked as by ZeRO-3."""
    model = nn.Linear(numel, 1, bias=False)
    marks = {"ds_id": 0, "ds_tensor": torch.zeros(size), "ds_numel": numel, "ds_shape": (1, numel)}
    for name, value in marks.items():
        setattr(model.weight, name, value)
    return model


@pytest.mark.parametrize("saved", [
    [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0], [6.0, 99.0]],  # four ranks, the last one padded
    [[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0], None, None],  # whole on the first
    [[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]],
])  # fmt: skip
def test_a_partition_is_restored_from_any_other_partitioning(saved, monkeypatch):
    states = [{} if part is None else {"weight": torch.tensor(part)} for part in saved]
    for rank, expected in enumerate(([0.0, 1.0, 2.0], [3.0, 4.0, 5.0], [6.0])):
        monkeypatch.setenv("RANK", str(rank))
        average = MovingAverage(partitioned(7, 3), 0.5)
        assert average.state_dict()["weight"].tolist() == [0.0, 0.0, 0.0]
        assert not any(average.has_layout_of(state) for state in states)
        assert average.load_parts(iter(states))
        assert average.state_dict()["weight"].tolist()[: len(expected)] == expected


def as_rank(monkeypatch, rank: int, ranks: int = 2) -> None:
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", str(ranks))


def test_whole_weights_are_divided_evenly_among_the_ranks(monkeypatch):
    """Tensors of 6, 3, 3, 1 and 2 numbers: each goes to the rank with the fewest so far."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1), nn.Linear(2, 1, bias=False))
    for rank, expected in enumerate(({"0.weight", "1.bias"}, {"0.bias", "1.weight", "2.weight"})):
        as_rank(monkeypatch, rank)
        assert set(MovingAverage(model, 0.5).state_dict()) == expected


def test_a_rank_with_fewer_tensors_than_ranks_may_hold_none(monkeypatch):
    as_rank(monkeypatch, 3, 4)
    average = MovingAverage(nn.Linear(2, 1), 0.5)
    average.begin()
    average.update()
    assert average.state_dict() == {} and average.gathered() == {}
    assert average.has_layout_of({})
    average.load_state_dict({})
    assert average.load_parts([{"weight": torch.ones(1, 2), "bias": torch.ones(1)}, {}])
    assert average.state_dict() == {}


@pytest.mark.parametrize("saved", [
    [{"weight": torch.tensor([[1.0, 2.0]]), "bias": torch.tensor([3.0])}, {}],  # all on the first rank
    [{"weight": torch.tensor([[1.0, 2.0]])}, {"bias": torch.tensor([3.0])}],
    [{"bias": torch.tensor([3.0])}, {}, {"weight": torch.tensor([[1.0, 2.0]])}],
    [{"weight": torch.tensor([1.0]), "bias": torch.tensor([3.0])}, {"weight": torch.tensor([2.0])}],  # partitions
])  # fmt: skip
def test_whole_weights_are_restored_from_any_division(saved, monkeypatch):
    for rank, expected in enumerate(({"weight": [[1.0, 2.0]]}, {"bias": [3.0]})):
        as_rank(monkeypatch, rank)
        average = MovingAverage(nn.Linear(2, 1), 0.5)
        assert average.load_parts(iter(saved))
        assert {name: part.tolist() for name, part in average.state_dict().items()} == expected


def test_weights_leave_a_gpu_in_their_dtype_by_pinned_memory(monkeypatch):
    sizes = []

    def pinned(size: int) -> torch.Tensor:
        sizes.append(size)
        return torch.empty(size, dtype=torch.uint8)

    def averaged(model: nn.Module) -> MovingAverage:
        for parameter in model.parameters():
            parameter.requires_grad_()
        average = MovingAverage(model, 0.75)
        for _ in range(2):
            for parameter in model.parameters():
                parameter.data.add_(0.5)
            average.update()
        return average

    def made() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 4)).bfloat16()
        model[1].bias.data = model[1].bias.data.float()
        return model

    monkeypatch.setattr(moving_average, "pinned", pinned)
    with pretended_gpu() as seen:
        found = averaged(moved(made()))
    copies = sum(number for (operation, _), number in seen.waits.items() if operation == "copy_")
    assert copies == 2 * 4, "one of each tensor in each update"
    assert sizes == [16], "as large as the largest tensors: 2 x 4 in bf16, and 4 in fp32"
    for name, part in averaged(made()).state_dict().items():
        assert torch.equal(found.state_dict()[name], part)


@pytest.mark.ranks
def test_two_ranks_average_and_gather_whole_weights():
    found = json.loads(succeed(forked(2, "tests/workers/moving_averages.py", timeout=100)).stdout.splitlines()[-1])
    assert found["held"] == [["0.weight", "1.bias"], ["0.bias", "1.weight"]]
    assert found["gathered"] == found["by_hand"] and len(found["gathered"]) == 4


def test_without_saved_parts_the_average_does_not_change():
    average = MovingAverage(nn.Linear(2, 1, bias=False), 0.5)
    before = average.state_dict()["weight"].clone()
    assert not average.load_parts([{}, {}])
    assert torch.equal(average.state_dict()["weight"], before)


def test_the_average_starts_from_the_current_weights():
    model = nn.Linear(2, 1, bias=False)
    average = MovingAverage(model, 0.5)
    with torch.no_grad():
        model.weight.fill_(7.0)
    assert average.gathered()["weight"].tolist() != [[7.0, 7.0]]
    average.begin()
    assert average.gathered()["weight"].tolist() == [[7.0, 7.0]]
    assert average.state_dict()["weight"].data_ptr() != model.weight.data_ptr()


def test_a_decay_without_an_average_is_refused():
    words = [
        "--actor_model_name_or_path",
        "a",
        "--critic_model_name_or_path",
        "b",
        "--data_path",
        "d",
        "--output_dir",
        "c",
    ]
    with pytest.raises(UserError, match="--ema_decay is for --enable_ema"):
        parse("ppo", [*words, "--ema_decay", "0.9"])
    with pytest.raises(UserError, match="--ema_decay must be at least 0 and below 1"):
        parse("ppo", [*words, "--enable_ema", "--ema_decay", "1"])


def test_whole_averages_are_joined_without_padding_from_whatever_each_rank_holds():
    shapes = {"a": torch.Size([2, 3]), "b": torch.Size([1]), "never_averaged": torch.Size([4])}
    parts = [
        {"a": torch.arange(4.0), "b": torch.tensor([8.0])},
        {"a": torch.arange(4.0, 8.0), "b": torch.tensor([99.0]), "other": torch.zeros(2)},
    ]
    found = whole_averages(iter(parts), shapes)
    assert {name: value.tolist() for name, value in found.items()} == {"a": [[0, 1, 2], [3, 4, 5]], "b": [8]}
    whole = [{"a": torch.arange(6.0).view(2, 3)}, {}]  # without ZeRO-3 rank 0 holds everything
    assert whole_averages(whole, shapes)["a"].tolist() == [[0, 1, 2], [3, 4, 5]]


def test_frozen_parameters_are_not_averaged():
    model = nn.Linear(2, 2)
    model.weight.requires_grad_(False)
    average = MovingAverage(model, 0.5)
    assert average.state_dict().keys() == average.gathered().keys() == {"bias"}
