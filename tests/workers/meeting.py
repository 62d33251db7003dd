"""Ranks that begin a step at the same instant as those of another launch: meeting.py FLAGS

Each rank leaves FOLDER/../ready_PID, where FOLDER is `--output_dir`, and begins when there are $RANKS of them, after
its delay in $DELAYS. FOLDER/met_PID then holds rank and launcher of each rank of its group.
"""

import json
import os
import re
import sys
import time
from pathlib import Path

import deepspeed  # noqa: F401  (before the instant)
import torch.distributed as torch_dist

from dschat_ppo.common import dist
from dschat_ppo.config.cli import parse
from dschat_ppo.config.steps import SFTConfig
from dschat_ppo.runtime.launch import leave, run_step
from dschat_ppo.session import session


def train(config: SFTConfig) -> None:
    folder = Path(config.run.folder)
    (folder.parent / f"ready_{os.getpid()}").touch()
    while len(list(folder.parent.glob("ready_*"))) < int(os.environ["RANKS"]):
        time.sleep(0.001)
    time.sleep(json.loads(os.environ["DELAYS"])[dist.rank()])
    session.begin_run("sft", config, [])
    members = dist.gather_objects((dist.rank(), os.getppid()))
    (folder / f"met_{os.getpid()}").write_text(json.dumps(members))
    torch_dist.barrier()
    time.sleep(20)  # the other launch ends meanwhile
    torch_dist.new_group()
    torch_dist.barrier()


if __name__ == "__main__":
    words = [word for word in sys.argv[1:] if not re.match("--local_rank", word)]
    leave(run_step(lambda argv: parse("sft", argv), train, words))
