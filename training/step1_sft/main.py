"""Step 1: supervised fine-tuning.

python training/step1_sft/main.py --help
"""

import sys

from dschat_ppo.common.garbage import lasting_objects
from dschat_ppo.common.logging import set_verbose
from dschat_ppo.config.cli import parse
from dschat_ppo.config.steps import SFTConfig
from dschat_ppo.runtime.launch import leave, run_step


def train(config: SFTConfig) -> None:
    set_verbose(config.console.verbose)
    with lasting_objects():  # not at the top, so that --help and wrong flags do not wait for torch
        from dschat_ppo.supervised.sft import train_sft

    train_sft(config)


if __name__ == "__main__":
    leave(run_step(lambda argv: parse("sft", argv), train, sys.argv[1:]))
