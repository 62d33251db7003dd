"""Runs steps 1 and 2 with --packing on these ranks and writes what they give.

packing.py FOLDER OUT_FILE
"""

import json
import sys
from pathlib import Path

import torch
from packed_runs import packed_run

from dschat_ppo.common import dist
from dschat_ppo.common.logging import quiet_libraries
from dschat_ppo.runtime.launch import leave
from dschat_ppo.runtime.process_group import init_process_group
from workers.quick import be_quick


def main() -> None:
    be_quick()
    folder, out = Path(sys.argv[-2]), Path(sys.argv[-1])
    quiet_libraries()
    init_process_group()
    torch.set_num_threads(1)
    found = {}
    for task in ("sft", "reward"):
        (folder / task).mkdir(parents=True, exist_ok=True)
        dist.barrier()
        found[task] = packed_run(task, folder / task)
    if dist.is_main():
        out.write_text(json.dumps(found))
    dist.shutdown()
    leave(0)


main()
