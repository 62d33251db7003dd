"""Small models are whole on each rank under ZeRO-3: the same numbers with a fraction of the collectives."""

import json

import pytest
import torch
from launch import forked, metrics_of, succeed
from workers.small_models import CASES, STEPS, WAYS

pytestmark = [pytest.mark.ranks, pytest.mark.slow]
MEASURED = ("time", "time/", "memory/")


@pytest.fixture(scope="module")
def folder(assets, tmp_path_factory):
    folder = tmp_path_factory.mktemp("small")
    succeed(forked(2, "tests/workers/small_models.py", assets, folder, timeout=600))
    return folder


@pytest.mark.parametrize("case", CASES)
def test_metrics_and_weights_are_those_of_layers_gathered_one_by_one(folder, case):
    found = {}
    for way in WAYS:
        lines = [
            {name: value for name, value in line.items() if not name.startswith(MEASURED)}
            for line in metrics_of(folder / f"{case} {way}")
        ]
        found[way] = lines, torch.load(folder / f"{case} {way}" / "weights.pt")
    (lines, weights), (expected, same) = found["whole"], found["layers"]
    assert len(lines) == STEPS and len(weights) > 10 and set(weights) == set(same)
    if case == "bf16":
        assert lines == expected and all(torch.equal(weights[name], weight) for name, weight in same.items())
        return
    # In fp32 a norm reads the residual stream itself, so the gradients of three uses are added; hooks change the order.
    for line, other in zip(lines, expected, strict=True):
        assert line == pytest.approx(other, rel=1e-5, abs=1e-5)
    for name, weight in same.items():
        torch.testing.assert_close(weights[name], weight, atol=1e-5, rtol=0, msg=name)


def test_collectives_of_a_step(folder):
    """Two models, two epochs of two mini-batches: eight updates, each with a gather of weights, a reduction of
    gradients, two of norms, and a check of the losses."""
    whole, layers = (json.loads((folder / f"bf16 {way}" / "collectives.json").read_text()) for way in WAYS)
    assert whole["allgather_base"] <= 8 + 2, "one before each update, and those of reference and reward model at most"
    assert whole["reduce_scatter_base"] == 8
    assert sum(whole.values()) <= 64 and 3 * sum(whole.values()) < sum(layers.values()), (whole, layers)


def test_checkpoints_of_either_way_are_read_by_the_other(folder):
    for rank in json.loads((folder / "resumed.json").read_text()):
        assert rank == {f"{one} to {other}": True for one in WAYS for other in WAYS}
