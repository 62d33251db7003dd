"""`--sequence_parallel_size`: ranks that share rows compute what one rank computes."""

import json

import numpy as np
import pytest
from launch import forked, succeed

pytestmark = [pytest.mark.ranks, pytest.mark.slow]
LAUNCHES = {"one": (1, 1), "shared": (2, 2)}  # name -> ranks, and how many of them share their rows
TASKS = ("sft", "reward", "dpo", "ppo")


@pytest.fixture(scope="module")
def found(assets, stored_rollout, tmp_path_factory):
    """Launch -> output of the worker."""
    folder = tmp_path_factory.mktemp("sequence_parallel")
    for name, (ranks, shared) in LAUNCHES.items():
        out = folder / f"{name}.json"
        succeed(forked(ranks, "tests/workers/sequence_parallel.py", assets, shared, out, timeout=600))
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in LAUNCHES}


@pytest.mark.parametrize("task", TASKS)
def test_trajectory_is_that_of_one_rank(found, task):
    reference = found["one"]["trajectories"][f"{task} stage 0"]
    losses = [row[0] for row in (reference[1:] if task == "ppo" else reference[:-1])]
    assert np.abs(np.diff(losses)).max() > 1e-3, "nothing was trained"
    for label in [f"{task} stage 0", f"{task} stage 3"] + ["sft with all flags"] * (task == "sft"):
        for row, expected in zip(found["shared"]["trajectories"][label], reference, strict=True):
            np.testing.assert_allclose(row, expected, rtol=2e-5, atol=2e-6, err_msg=label)


@pytest.mark.parametrize("task", ["sft lora", "ppo lora"])
def test_trajectory_of_an_adapter_is_that_of_one_rank(found, task):
    whole, shared = (launch["trajectories"][task] for launch in (found["one"], found["shared"]))
    losses = [row[0] for row in whole[1:-1]]
    assert np.abs(np.diff(losses)).max() > 1e-3, "nothing was trained"
    for row, expected in zip(shared, whole, strict=True):
        np.testing.assert_allclose(row, expected, rtol=2e-5, atol=2e-6)


def test_models_whose_numbers_would_change_are_refused_by_name(found):
    shift, window = found["shared"]["refusals"]
    assert "LlamaModel cannot be divided, because divided rows do not give the numbers of whole rows" in shift
    assert "LlamaModel cannot be divided, because its sliding window is in its mask" in window


def test_each_architecture_gives_the_numbers_and_gradients_of_whole_rows(found):
    families = found["shared"]["families"]
    assert len(families) == 28
    for name, (outputs, gradients) in families.items():
        assert outputs < 2e-5, name
        assert gradients < 2e-5, name
