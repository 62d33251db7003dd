"""Step 2 without a reward model: train the policy itself on preference pairs (default: `--objective
dpo`).

python training/step2_dpo/main.py --help
"""

import sys

from dschat_ppo.commands import run_training
from dschat_ppo.run.launch import leave

if __name__ == "__main__":
    leave(run_training("dpo", sys.argv[1:]))
