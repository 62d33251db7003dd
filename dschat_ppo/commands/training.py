"""A training step from its command line to its exit code.

`training/step*/main.py`, the commands `dschat-sft`, `dschat-reward`, `dschat-dpo` and `dschat-ppo`, and
`python -m dschat_ppo` call `run_training`. The trainers are imported after the flags are parsed, so that `--help` and
wrong flags do not wait for torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from dschat_ppo.common import ranks
from dschat_ppo.common.host_memory import lasting_objects
from dschat_ppo.common.logging import set_verbose
from dschat_ppo.config.cli import parse
from dschat_ppo.config.run_flags import RunFlags
from dschat_ppo.config.steps import StepConfig
from dschat_ppo.run.launch import run_step

STEPS = ("sft", "reward", "dpo", "ppo")


def run_training(step: str, argv: Sequence[str]) -> int:
    """Run a step (one of `STEPS`) on this rank; returns the exit code of the process."""
    return run_step(lambda words: parse(step, words), lambda config: train(step, config), argv)


def train(step: str, config: StepConfig) -> None:
    """Run a step with its parsed flags. With `--dry_run`, rank 0 checks them and the other ranks have nothing to do."""
    set_verbose(config.console.verbose)
    if config.run.dry_run and not ranks.is_main():
        return
    with lasting_objects():
        run = _import_trainer(step)
        from dschat_ppo.html_report.page import reporting
        from dschat_ppo.models.model_files import settings_only
        from dschat_ppo.planner.plan_step import show_memory_plan
    with ExitStack() as stack:
        stack.enter_context(_ranks_of(config.run))
        if config.run.dry_run:
            stack.enter_context(settings_only())
        if ranks.is_main():
            show_memory_plan(config)
            stack.enter_context(reporting(Path(config.run.folder)))
        run(config)


@contextmanager
def _ranks_of(run: RunFlags) -> Iterator[None]:
    """In the block, the number of ranks is `--dry_run_ranks`, if the flag is given: on machines with as many ranks as
    each machine of the launch has, if that has several, else all on one."""
    if run.dry_run_ranks is None:
        yield
        return
    whole, local = run.dry_run_ranks, ranks.local_world_size()
    several = local < ranks.world_size() and whole % local == 0
    values = {"WORLD_SIZE": str(whole), "LOCAL_SIZE": str(local if several else whole)}
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _import_trainer(step: str) -> Callable[[Any], object]:
    if step == "sft":
        from dschat_ppo.supervised.sft import train_sft

        return train_sft
    if step == "ppo":
        from dschat_ppo.ppo.train_ppo import train_ppo

        return train_ppo
    from dschat_ppo.supervised.train_preference import train_preferences

    return train_preferences
