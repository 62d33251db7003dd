"""A rank that locks a folder and lives until it is killed: FOLDER RENDEZVOUS. It says what became of it in one line."""

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch.distributed as torch_dist

from dschat_ppo.checkpoint.lock import RunLock
from dschat_ppo.errors import UserError

folder, rendezvous = Path(sys.argv[1]), Path(sys.argv[2])
ranks = int(os.environ["WORLD_SIZE"])
torch_dist.init_process_group(
    "gloo", f"file://{rendezvous}", timedelta(seconds=60), rank=int(os.environ["RANK"]), world_size=ranks
)
try:
    lock = RunLock.acquire(folder)
except UserError as problem:
    print(f"refused: {problem}", flush=True)
else:
    print("locked", flush=True)
    time.sleep(300)
