"""Run a step from `main.py`: parse, train, report how it ended, and return the exit code."""

from __future__ import annotations

import faulthandler
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn

from dschat_ppo.common import phases, ranks, stop_requests
from dschat_ppo.common.exit_codes import (
    DONE,
    HOW_TO_RESUME,
    RANK_LOST,
    exit_code,
    peer_disconnected,
    ran_out_of_memory,
)
from dschat_ppo.common.heartbeat import heartbeat
from dschat_ppo.common.logging import logger
from dschat_ppo.common.processes import open_closed_streams
from dschat_ppo.config.feature_flags import smaller_rollouts
from dschat_ppo.errors import (
    NonFiniteError,
    StopRequested,
    UnhealthyRun,
    UserError,
    safe_text,
)
from dschat_ppo.run import watchdog
from dschat_ppo.run.first_failure import (
    NO_FOLDER,
    FirstFailureRecord,
    open_failure_record,
    remove_left_folders,
)
from dschat_ppo.run.rank_log import log_path, write_to_log

_NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_LOCAL_SIZES = ("LOCAL_SIZE", "LOCAL_WORLD_SIZE")  # of deepspeed, of torchrun
# Only srun sets the third: a batch script also has SLURM_PROCID and SLURM_NTASKS, but is one
# process.
_SLURM = {
    "RANK": "SLURM_PROCID",
    "LOCAL_RANK": "SLURM_LOCALID",
    "WORLD_SIZE": "SLURM_STEP_NUM_TASKS",
}
# below the ports that systems use for outgoing connections
_FIRST_PORT = 15_000
_PORTS = 10_000
_RANK_0_HEAD_START_SECONDS = 20
_CHECKPOINTING = (
    "gradient checkpointing (--gradient_checkpointing; step 3: --actor_gradient_checkpointing)"
)
_SMALLER = "smaller micro-batches (--per_device_train_batch_size; step 3: --micro_batch_tokens)"
_DIVIDED = (
    "ZeRO stage 3 (--zero_stage 3; step 3: --actor_zero_stage 3 --critic_zero_stage 3),"
    " --offload_optimizer"
)
_SMALLER_ROLLOUT = [smaller.advice for smaller in smaller_rollouts()]
_ADVICE = {  # by phase; the cheapest flag first
    "train": f"{_SMALLER}, {_CHECKPOINTING}, {_DIVIDED}",
    "score": (
        "a smaller --micro_batch_tokens, --actor_zero_stage 3 --critic_zero_stage 3,"
        " --offload_reference_model"
    ),
    "rollout": ", ".join(
        [
            *_SMALLER_ROLLOUT,
            "--unpin_actor_parameters at ZeRO stage 3",
            "or shorter rows (--max_answer_seq_len)",
        ]
    ),
    "load models": (
        f"{_DIVIDED}; for the actor's whole weights, which step 3 generates with,"
        f" {' or '.join([*_SMALLER_ROLLOUT, '--unpin_actor_parameters'])}"
    ),
}


def run_step(
    parse: Callable[[Sequence[str]], Any], train: Callable[[Any], None], argv: Sequence[str]
) -> int:
    """Call `train` with the configuration that `parse` makes of `argv`, and return the exit code
    (`common/exit_codes.py`). Whatever it raises is reported here.

    For `UserError`, `NonFiniteError` and `UnhealthyRun` rank 0 prints the message of the exception.
    For any other the first rank that fails prints its rank, phase, step and traceback. Ranks that
    fail later write theirs to their log file alone, and end with the same exit code.
    """
    open_closed_streams()
    phases.reset_phases()
    faulthandler.enable(2)
    try:
        complete_environment(os.environ)
    except UserError as problem:
        _print_error(f"error: {problem}")
        return exit_code(problem)
    stop_requests.install()
    if ranks.local_rank() == 0:
        remove_left_folders()
    record = open_failure_record()
    if record.folder is not NO_FOLDER:
        watchdog.watch_ranks(record)
    try:
        train(parse(argv))
        _leave_process_group()
        return DONE
    except StopRequested as stop:
        record.record(DONE)
        logger().info(str(stop))
        _leave_process_group()
        return DONE
    except (UserError, NonFiniteError, UnhealthyRun) as problem:
        return _report_user_error(record, problem)
    except (Exception, KeyboardInterrupt) as problem:  # noqa: BLE001  nothing above handles it
        return _report_failure(record, problem)
    finally:
        watchdog.stop()
        record.leave()


def _leave_process_group() -> None:
    """Leave the process group, if there is one; without torch, whose import takes seconds, there is
    none."""
    if "torch" in sys.modules:
        from dschat_ppo.common import dist  # not at the top, so that --help does not import torch

        dist.shutdown()


def _report_user_error(
    record: FirstFailureRecord, problem: UserError | NonFiniteError | UnhealthyRun
) -> int:
    """Print its message. The other ranks give rank 0 some time first, because it usually has the
    same error."""
    deadline = time.monotonic() + _RANK_0_HEAD_START_SECONDS
    while not ranks.is_main() and record.read() is None and time.monotonic() < deadline:
        heartbeat()
        time.sleep(0.05)
    first = record.record(exit_code(problem))
    causes = ""
    if problem.__cause__:
        causes = f"\n{''.join(traceback.format_exception(problem)).rstrip()}"
    write_to_log(f"error: {problem}{causes}")
    if first.rank == ranks.rank() or first.code == DONE:
        rank = ""
        if not ranks.is_main():
            rank = f" on rank {ranks.rank()}"
        _print_error(f"error{rank}: {problem}")
    return first.code or exit_code(problem)


