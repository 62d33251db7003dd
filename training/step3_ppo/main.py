"""Step 3: PPO with a learned reward.

deepspeed training/step3_ppo/main.py --help
"""

import sys

from dschat_ppo.config.cli import parse
from dschat_ppo.config.steps import PPOConfig
from dschat_ppo.runtime.launch import leave, run_step


def train(config: PPOConfig) -> None:
    from dschat_ppo.ppo.train_ppo import train_ppo  # here: --help need not wait for DeepSpeed

    train_ppo(config)


if __name__ == "__main__":
    leave(run_step(lambda argv: parse("ppo", argv), train, sys.argv[1:]))
