"""Runs a module in a forked rank as `python -m` does: run_module.py MODULE WORDS"""

import os
import runpy
import sys

for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
    os.environ.pop(name, None)
sys.argv = sys.argv[2:]  # without this script and --local_rank
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
