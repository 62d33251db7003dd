"""main.py of a step that pauses, so that a test can interfere at a known place.

slow_main.py PAUSE STEP [flags of the step]

    PAUSE: seconds after each optimizer step; or MACHINE:PHASE:STEP, such as 1:rollout:2, for the ranks of one machine
        to stop within that phase of that training step until they are killed, each with a file `held_RANK` in $TMPDIR
"""

import os
import sys
import time
from contextlib import nullcontext
from pathlib import Path

from dschat_ppo.checkpoint.manager import CheckpointManager
from dschat_ppo.common import phases, ranks
from dschat_ppo.config.cli import parse
from dschat_ppo.ppo import train_ppo
from dschat_ppo.run import launch, output_folder
from dschat_ppo.run.launch import leave, run_step
from dschat_ppo.supervised import sft
from workers.quick import be_quick

PAUSE, STEP, *WORDS = [word for word in sys.argv[1:] if not word.startswith("--local_rank")]
TRAIN = {"sft": sft.train_sft, "ppo": train_ppo.train_ppo}
EVENT = {"rollout": 1, "train": 3}  # of the phase: its begin, or between two updates


class SlowManager(CheckpointManager):
    def save_if_due(self) -> None:
        time.sleep(float(PAUSE))
        super().save_if_due()


class Hold:
    """In place of `phases.block`: stops at an event of a phase, and marks nothing."""

    def __init__(self, phase: str, step: str):
        self.phase, self.event, self.seen, self.place = phase, EVENT[phase], 0, f"phase '{phase}', step {step}"

    def __call__(self, name: str) -> nullcontext:
        self.seen += name == self.phase and phases.where() == self.place
        if self.seen == self.event:
            Path(os.environ["TMPDIR"], f"held_{ranks.rank()}").touch()
            time.sleep(1000)
        return nullcontext()


def train(config) -> None:
    be_quick()
    output_folder._SECONDS = launch._RANK_0_HEAD_START_SECONDS = 3.0  # for a file, or a message, of another machine
    from dschat_ppo.run import session

    if ":" not in PAUSE:
        session.CheckpointManager = SlowManager
    elif int(PAUSE.split(":")[0]) == ranks.rank() // ranks.local_world_size():
        phases.block = Hold(*PAUSE.split(":")[1:])
    TRAIN[STEP](config)


leave(run_step(lambda argv: parse(STEP, argv), train, WORDS))
