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
from dschat_ppo.supervised.objective import collated

CPU = torch.device("cpu")
ROWS = Dataset.from_dict({"number": list(range(10))})
STEPS = [[[0, 1], [2]], [[3], [4]], [[5], [9]]]
ONE_ROW_STEPS = [[[row]] for row in range(5)]


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

    def make_one(rows, indices):
        assert indices == [0] or used.acquire(timeout=20), (
            "it was made before the step before was used"
        )
        made.append((indices, threading.current_thread().name))
        return indices

    for step, take in collated(make_one, ROWS, ONE_ROW_STEPS, CPU):
        assert take() == step == [[len(made) - 1]]
        used.release()
    assert {name for _, name in made} == {"collate_0"}
    drawn = []
    with closing(
        collated(numbers, ROWS, (drawn.append(step) or step for step in ONE_ROW_STEPS), CPU)
    ) as steps:
        next(steps)
        assert drawn == [[[0]], [[1]]] and threads() == ["collate_0"]
    assert not threads(), "of a closed generator"


def test_an_error_is_raised_where_its_step_is_taken():
    def make_one(rows, indices):
        if indices == [2]:
            raise UserError("a.jsonl: row 7: no")
        return indices

    found, steps = [], collated(make_one, ROWS, ONE_ROW_STEPS, CPU)
    with pytest.raises(UserError, match=r"^a.jsonl: row 7: no$"), closing(steps):
        for _, take in steps:
            found += take()
    assert found == [[0], [1]] and not threads()


def test_the_thread_copies_to_the_gpu_of_its_rank(monkeypatch):
    selected = []
    monkeypatch.setattr(
        torch.cuda,
        "set_device",
        lambda device: selected.append((device, threading.current_thread())),
    )
    device = torch.device("cuda:3")
    assert [take() for _, take in collated(numbers, ROWS, STEPS[:2], device)] == STEPS[:2]
    [(chosen, thread)] = selected
    assert chosen == device and thread is not threading.main_thread()


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
