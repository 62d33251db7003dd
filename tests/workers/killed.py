"""Joins the ranks, reduces once, and dies by SIGKILL.

killed.py OUT_FILE
"""

import json
import os
import signal
import sys
from pathlib import Path

import deepspeed
import torch

from dschat_ppo.common import dist
from dschat_ppo.run.process_group import init_process_group


def main() -> None:
    device = init_process_group()
    value = torch.full((8,), float(dist.rank() + 1), device=device)
    deepspeed.comm.all_reduce(value)  # through the buffers in shared memory, where DeepSpeed has them
    prefix = (
        f"/dev/shm/deepspeed_allreduce_buffer_{os.getuid()}_{os.environ['MASTER_ADDR']}_{os.environ['MASTER_PORT']}"
    )
    names = [f"{prefix}_{rank}" for rank in range(dist.world_size())]
    if dist.is_main():
        found = {"ranks": dist.world_size(), "sum": float(value[0]), "expected": names}
        Path(sys.argv[-1]).write_text(json.dumps(found))
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


main()
