"""Step 2: train a reward model on preference pairs, or the policy itself (`--objective`).

python training/step2_reward/main.py --help
"""

import sys

from dschat_ppo.commands import run_training
from dschat_ppo.run.launch import leave

if __name__ == "__main__":
    leave(run_training("reward", sys.argv[1:]))
