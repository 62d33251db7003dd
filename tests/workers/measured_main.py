"""main.py of step 1 on a processor whose products take a given time.

measured_main.py SECONDS [flags of the step]

    SECONDS: of bf16, where fp32 takes 1
"""

import sys

from dschat_ppo.commands import run_training
from dschat_ppo.planner import number_format
from dschat_ppo.run.launch import leave

WORDS = [word for word in sys.argv[1:] if not word.startswith("--local_rank")]
SECONDS = {"bf16": float(WORDS[0]), "fp32": 1.0}
number_format.time_products = lambda hidden, inner: SECONDS
number_format._multiplies_bf16 = lambda: True
leave(run_training("sft", WORDS[1:]))
