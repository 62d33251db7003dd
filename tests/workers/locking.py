"""A rank that locks folders and lives until it is killed: RENDEZVOUS FOLDER ... Prints one line about each."""

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch.distributed as torch_dist

from dschat_ppo.errors import UserError
from dschat_ppo.session.run_lock import RunLock

rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch_dist.init_process_group("gloo", f"file://{sys.argv[1]}", timedelta(seconds=60), rank=rank, world_size=ranks)
for folder in sys.argv[2:]:
    try:
        RunLock.acquire(Path(folder))
    except UserError as problem:
        print(f"refused: {problem}", flush=True)
    else:
        print("locked", flush=True)
time.sleep(300)
