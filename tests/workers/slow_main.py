"""main.py of step 1 that pauses, so that a test can interfere at a known place.

slow_main.py PAUSE [flags of the step]

    PAUSE: seconds after each optimizer step
"""

import sys
import time

from dschat_ppo.checkpoint.manager import CheckpointManager
from dschat_ppo.config.cli import parse
from dschat_ppo.run import launch, output_folder
from dschat_ppo.run.launch import leave, run_step
from dschat_ppo.supervised import sft
from workers.quick import be_quick

PAUSE, *WORDS = [word for word in sys.argv[1:] if not word.startswith("--local_rank")]


class SlowManager(CheckpointManager):
    def save_if_due(self) -> None:
        time.sleep(float(PAUSE))
        super().save_if_due()


def train(config) -> None:
    be_quick()
    # for a file, or a message, of another machine
    output_folder._SECONDS = launch._RANK_0_HEAD_START_SECONDS = 3.0
    from dschat_ppo.run import session

    session.CheckpointManager = SlowManager
    session.join_ranks(config)
    sft.train_sft(config)


leave(run_step(lambda argv: parse("sft", argv), train, WORDS))
