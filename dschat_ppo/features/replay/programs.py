"""`python -m dschat_ppo.tools.replay FOLDER`: reproduce a NaN or infinity from its repro bundle, in
one process.

FOLDER is a folder under OUTPUT/nonfinite. The command loads the model and the rank's micro-batches
from it, repeats the forward and backward passes in the same number format, and prints what is not
finite: which loss, which module's output first, which gradients. Exit code 0: a number is not
finite again; 1: all numbers are finite; 2: the folder cannot be used.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from dschat_ppo.errors import reading
from dschat_ppo.tools import exit_code_of


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m dschat_ppo.tools.replay",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "folder", type=Path, metavar="FOLDER", help="a folder under OUTPUT/nonfinite"
    )
    parser.add_argument(
        "--dtype",
        choices=("bf16", "fp16", "fp32"),
        help="another number format, with --attn_implementation auto",
    )
    args = parser.parse_args(argv)
    # after the flags are checked: these imports take seconds
    from dschat_ppo.common.logging import quiet_libraries
    from dschat_ppo.features.replay.replayed_step import replay

    changed_flags = []
    if args.dtype:
        changed_flags = ["--dtype", args.dtype, "--attn_implementation", "auto"]

    def replay_folder() -> int:
        # every value in its files decides what is computed
        with reading(f"{args.folder}: cannot be replayed"):
            is_reproduced = replay(args.folder, changed_flags)
        if is_reproduced:
            print("a number is not finite")
            return 0
        print("all numbers are finite")
        return 1

    quiet_libraries()
    return exit_code_of(replay_folder)


TOOLS = {"replay": "reproduce a NaN or infinity from its repro bundle"}
PROGRAMS = {"replay": main}
