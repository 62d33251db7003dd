"""Step 2 without a reward model: train the policy itself on pairs of answers (`--objective dpo` by default).

deepspeed training/step2_dpo/main.py --help
"""

import sys

from dschat_ppo.config.cli import parse
from dschat_ppo.config.steps import PreferenceConfig
from dschat_ppo.runtime.launch import leave, run_step


def train(config: PreferenceConfig) -> None:
    from dschat_ppo.supervised.train_preference import train_preferences  # here: --help need not wait for DeepSpeed

    train_preferences(config)


if __name__ == "__main__":
    leave(run_step(lambda argv: parse("dpo", argv), train, sys.argv[1:]))
