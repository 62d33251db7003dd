"""The moving average of the weights, the reference that follows the actor, and the parts of weights
that ranks hold."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from launch import forked, succeed
from pretended_gpu import moved, pretended_gpu
from torch import nn

from dschat_ppo.common.dist import is_partitioned, rank_shard
from dschat_ppo.errors import NonFiniteError
from dschat_ppo.features.averages import averages
from dschat_ppo.features.averages.averages import (
    MovingAverage,
    ReferenceSync,
    refresh_whole_copy,
    whole_averages,
)


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
            assert average.restore([state])
    found = average.gathered()
    assert found["weight"].dtype == torch.bfloat16 and found["weight"].shape == (2, 3)
    np.testing.assert_allclose(average.state_dict()["weight"].numpy(), expected, rtol=1e-6)


def test_a_partition_is_restored_from_another_partitioning(monkeypatch):
    """That of four ranks, the last one padded."""
    states = [
        {"weight": torch.tensor(part)} for part in ([0.0, 1.0], [2.0, 3.0], [4.0, 5.0], [6.0, 99.0])
    ]
    model = nn.Linear(7, 1, bias=False)
    model.weight = partitioned_weight(7, [0.0] * 3)
    for rank, expected in enumerate(([0.0, 1.0, 2.0], [3.0, 4.0, 5.0], [6.0])):
        monkeypatch.setenv("RANK", str(rank))
        average = MovingAverage(model, 0.5)
        assert average.restore(iter(states))
        assert average.state_dict()["weight"].tolist()[: len(expected)] == expected


@pytest.mark.parametrize(
    "saved",
    [
        [
            {"weight": torch.tensor([[1.0, 2.0]]), "bias": torch.tensor([3.0])},
            {},
        ],  # all on the first rank
        [{"bias": torch.tensor([3.0])}, {}, {"weight": torch.tensor([[1.0, 2.0]])}],
        [
            {"weight": torch.tensor([1.0]), "bias": torch.tensor([3.0])},
            {"weight": torch.tensor([2.0])},
        ],  # partitions
    ],
)
def test_whole_weights_are_restored_from_any_division(saved, monkeypatch):
    for rank, expected in enumerate(({"weight": [[1.0, 2.0]]}, {"bias": [3.0]})):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "2")
        average = MovingAverage(nn.Linear(2, 1), 0.5)
        assert average.restore(iter(saved))
        assert {name: part.tolist() for name, part in average.state_dict().items()} == expected


def test_weights_leave_a_gpu_in_their_dtype_by_pinned_memory(monkeypatch):
    sizes = []

    def pinned(size: int) -> torch.Tensor:
        sizes.append(size)
        return torch.empty(size, dtype=torch.uint8)

    def averaged(place) -> MovingAverage:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 4)).bfloat16()
        model[1].bias.data = model[1].bias.data.float()
        model = place(model).requires_grad_()
        average = MovingAverage(model, 0.75)
        for _ in range(2):
            for parameter in model.parameters():
                parameter.data.add_(0.5)
            average.update()
        return average

    monkeypatch.setattr(averages, "pinned", pinned)
    with pretended_gpu() as seen:
        found = averaged(moved)
    copies = sum(number for (operation, _), number in seen.waits.items() if operation == "copy_")
    assert copies == 2 * 4, "one of each tensor in each update"
    assert sizes == [16], "as large as the largest tensors: 2 x 4 in bf16, and 4 in fp32"
    for name, part in averaged(lambda model: model).state_dict().items():
        assert torch.equal(found.state_dict()[name], part)


@pytest.mark.ranks
def test_two_ranks_average_and_gather_whole_weights():
    said = succeed(forked(2, "tests/features/averages/average_ranks.py", timeout=100)).stdout
    found = json.loads(said.splitlines()[-1])
    assert found["held"] == [["0.weight", "1.bias"], ["0.bias", "1.weight"]]
    assert found["gathered"] == found["by_hand"] and len(found["gathered"]) == 4


def test_whole_averages_are_joined_without_padding_from_whatever_each_rank_holds():
    shapes = {"a": torch.Size([2, 3]), "b": torch.Size([1]), "never_averaged": torch.Size([4])}
    parts = [
        {"a": torch.arange(4.0), "b": torch.tensor([8.0])},
        {"a": torch.arange(4.0, 8.0), "b": torch.tensor([99.0]), "other": torch.zeros(2)},
    ]
    found = whole_averages(iter(parts), shapes)
    assert {name: value.tolist() for name, value in found.items()} == {
        "a": [[0, 1, 2], [3, 4, 5]],
        "b": [8],
    }
    whole = [{"a": torch.arange(6.0).view(2, 3)}, {}]  # without ZeRO-3 rank 0 holds everything
    assert whole_averages(whole, shapes)["a"].tolist() == [[0, 1, 2], [3, 4, 5]]


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


@pytest.mark.parametrize("piece", [1, 2**24])
def test_the_reference_moves_by_the_formula_and_reports_how_far(monkeypatch, piece):
    monkeypatch.setattr(averages, "PIECE", piece)
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
    expected = torch.from_numpy(expected + np.float32(1 - 0.3) * old.float().numpy()).to(
        torch.bfloat16
    )
    sync_of(actor, reference, 0.3).update()
    assert reference.weight.dtype == torch.bfloat16 and torch.equal(reference.weight, expected)
    in_half = 0.3 * actor.weight.detach() + (1 - 0.3) * old
    assert not torch.equal(in_half, expected), "else the test shows nothing"


def test_an_actor_that_is_not_finite_leaves_the_reference_as_it_is():
    actor, reference = models()
    before = [weight.detach().clone() for weight in reference.parameters()]
    actor.bias.data[1] = float("inf")
    with pytest.raises(NonFiniteError, match=r"^actor: weights are not finite \(rank 0: lm.bias\)"):
        sync_of(actor, reference, 0.5).update()
    assert all(
        torch.equal(one, other) for one, other in zip(before, reference.parameters(), strict=True)
    )


WHOLE = [float(number) for number in range(7)]


def partitioned_weight(numel: int, part: list[float]) -> nn.Parameter:
    """A parameter whose part on this rank has these elements, marked as by ZeRO-3."""
    weight = nn.Parameter(torch.zeros(0))
    for name, value in {"ds_id": 0, "ds_tensor": torch.tensor(part), "ds_numel": numel}.items():
        setattr(weight, name, value)
    return weight


@pytest.mark.parametrize(
    ("rank", "first", "kept"),
    [(0, 0, [1.0, 2.0]), (1, 2, [1.0, 2.0]), (2, 4, [1.0]), (3, 5, []), (9, 5, [])],
)
def test_a_partition_has_no_padding(monkeypatch, rank, first, kept):
    """Five elements in parts of two."""
    monkeypatch.setenv("RANK", str(rank))
    weight = partitioned_weight(5, [1.0, 2.0])
    found, part = rank_shard(weight)
    assert (found, part.tolist(), is_partitioned(weight)) == (first, kept, True)
    part += 1
    assert weight.ds_tensor.tolist()[: len(kept)] == [number + 1 for number in kept], "a view"


def test_a_sync_moves_the_whole_copy_too_if_zero_keeps_one():
    for status, expected in (
        (ZeroParamStatus.AVAILABLE, [[1.0, -2.0]]),
        (ZeroParamStatus.NOT_AVAILABLE, [[0.0, 0.0]]),
    ):
        actor, reference = (nn.Linear(2, 1, bias=False) for _ in range(2))
        actor.weight.data = torch.tensor([[4.0, -8.0]])
        reference.weight = weight = partitioned_weight(2, [0.0, 0.0])
        weight.data, weight.ds_shape, weight.ds_status = torch.zeros(1, 2), (1, 2), status
        sync_of(actor, reference, 0.25).update()
        assert (weight.tolist(), weight.ds_tensor.tolist()) == (expected, [1.0, -2.0])
    refresh_whole_copy(nn.Parameter(torch.zeros(1)))
