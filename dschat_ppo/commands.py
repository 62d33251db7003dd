"""A training step from its command line to its exit code, and the commands that start its ranks.

`training/step*/main.py` call `run_training`: the process is the only rank, or one of those of
`deepspeed` or another launcher. The commands `dschat-sft`, `dschat-reward`, `dschat-dpo` and
`dschat-ppo`, and `python -m dschat_ppo`, call `start_ranks`. Without a launcher that starts one
rank for each GPU of this machine, through the program that `deepspeed` starts on each machine;
without a GPU, one rank in this process. `--num_accelerators N` sets the number of ranks. After
Ctrl-C a single rank returns 130 and the launcher 1, so that a shell does not go on with the next
step.
"""

from __future__ import annotations

import base64
import json
import os
import pkgutil
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path

from dschat_ppo.common import stop_requests
from dschat_ppo.common.exit_codes import INTERRUPTED, exit_code
from dschat_ppo.common.host_memory import lasting_objects
from dschat_ppo.common.logging import logger, set_verbose
from dschat_ppo.common.processes import open_closed_streams
from dschat_ppo.common.ranks import free_port, is_main, local_world_size, world_size
from dschat_ppo.config.cli import parse, unused_flag_notes
from dschat_ppo.config.flag_parser import FlagParser
from dschat_ppo.config.run_flags import RunFlags
from dschat_ppo.config.step_config import StepConfig
from dschat_ppo.errors import UserError
from dschat_ppo.features import hooks
from dschat_ppo.run.launch import run_step
from dschat_ppo.run.rank_log import keep_early_lines
from dschat_ppo.run.unused_gpu import cpu_is_asked_for

# imported after the flags are parsed, so that `--help` and wrong flags do not wait for torch
TRAINERS = {
    "sft": "dschat_ppo.supervised.sft:train_sft",
    "reward": "dschat_ppo.supervised.train_preference:train_preferences",
    "dpo": "dschat_ppo.supervised.train_preference:train_preferences",
    "ppo": "dschat_ppo.ppo.train_ppo:train_ppo",
}
FLAGS = ("--num_accelerators", "--num-accelerators", "--num_gpus", "--num-gpus")


def run_training(step: str, argv: Sequence[str]) -> int:
    """Run a step (of `TRAINERS`) on this rank; returns the exit code of the process."""
    return run_step(lambda words: parse(step, words), lambda config: train(step, config), argv)


def train(step: str, config: StepConfig) -> None:
    """Run a step with its parsed flags. With `--dry_run`, rank 0 checks them and the other ranks
    have nothing to do, unless they measure (`--measure`)."""
    set_verbose(config.console.verbose)
    if config.run.only_checks and not is_main():
        return
    with lasting_objects():
        run = pkgutil.resolve_name(TRAINERS[step])
        from dschat_ppo.html_report.page import reporting
        from dschat_ppo.models.model_folders import settings_only
        from dschat_ppo.planner.number_format import with_dtype
        from dschat_ppo.planner.plan_step import show_memory_plan
        from dschat_ppo.run.process_group import let_segments_grow
        from dschat_ppo.run.session import join_ranks
    with ExitStack() as stack:
        stack.enter_context(_ranks_of(config.run))
        if config.run.only_checks:
            stack.enter_context(settings_only())
        if is_main():
            keep_early_lines()
        join_ranks(config)
        config = with_dtype(config)  # which part of the flags have an effect depends on it
        if is_main():
            for line in unused_flag_notes(step, config):
                logger().info(f"note: {line}")
            let_segments_grow()  # the plan asks for the size of the GPU
            with settings_only():  # the ranks fetch the weights together, later
                show_memory_plan(config)
            if not config.run.dry_run:
                stack.enter_context(reporting(Path(config.run.folder)))
        run(config)
    if not config.validate_only:
        # what features do with the saved models of the run; collective
        for end_training in hooks("runs.end_training"):
            end_training(config)


