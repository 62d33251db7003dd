"""`python -m dschat_ppo.tools.export CHECKPOINT OUT`: make Hugging Face folders from a checkpoint.

CHECKPOINT is a checkpoint of any step, such as OUTPUT/checkpoints/step_000012, or the output folder
of a run, whose newest intact checkpoint is taken. The command runs in one process, on the CPU,
whatever the ZeRO stage and the number of ranks of the run. OUT then holds what the run itself would
save at that step: in steps 1 and 2 the model; in step 3 `actor`, `critic` and, if the run averages
the actor's weights, `actor_ema`. A model with LoRA becomes an adapter folder, or is merged if the
run merges it. Configuration and tokenizer come from the model folder from which the run started.

Exit code 0: OUT is complete; 2: the checkpoint or a folder cannot be used; 4: OUT cannot be
written.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from dschat_ppo.common.paths import PPO_ROLES
from dschat_ppo.tools import exit_code_of


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m dschat_ppo.tools.export",
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "checkpoint", type=Path, metavar="CHECKPOINT", help="a checkpoint, or an output folder"
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to make")
    parser.add_argument(
        "--role",
        choices=("model", *PPO_ROLES),
        help="export only this model, to OUT itself (default: all)",
    )
    parser.add_argument(
        "--dtype",
        choices=("bf16", "fp16", "fp32"),
        help="number format (default: as the run saves it)",
    )
    parser.add_argument(
        "--model",
        help="folder or hub name of the model from which the model or actor started, if it "
        "has moved (default: as the run recorded it)",
    )
    parser.add_argument("--critic_model", help="the same for the critic")
    parser.add_argument("--overwrite", action="store_true", help="replace OUT if it exists")
    args = parser.parse_args(argv)
    # after the flags are checked: these imports take seconds
    from dschat_ppo.common.logging import quiet_libraries
    from dschat_ppo.tools.checkpoint_models import export

    quiet_libraries()
    return exit_code_of(lambda: export(args))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
