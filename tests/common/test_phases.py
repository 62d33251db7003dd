"""Phases: their names for messages, their cost for metrics."""

import pytest

from dschat_ppo.common.phases import (
    PhaseClock,
    announce,
    announce_step,
    current_phase,
    reset_phases,
    training_has_started,
    where,
)


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
            assert current_phase() == "train"
            assert where() == "phase 'train'"
    seconds, tokens, peak = clock.take()
    assert tokens == {"train": 10}
    assert seconds["train"] > 0
    assert peak["train"] > 0
    assert clock.take() == ({}, {}, {})


def test_the_step_is_part_of_the_place_once_it_is_announced():
    assert not training_has_started()
    announce_step(12)
    assert training_has_started() and where() == "phase 'start', step 12" and where(" at") == "phase 'start' at step 12"
    reset_phases()
    assert not training_has_started() and where() == "phase 'start'"


def test_an_exception_leaves_the_phase_for_the_message():
    with pytest.raises(ZeroDivisionError), PhaseClock().phase("score"):
        raise ZeroDivisionError
    assert where() == "phase 'score'"