def _ranks_of(run: RunFlags) -> AbstractContextManager[object]:
    """In the block, the number of ranks is `--dry_run_ranks`, if the flag is given: on machines
    with as many ranks as each machine of the launch has, if that has several, else all on one."""
    if run.dry_run_ranks is None:
        return nullcontext()
    from unittest.mock import patch  # not at the top, so that --help does not wait for it

    ranks = run.dry_run_ranks
    ranks_of_machine = ranks
    has_several_machines = local_world_size() < world_size()
    if has_several_machines and ranks % local_world_size() == 0:
        ranks_of_machine = local_world_size()
    return patch.dict(os.environ, WORLD_SIZE=str(ranks), LOCAL_SIZE=str(ranks_of_machine))


def take_num_accelerators(argv: Sequence[str]) -> tuple[int | None, list[str]]:
    """(the value of `--num_accelerators N`, or None; the other words)."""
    parser = FlagParser(add_help=False, allow_abbrev=False)
    parser.add_argument(*FLAGS, type=int, metavar="N", help="number of ranks, 1 or more")
    parsed, words = parser.parse_known_args(argv)
    count: int | None = parsed.num_accelerators
    if count is not None and count < 1:
        raise UserError(f"--num_accelerators {count}: give the number of ranks, 1 or more")
    return count, words


def start_ranks(step: str, argv: Sequence[str]) -> int:
    """Run a step (of `TRAINERS`) on as many ranks as `argv` or the devices say; returns the exit
    code. Replaces this process by DeepSpeed's launcher if there are several."""
    open_closed_streams()
    try:
        count, words = take_num_accelerators(argv)
        if "RANK" in os.environ or os.environ.get("SLURM_STEP_NUM_TASKS", "1") != "1":
            if count is not None:
                raise UserError(
                    "--num_accelerators: a launcher has started this rank, and sets the number of"
                    " ranks"
                )
            return run_training(step, words)
        config = parse(step, words)  # before any rank starts, so that each error is printed once
        ranks = number_of_ranks(count)
    except UserError as problem:
        print(f"error: {problem}", file=sys.stderr)
        return exit_code(problem)
    if config.run.only_checks and config.run.dry_run_ranks is None:
        words += ["--dry_run_ranks", str(ranks)]
    if config.run.only_checks or ranks == 1:
        try:
            code = run_training(step, words)
        except KeyboardInterrupt:  # before the run takes it for a request to stop
            return INTERRUPTED
        if stop_requests.interrupted():
            return INTERRUPTED
        return code
    log_level = "warning"
    if config.console.verbose:
        log_level = "info"
    command = launch_command(step, words, ranks, log_level)
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    # more threads than cores only spin
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // ranks)))
    return os.execv(command[0], command)


def number_of_ranks(count: int | None) -> int:
    """The ranks of this machine: `count` (`--num_accelerators`), at most its GPUs if it has any;
    None: all GPUs, or one rank."""
    gpus = count_gpus()
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        # DeepSpeed's launcher would show the ranks the GPUs again
        os.environ["DS_ACCELERATOR"] = "cpu"
    if gpus and count is not None and count > gpus:
        raise UserError(
            f"--num_accelerators {count}: this machine has {gpus} GPUs (DS_ACCELERATOR=cpu uses the"
            " CPU)"
        )
    return count or gpus or 1


def count_gpus() -> int:
    """GPUs that a run may use: `CUDA_VISIBLE_DEVICES` limits them, and `DS_ACCELERATOR=cpu` asks
    for the CPU."""
    if cpu_is_asked_for():
        return 0
    import torch  # not at the top, so that --help and wrong flags do not wait for it

    return torch.cuda.device_count()


def launch_command(step: str, words: Sequence[str], ranks: int, log_level: str) -> list[str]:
    """The command that starts the ranks of one machine, as the `deepspeed` command does."""
    devices = json.dumps({"localhost": visible_devices(ranks)})
    world = base64.urlsafe_b64encode(devices.encode()).decode()
    port = os.environ.get("MASTER_PORT") or str(free_port())
    launcher = [sys.executable, "-u", "-m", "deepspeed.launcher.launch"]
    launcher += [f"--world_info={world}", f"--master_port={port}", f"--log_level={log_level}"]
    return [*launcher, "--module", "dschat_ppo", step, *words]


def visible_devices(ranks: int) -> list[int | str]:
    """The first `ranks` devices, as DeepSpeed's launcher names them."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names: list[int | str] = []
    if named not in ("", "-1"):
        names += [name.strip() for name in named.split(",")]
    if len(names) >= ranks:
        return names[:ranks]
    return list(range(ranks))