def _report_failure(record: FirstFailureRecord, problem: BaseException) -> int:
    """Print message and traceback of `problem` if this rank is the first to fail in the `record` of
    all ranks, else write them to its log file. The loss of another rank needs no traceback. Returns
    the exit code."""
    code = exit_code(problem)
    rank_lost = peer_disconnected(problem) or bool(record.lost_ranks())
    if rank_lost:
        code = RANK_LOST
    first = record.record(code)
    trace = "".join(traceback.format_exception(problem)).rstrip()
    is_reported = first.rank != ranks.rank() or first.hung
    if is_reported and (first.code != DONE or rank_lost):
        write_to_log(f"ends after rank {first.rank}:\n{trace}")
        return first.code
    me = f"rank {ranks.rank()}"
    if rank_lost:
        message = f"{me}: another rank is gone ({phases.where()}): the run ends; {HOW_TO_RESUME}"
    elif isinstance(problem, KeyboardInterrupt):
        message = (
            f"{me} was interrupted a second time ({phases.where()}): the run ends at once;"
            f" {HOW_TO_RESUME}"
        )
    else:
        message = f"{me} failed in {phases.where(' at')}:\n{trace}"
        if ran_out_of_memory(problem):
            phase = phases.current_phase()
            message += f"\nout of memory in phase '{phase}'; what helps, the cheapest first: "
            message += _ADVICE.get(phase, f"{_DIVIDED}, smaller batches")
    if trace in message:
        write_to_log(message)
    else:
        write_to_log(f"{message}\n{trace}")
    log = log_path()
    if log is not None:
        message += f"\n(the logs of all ranks are in {log.parent})"
    _print_error(message)
    return code


def _print_error(text: str) -> None:
    """Write to stderr in one call, so that lines of other ranks do not come between."""
    with suppress(OSError):  # nobody reads any more (a closed pipe or terminal); the log has it
        print(end="", flush=True)
        start = "\n" if sys.stderr.isatty() else ""  # the cursor may be behind a progress bar
        sys.stderr.write(f"{start}{safe_text(text)}\n")
        sys.stderr.flush()


def leave(code: int) -> NoReturn:
    """End the process at once, without tearing the interpreter down: DeepSpeed engines hold process
    groups beyond `destroy_process_group`, and gloo's threads, destroyed during the teardown,
    sometimes abort a finished process."""
    with suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def complete_environment(environment: MutableMapping[str, str]) -> None:
    """Add the variables that the launcher did not set, and check the others. Without a launcher,
    add nothing. Slurm's `srun` sets its own, from which those of `deepspeed` and `torchrun` follow.
    `common/ranks.py` reads them."""
    if (
        "RANK" not in environment
        and "SLURM_STEP_NUM_TASKS" in environment
        and "SLURM_PROCID" in environment
    ):
        environment.update(_from_slurm(environment))
    if not {"RANK", "WORLD_SIZE"} & set(environment):
        return
    missing = [name for name in _NEEDED if name not in environment]
    if missing:
        raise UserError(
            f"the environment has {', '.join(name for name in _NEEDED if name in environment)}, but"
            f" not {', '.join(missing)}: start the run with deepspeed, torchrun or srun, or set"
            " them all"
        )
    rank = _integer_variable(environment, "RANK")
    size = _integer_variable(environment, "WORLD_SIZE")
    local_rank = _integer_variable(environment, "LOCAL_RANK")
    local_size = next(
        (_integer_variable(environment, name) for name in _LOCAL_SIZES if name in environment), None
    )
    if local_size is None and size > 1:
        raise UserError(
            "LOCAL_WORLD_SIZE, the number of ranks of this machine, is not set, but WORLD_SIZE is"
            f" {size}"
        )
    if local_size and (size % local_size or rank % local_size != local_rank):
        raise UserError(
            f"rank {rank} of {size} is number {local_rank} of the {local_size} ranks of its"
            " machine: each machine must have the same number of ranks, in order (hostfile: the"
            " same slots; srun: --ntasks-per-node N --distribution block)"
        )


def _from_slurm(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of a rank that `srun` started, but for those that the user exports."""
    per_node = environment.get("SLURM_STEP_TASKS_PER_NODE", "")
    per_machine = re.fullmatch(r"(\d+)(?:\(x\d+\))?", per_node)  # 8 or 8(x2)
    if per_machine is None:
        raise UserError(
            f"SLURM_STEP_TASKS_PER_NODE={per_node}: each machine must have the same "
            "number of ranks; give srun --ntasks-per-node N"
        )
    if environment["SLURM_STEP_NUM_TASKS"] != per_machine[1] and "MASTER_ADDR" not in environment:
        raise UserError(
            "MASTER_ADDR, the name of the first of several machines, is not set: export"
            ' MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1) before srun'
        )
    port = _FIRST_PORT
    job = environment.get("SLURM_JOB_ID", "")
    if job.isdigit():
        port += int(job) % _PORTS  # two jobs on one machine use different ports
    variables = {
        name: environment[of_slurm] for name, of_slurm in _SLURM.items() if of_slurm in environment
    }
    variables["LOCAL_WORLD_SIZE"] = per_machine[1]
    variables["MASTER_ADDR"] = environment.get("MASTER_ADDR", "127.0.0.1")
    variables["MASTER_PORT"] = environment.get("MASTER_PORT", str(port))
    return variables


def _integer_variable(environment: Mapping[str, str], name: str) -> int:
    text = environment[name]
    if not text.isdigit():
        raise UserError(f"{name}={text}: the launcher must set a number")
    return int(text)
