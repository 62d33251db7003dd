"""main.py of a step that pauses after each optimizer step, so that a test can interfere at a known place.

slow_main.py SECONDS STEP [flags of the step]
"""

import sys
import time

from dschat_ppo.checkpoint.manager import CheckpointManager
from dschat_ppo.config.cli import parse
from dschat_ppo.ppo import train_ppo
from dschat_ppo.runtime.launch import leave, run_step
from dschat_ppo.supervised import sft
from workers.quick import be_quick

PAUSE, STEP, *WORDS = [word for word in sys.argv[1:] if not word.startswith("--local_rank")]
TRAIN = {"sft": sft.train_sft, "ppo": train_ppo.train_ppo}


class SlowManager(CheckpointManager):
    def save_if_due(self) -> None:
        time.sleep(float(PAUSE))
        super().save_if_due()


def train(config) -> None:
    be_quick()
    from dschat_ppo.session import session

    session.CheckpointManager = SlowManager
    TRAIN[STEP](config)


leave(run_step(lambda argv: parse(STEP, argv), train, WORDS))
