"""Step 3: PPO and related policy gradient methods, with learned, rule-based or remote rewards.

python training/step3_ppo/main.py --help
"""

import sys

from dschat_ppo.common.garbage import lasting_objects
from dschat_ppo.common.logging import set_verbose
from dschat_ppo.config.cli import parse
from dschat_ppo.config.steps import PPOConfig
from dschat_ppo.runtime.launch import leave, run_step


def train(config: PPOConfig) -> None:
    set_verbose(config.console.verbose)
    with lasting_objects():  # not at the top, so that --help and wrong flags do not wait for torch
        from dschat_ppo.ppo.train_ppo import train_ppo

    train_ppo(config)


if __name__ == "__main__":
    leave(run_step(lambda argv: parse("ppo", argv), train, sys.argv[1:]))
