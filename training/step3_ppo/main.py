"""Step 3: PPO and related policy gradient methods, with learned, rule-based or remote rewards.

python training/step3_ppo/main.py --help
"""

import sys

from dschat_ppo.commands import run_training
from dschat_ppo.run.launch import leave

if __name__ == "__main__":
    leave(run_training("ppo", sys.argv[1:]))
