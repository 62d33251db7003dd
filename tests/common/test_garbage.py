"""The garbage collector and objects that last."""

import gc
import weakref

import pytest

from dschat_ppo.common.garbage import lasting_objects


class Cycle:
    def __init__(self):
        self.itself = self


@pytest.fixture(autouse=True)
def unfrozen():
    yield
    gc.enable()


def test_inside_the_block_nothing_is_collected_and_its_objects_are_not_searched_later():
    before = gc.get_freeze_count()
    with lasting_objects():
        assert not gc.isenabled()
        kept = weakref.ref(Cycle())
    assert gc.isenabled()
    assert gc.get_freeze_count() > before
    gc.collect()
    assert kept() is not None, "it is in the permanent generation"


def test_objects_made_after_the_block_are_collected():
    with lasting_objects():
        pass
    made = weakref.ref(Cycle())
    gc.collect()
    assert made() is None


def test_a_collector_that_was_off_stays_off():
    gc.disable()
    with pytest.raises(ImportError), lasting_objects():
        raise ImportError
    assert not gc.isenabled()
