"""Batches that a thread makes one step ahead."""

import threading
from contextlib import closing
from dataclasses import replace

import pytest
import torch
from datasets import Dataset
from one_rank import one_rank  # noqa: F401
from test_trainer import NO_CHECKPOINTS, TRAIN, Seen, config_of, make, run

from dschat_ppo.errors import UserError
from dschat_ppo.supervised.objective import collated, one_ahead

CPU = torch.device("cpu")
ROWS = Dataset.from_dict({"number": list(range(10))})
STEPS = [[[0, 1], [2]], [[3], [4]], [[5], [9]]]


def numbers(rows, indices):
    return [rows[index]["number"] for index in indices]


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("collate")]


def test_the_batches_of_each_step_in_order():
    found = [(rows, take()) for rows, take in collated(numbers, ROWS, iter(STEPS), CPU)]
    assert found == [(step, step) for step in STEPS]
    assert not list(collated(numbers, ROWS, [], CPU)) and not threads()


def test_the_next_step_is_made_while_the_current_one_is_used_and_no_other():
    made, used = [], threading.Semaphore(0)

    def make_one(item):
        assert item == 0 or used.acquire(timeout=20), "it was made before the step before was used"
        made.append((item, threading.current_thread().name))
        return item

    for item, take in one_ahead(range(5), make_one, CPU):
        assert take() == item == len(made) - 1
        used.release()
    assert {name for _, name in made} == {"collate_0"}
    drawn = []
    with closing(one_ahead((drawn.append(item) or item for item in range(5)), str, CPU)) as items:
        next(items)
        assert drawn == [0, 1]


def test_an_error_is_raised_where_its_step_is_taken():
    def make_one(item):
        if item == 2:
            raise UserError("a.jsonl: row 7: no")
        return item

    found = []
    with pytest.raises(UserError, match=r"^a.jsonl: row 7: no$"), closing(one_ahead(range(5), make_one, CPU)) as items:
        for _, take in items:
            found.append(take())
    assert found == [0, 1] and not threads()


def test_a_closed_generator_leaves_no_thread():
    with closing(collated(numbers, ROWS, iter(STEPS), CPU)) as steps:
        next(steps)
        assert threads() == ["collate_0"]
    assert not threads()


def test_the_thread_copies_to_the_gpu_of_its_rank(monkeypatch):
    selected = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: selected.append((device, threading.current_thread())))
    device = torch.device("cuda:3")
    assert [take() for _, take in one_ahead([1, 2], str, device)] == ["1", "2"]
    [(chosen, thread)] = selected
    assert chosen == device and thread is not threading.main_thread()


def test_rows_of_a_stream_are_collated_when_they_are_needed():
    class Stream:
        taken = []

        def __getitem__(self, index):
            self.taken.append((index, threading.current_thread()))
            return {"number": index}

    for step, take in collated(numbers, Stream(), iter(STEPS), CPU):
        before = len(Stream.taken)
        assert take() == step and len(Stream.taken) > before
    assert {thread for _, thread in Stream.taken} == {threading.main_thread()}
    assert [index for index, _ in Stream.taken] == [0, 1, 2, 3, 4, 5, 9]


@pytest.mark.usefixtures("one_rank")
def test_training_ends_at_the_step_whose_row_cannot_be_used(tmp_path):
    """The steps before it are made, and their checkpoint can be resumed from."""
    seen = Seen()
    trainer = make(config_of(tmp_path), seen)
    order = [index for step in trainer.steps_left() for part in step for index in part]
    collate, bad = seen.objective.collate, order[4]  # in the third step of two rows each

    def checked(rows, indices):
        if rows is TRAIN and bad in indices:
            raise UserError(f"data.jsonl: row {bad}: cannot be used")
        return collate(rows, indices)

    trainer.objective = replace(seen.objective, collate=checked)
    with pytest.raises(UserError, match=rf"^data.jsonl: row {bad}: cannot be used$"):
        run(trainer, tmp_path, NO_CHECKPOINTS)
    assert trainer.position == (2, 0) and not threads()
