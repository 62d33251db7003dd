"""`dschat-explain` and `dschat-algorithm`, the programs of this feature."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from dschat_ppo.tools import exit_code_of

EXPLAIN = """`dschat-explain RUN --step 12 [--row 3]`: show what each token of an answer received in
training, and why.

RUN is the output folder of a run of step 3. Without --step the recorded PPO steps are listed,
without --row the recorded answers of the step. Columns: A advantage, V value, R return, ratio of
the policy in the update's forward pass to the one that sampled, clip, KL to the reference, H
entropy in nats, reward. Neither a model nor a GPU is needed.
"""
ALGORITHM = """`dschat-algorithm RUN` or `dschat-algorithm [flags of step 3]`: print a PPO step as
one program of plain PyTorch, as these flags make it.

    dschat-algorithm output/ppo > step.py
    python step.py output/ppo/record/step_000001.safetensors

The program holds the text of the functions that train, without what the flags switch off. Run on
the record of a whole step (--record_steps 1), it computes token rewards, advantages, losses and
their gradients, and prints them beside those of the run. It imports torch and safetensors alone.
"""


def explain_main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="dschat-explain",
        description=EXPLAIN,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="the output folder of a run")
    parser.add_argument("--step", type=int, help="a PPO step")
    parser.add_argument("--row", type=int, help="an answer of the step, by its number")
    parser.add_argument("--update", type=int, help="the row's 1st, 2nd, ... update; default: last")
    parser.add_argument("--tokens", default=":", metavar="FROM:TO", help="some tokens alone")
    parser.add_argument("--thoughts", action="store_true", help="show the tokens of thoughts too")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with colours")
    args = parser.parse_args(argv)

    # after the flags are checked: it imports numpy
    from dschat_ppo.features.explain.explain_command import explain

    return exit_code_of(lambda: explain(args))


def algorithm_main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="dschat-algorithm",
        usage="dschat-algorithm [RUN] [flags of step 3]",
        description=ALGORITHM,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if not argv or argv[0] in ("-h", "--help"):
        parser.print_help()
        return 0

    # after the flags are checked: it imports torch
    from dschat_ppo.features.explain.algorithm_command import print_algorithm

    return exit_code_of(lambda: print_algorithm(argv))


TOOLS = {
    "explain": "show what each token of an answer received in training, and why",
    "algorithm": "print a PPO step as one program of plain PyTorch",
}
PROGRAMS = {"explain": explain_main, "algorithm": algorithm_main}
