"""Limits of processor time: they end a block, nest, and leave no timer behind."""

import signal
import threading
import time

import pytest

from dschat_ppo.common.time_limit import TimeIsUp, processor_time_limit


def compute(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def test_a_block_ends_at_its_limit_and_leaves_no_timer():
    handler = signal.getsignal(signal.SIGVTALRM)
    with pytest.raises(TimeIsUp), processor_time_limit(0.05):
        compute(5.0)
    assert signal.getsignal(signal.SIGVTALRM) is handler
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)


def test_a_block_still_ends_after_another_one_inside_it():
    with pytest.raises(TimeIsUp), processor_time_limit(0.2):
        with pytest.raises(TimeIsUp), processor_time_limit(0.05):
            compute(5.0)
        compute(5.0)
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)


def test_other_threads_have_no_limit():
    done = []

    def run():
        with processor_time_limit(0.05):
            compute(0.2)
            done.append(True)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert done == [True]
