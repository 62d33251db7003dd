"""Runs a module in a forked rank as `python -m` does, or a file as `python FILE`: run_module.py
MODULE|FILE WORDS"""

import os
import runpy
import sys
from pathlib import Path

for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
    os.environ.pop(name, None)
sys.argv = sys.argv[2:]  # without this script and --local_rank
if sys.argv[0].endswith(".py"):
    sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
    runpy.run_path(sys.argv[0], run_name="__main__")
else:
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
