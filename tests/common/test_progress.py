"""Phases: their names for messages, their cost for metrics; the line that shows how far a run
is."""

import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from dschat_ppo.common import dist, progress
from dschat_ppo.common.phases import (
    PhaseClock,
    announce,
    announce_step,
    current_phase,
    reset_phases,
    where,
)
from dschat_ppo.common.progress import Progress, duration, report_phase


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
            time.sleep(0.01)
    announce_step(12)
    assert where(" at") == "phase 'prepare data' at step 12"
    seconds, tokens, peak = clock.take()
    assert tokens == {"train": 10} and seconds["train"] >= 0.02 and peak["train"] > 0
    assert clock.take() == ({}, {}, {})


def test_the_peak_of_a_process_is_in_gib(monkeypatch):
    monkeypatch.setattr(dist, "on_gpu", lambda: False)
    with (clock := PhaseClock()).phase("train"):
        block = bytearray(2**20) * 200  # is touched, and freed before the phase ends
        del block
    resident = psutil.Process().memory_info().rss
    assert clock.peak_gib["train"] == pytest.approx((resident + 200 * 2**20) / 2**30, rel=0.015)


ROOT = Path(__file__).parents[2]


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test sets."""
    found = SimpleNamespace(now=100.0, monotonic=lambda: found.now)
    monkeypatch.setattr(progress, "time", found)
    return found


@pytest.fixture(autouse=True)
def no_terminal(monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False, raising=False)


def test_rate_and_time_left_are_those_of_the_steps_of_this_process(clock):
    with Progress("SFT", 10, done=4) as bar:
        assert (bar.rates, bar.left) == ((0.0, 0.0), "")
        assert bar.text() == "SFT step 4/10 (40 %)"
        clock.now += 2.0
        bar.advance(100)
        clock.now += 4.0
        bar.advance(200, "loss 1.5")
        assert (bar.done, bar.rates) == (6, (3.0, 50.0))
        assert bar.left == "0:12 left", "4 steps of 3 seconds"
        assert (duration(3723), duration(2 * 86400 + 11045)) == ("1:02:03", "2 d 03:04:05")
        assert bar.text() == "SFT step 6/10 (60 %) | 3 s/step | 0:12 left | loss 1.5"


def test_a_phase_shows_how_far_it_is(clock):
    with Progress("PPO", 3) as bar:
        report_phase(2, 8, "answers", name="rollout")
        assert bar.text() == "PPO step 0/3 (0 %) | rollout 2/8 answers"
        clock.now += 7.0
        bar.advance()
        assert bar.text() == "PPO step 1/3 (33 %) | 7 s/step | 0:14 left"
        report_phase(1, 4, "batches", name="score")
        assert bar.text() == "PPO step 1/3 (33 %) | score 1/4 batches | 0:14 left"


def test_plain_lines_come_only_when_none_was_printed_for_thirty_seconds(clock, capsys):
    with Progress("SFT", 9) as bar:
        for seconds in (29.0, 2.0, 20.0, 9.5, 1.0):  # at 29, 31, 51, 60.5 and 61.5 seconds
            clock.now += seconds
            bar.advance()
        printed = capsys.readouterr().out.splitlines()
        assert [line.split(" (")[0] for line in printed] == ["SFT step 2/9", "SFT step 5/9"]
        clock.now += 29.0
        bar.line_printed()
        clock.now += 29.0
        bar.advance()
    assert capsys.readouterr().out == "", "another line about the step was printed meanwhile"
