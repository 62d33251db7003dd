"""The parts of parameters that a rank holds, and how they are filled from the parts of other ranks."""

import pytest
import torch
from torch import nn

from dschat_ppo.engine.weight_parts import copy_overlaps, is_partitioned, own_part, refresh_whole_copy

WHOLE = [float(number) for number in range(7)]


def partitioned(numel: int, part: list[float]) -> nn.Parameter:
    """A parameter whose part on this rank has these elements, marked as by ZeRO-3."""
    weight = nn.Parameter(torch.zeros(0))
    for name, value in {"ds_id": 0, "ds_tensor": torch.tensor(part), "ds_numel": numel}.items():
        setattr(weight, name, value)
    return weight


def test_a_whole_tensor_is_a_part_from_the_first_element_and_a_view():
    weight = nn.Parameter(torch.zeros(2, 3))
    first, part = own_part(weight)
    part += 1
    assert first == 0 and not is_partitioned(weight) and weight.tolist() == [[1.0] * 3] * 2


@pytest.mark.parametrize(
    ("rank", "first", "kept"), [(0, 0, [1.0, 2.0]), (1, 2, [1.0, 2.0]), (2, 4, [1.0]), (3, 5, []), (9, 5, [])]
)
def test_a_partition_has_no_padding(monkeypatch, rank, first, kept):
    """Five elements in parts of two."""
    monkeypatch.setenv("RANK", str(rank))
    weight = partitioned(5, [1.0, 2.0])
    found, part = own_part(weight)
    assert (found, part.tolist(), is_partitioned(weight)) == (first, kept, True)
    part += 1
    assert weight.ds_tensor.tolist()[: len(kept)] == [number + 1 for number in kept], "a view"


@pytest.mark.parametrize("saved", [
    [WHOLE], [WHOLE, None], [WHOLE[:3], WHOLE[3:6], WHOLE[6:]], [WHOLE[:4], [*WHOLE[4:], 99.0]],
])  # fmt: skip
@pytest.mark.parametrize("cuts", [(0, 7), (0, 2), (2, 5), (5, 7), (7, 7)])
def test_any_part_is_filled_from_any_parts(saved, cuts):
    first, last = cuts
    part = torch.full((last - first,), -1.0)
    states = [{} if each is None else {"w": torch.tensor(each), "other": torch.ones(1)} for each in saved]
    assert copy_overlaps({"w": (first, part)}, iter(states))
    assert part.tolist() == WHOLE[first:last]


def test_without_saved_parts_nothing_changes():
    part = torch.ones(2)
    assert not copy_overlaps({"w": (0, part)}, [{}, {}]) and part.tolist() == [1.0, 1.0]


def test_only_a_copy_that_zero_keeps_is_renewed():
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    for status, expected in ((ZeroParamStatus.AVAILABLE, [[3.0], [4.0]]), (ZeroParamStatus.NOT_AVAILABLE, [[0], [0]])):
        weight = partitioned(2, [3.0, 4.0])
        weight.data, weight.ds_shape, weight.ds_status = torch.zeros(2, 1), (2, 1), status
        refresh_whole_copy(weight)
        assert weight.tolist() == expected
    refresh_whole_copy(nn.Parameter(torch.zeros(1)))
