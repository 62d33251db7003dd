"""RNG states: random streams continue where they were captured."""

import random

import numpy as np
import pytest
import torch

from dschat_ppo.checkpoint import rng_state
from dschat_ppo.checkpoint.rng_state import capture_rng_state, restore_rng_state
from dschat_ppo.checkpoint.state_file import load_state, save_state

DRAWS = {
    "Python": lambda: [random.random() for _ in range(700)],
    "Python's normal numbers": lambda: [random.gauss(0, 1) for _ in range(3)],
    "numpy": lambda: np.random.rand(700).tolist(),
    "numpy's normal numbers": lambda: np.random.randn(3).tolist(),
    "torch": lambda: torch.rand(700).tolist(),
    "torch's normal numbers": lambda: torch.randn(3).tolist(),
    "dropout": lambda: torch.nn.functional.dropout(torch.ones(100)).tolist(),
}


def stir(seed: int) -> None:
    """Leave every stream somewhere in its course, with an odd number of normal numbers drawn."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    for draw in DRAWS.values():
        draw()


@pytest.mark.parametrize("source", DRAWS)
def test_draws_after_restoring_are_those_after_capturing(tmp_path, source):
    stir(1)
    save_state(tmp_path / "rank_0.pt", capture_rng_state())
    expected = DRAWS[source]()
    stir(2)
    assert DRAWS[source]() != expected
    restore_rng_state(load_state(tmp_path / "rank_0.pt"))
    assert DRAWS[source]() == expected


def test_capturing_does_not_advance_the_streams():
    stir(3)
    capture_rng_state()
    after = {source: draw() for source, draw in DRAWS.items()}
    stir(3)
    assert {source: draw() for source, draw in DRAWS.items()} == after


@pytest.fixture
def gpus(monkeypatch):
    """Stand-ins for the streams of GPUs: {"streams": [...], "current": number}."""
    machine = {"streams": [torch.tensor([10]), torch.tensor([11])], "current": 1}

    def set_one(state):
        machine["streams"][machine["current"]] = state

    def set_all(states):
        machine["streams"] = list(states)

    monkeypatch.setattr(rng_state, "on_gpu", lambda: bool(machine["streams"]))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(machine["streams"]))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: machine["current"])
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: list(machine["streams"]))
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", set_all)
    monkeypatch.setattr(torch.cuda, "set_rng_state", set_one)
    return machine


@pytest.mark.parametrize("there, current, expected", [
    ([20, 21], 1, [10, 11]),
    ([20], 0, [11]),  # the rank's own stream
    ([20, 21, 22], 2, [20, 21, 11]),
    ([], 0, []),
])  # fmt: skip
def test_streams_of_gpus_are_restored_to_the_gpus_of_this_machine(gpus, there, current, expected):
    state = capture_rng_state()
    assert state["gpu"] == 1
    gpus["streams"], gpus["current"] = [torch.tensor([number]) for number in there], current
    restore_rng_state(state)
    assert [int(stream) for stream in gpus["streams"]] == expected


def test_a_state_without_gpus_leaves_their_streams_unchanged(gpus):
    streams, gpus["streams"] = gpus["streams"], []
    state = capture_rng_state()
    assert state["gpus"] == []
    gpus["streams"] = streams
    restore_rng_state(state)
    assert [int(stream) for stream in gpus["streams"]] == [10, 11]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_draws_on_a_gpu(tmp_path):
    torch.cuda.manual_seed(1)
    torch.rand(5, device="cuda")
    save_state(tmp_path / "rank_0.pt", capture_rng_state())
    expected = torch.rand(5, device="cuda").tolist()
    assert torch.rand(5, device="cuda").tolist() != expected
    restore_rng_state(load_state(tmp_path / "rank_0.pt"))
    assert torch.rand(5, device="cuda").tolist() == expected
