"""Runs of tests are in bf16 unless they say otherwise: `--dtype auto` measures the processor, which
takes time and gives other results on other machines."""

from dschat_ppo.config.cli import STEPS
from dschat_ppo.config.run_flags import RunFlags

REAL_DEFAULT = {"dtype": RunFlags("out").dtype}  # for tests that compare defaults


def use_bf16_by_default() -> None:
    """In this process, and in those that it forks."""
    for step in STEPS.values():
        step.own_defaults["dtype"] = "bf16"
