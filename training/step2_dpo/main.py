"""Step 2 without a reward model: train the policy itself on preference pairs (default: `--objective dpo`).

python training/step2_dpo/main.py --help
"""

import sys

from dschat_ppo.common.garbage import lasting_objects
from dschat_ppo.common.logging import set_verbose
from dschat_ppo.config.cli import parse
from dschat_ppo.config.steps import PreferenceConfig
from dschat_ppo.runtime.launch import leave, run_step


def train(config: PreferenceConfig) -> None:
    set_verbose(config.console.verbose)
    with lasting_objects():  # not at the top, so that --help and wrong flags do not wait for torch
        from dschat_ppo.supervised.train_preference import train_preferences

    train_preferences(config)


if __name__ == "__main__":
    leave(run_step(lambda argv: parse("dpo", argv), train, sys.argv[1:]))
