"""Measures an optimizer step of steps 1 and 2 on the model and the first rows of a run (`--dry_run
--measure`)."""

from __future__ import annotations

from contextlib import closing
from functools import partial
from itertools import islice
from typing import Any

from dschat_ppo.planner.step_time import Measured, usual_seconds
from dschat_ppo.supervised.objective import collated
from dschat_ppo.supervised.trainer import MEASURED_STEPS, SupervisedTrainer

MOST_MICRO_BATCHES = 4  # of one step that is measured


def measure_steps(trainer: SupervisedTrainer[Any]) -> Measured:
    """(micro-batches, seconds), the mean over the first `MEASURED_STEPS` steps: with all
    micro-batches of a step if they are few, else with 1 and with `MOST_MICRO_BATCHES` of them. The
    model trains on them, so that it is of no further use. Collective."""
    objective = trainer.objective
    steps = collated(
        objective.collate,
        trainer.rows.train,
        islice(trainer.steps_left(), MEASURED_STEPS),
        trainer.engine.device,
    )
    with closing(steps):
        batches_of_steps = [(indices, wait_for_batches()) for indices, wait_for_batches in steps]
    accumulation = trainer.fit.gradient_accumulation_steps
    counts = [accumulation]
    if accumulation > MOST_MICRO_BATCHES:
        counts = [1, MOST_MICRO_BATCHES]
    measured = []
    for count in counts:
        seconds = []
        for indices, batches in batches_of_steps:
            # a micro-batch may be divided into several passes
            passes = -(-len(batches) * count // accumulation)
            make_step = partial(trainer.train_step, indices[:passes], batches[:passes])
            seconds.append(usual_seconds(make_step))
        measured.append((count, sum(seconds) / len(seconds)))
    return measured
