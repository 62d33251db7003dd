"""Phases: their names for messages, their cost for metrics."""

import psutil
import pytest

from dschat_ppo.common import dist
from dschat_ppo.common.phases import PhaseClock, announce, announce_step, current_phase, reset_phases, where


@pytest.fixture(autouse=True)
def own_phases():
    reset_phases()
    yield
    reset_phases()


def test_phases_nest_and_add_up():
    clock = PhaseClock()
    announce("prepare data")
    for _ in range(2):
        with clock.phase("train"):
            clock.count_tokens("train", 5)
            assert current_phase() == "train" and where() == "phase 'train'"
    announce_step(12)
    assert where(" at") == "phase 'prepare data' at step 12"
    seconds, tokens, peak = clock.take()
    assert tokens == {"train": 10} and seconds["train"] > 0 and peak["train"] > 0
    assert clock.take() == ({}, {}, {})


def test_the_peak_of_a_process_is_in_gib(monkeypatch):
    monkeypatch.setattr(dist, "on_gpu", lambda: False)
    with (clock := PhaseClock()).phase("train"):
        block = bytearray(2**20) * 200  # is touched, and freed before the phase ends
        del block
    resident = psutil.Process().memory_info().rss
    assert clock.peak_gib["train"] == pytest.approx((resident + 200 * 2**20) / 2**30, rel=0.015)


def test_an_exception_leaves_the_phase_for_the_message():
    with pytest.raises(ZeroDivisionError), PhaseClock().phase("score"):
        raise ZeroDivisionError
    assert where() == "phase 'score'"
