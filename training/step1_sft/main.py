"""Step 1: supervised fine-tuning.

python training/step1_sft/main.py --help
"""

import sys

from dschat_ppo.commands import run_training
from dschat_ppo.run.launch import leave

if __name__ == "__main__":
    leave(run_training("sft", sys.argv[1:]))
