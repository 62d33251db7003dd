"""The number of this rank and the address of rank 0, from the environment variables that the launcher set.

`deepspeed` and `torchrun` set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. Slurm's `srun` sets its
own variables, and this module derives the others from them. All other code reads them through `common/ranks.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, MutableMapping

from dschat_ppo.errors import UserError

_NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_LOCAL_SIZES = ("LOCAL_SIZE", "LOCAL_WORLD_SIZE")  # of deepspeed, of torchrun
# Only srun sets all of these: a batch script also has SLURM_PROCID and SLURM_NTASKS, but is one process.
_SLURM = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE")
_FIRST_PORT, _PORTS = 15_000, 10_000  # below the ports that systems use for outgoing connections


def complete_environment(environment: MutableMapping[str, str]) -> None:
    """Add the variables that the launcher did not set, and check the others. Without a launcher, add nothing."""
    if "RANK" not in environment and "SLURM_STEP_NUM_TASKS" in environment and "SLURM_PROCID" in environment:
        environment.update(_from_slurm(environment))
    if not {"RANK", "WORLD_SIZE"} & set(environment):
        return
    missing = [name for name in _NEEDED if name not in environment]
    if missing:
        raise UserError(
            f"the environment has {', '.join(name for name in _NEEDED if name in environment)}, but not "
            f"{', '.join(missing)}: start the run with deepspeed, torchrun or srun, or set them all"
        )
    rank, size, local_rank = (_number(environment, name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    local_size = next((_number(environment, name) for name in _LOCAL_SIZES if name in environment), None)
    if local_size is None and size > 1:
        raise UserError(f"LOCAL_WORLD_SIZE, the number of ranks of this machine, is not set, but WORLD_SIZE is {size}")
    if local_size and (size % local_size or rank % local_size != local_rank):
        raise UserError(
            f"rank {rank} of {size} is number {local_rank} of the {local_size} ranks of its machine: each machine must "
            "have the same number of ranks, in order (hostfile: the same slots; srun: --ntasks-per-node N "
            "--distribution block)"
        )


def _from_slurm(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of a rank that `srun` started."""
    missing = [name for name in _SLURM if name not in environment]
    if missing:
        raise UserError(
            f"srun started this process, but {', '.join(missing)} is not set: is the environment passed on?"
        )
    size, machine = _number(environment, "SLURM_STEP_NUM_TASKS"), _number(environment, "SLURM_NODEID")
    per_machine = _tasks_per_machine(environment["SLURM_STEP_TASKS_PER_NODE"])
    if machine >= len(per_machine) or len(set(per_machine)) > 1:
        raise UserError(
            f"SLURM_STEP_TASKS_PER_NODE={environment['SLURM_STEP_TASKS_PER_NODE']}: each machine must have the same "
            "number of ranks; give srun --ntasks-per-node N"
        )
    found = {
        "RANK": environment["SLURM_PROCID"],
        "LOCAL_RANK": environment["SLURM_LOCALID"],
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(per_machine[machine]),
        "GROUP_RANK": str(machine),
    }
    if "MASTER_ADDR" not in environment:
        machines = environment.get("SLURM_STEP_NODELIST", environment.get("SLURM_JOB_NODELIST", ""))
        if not machines:
            raise UserError(
                "SLURM_STEP_NODELIST is not set: export MASTER_ADDR=NAME with the name of the first machine"
            )
        found["MASTER_ADDR"] = first_machine(machines)
    if "MASTER_PORT" not in environment:
        job, step = environment.get("SLURM_JOB_ID", "0"), environment.get("SLURM_STEP_ID", "0")
        number = int(job) * 16 + int(step) if job.isdigit() and step.isdigit() else 0
        found["MASTER_PORT"] = str(_FIRST_PORT + number % _PORTS)  # so that two jobs on one machine use different ports
    return found


def first_machine(names: str) -> str:
    """The first name of a list of Slurm, such as "gpu[07-09,12],login" -> "gpu07"."""
    prefix, bracket, rest = re.match(r"([^,\[]*)(\[?)(.*)", names, re.DOTALL).groups()  # type: ignore[union-attr]
    if not bracket:
        return prefix
    inside, _, after = rest.partition("]")
    return prefix + re.split(r"[-,]", inside)[0] + first_machine(after)


def _tasks_per_machine(text: str) -> list[int]:
    """ "2(x3),1" -> [2, 2, 2, 1]."""
    counts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if found is None:
            raise UserError(f"SLURM_STEP_TASKS_PER_NODE={text}: not in the form of Slurm, such as 8(x2)")
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment[name]
    if not text.isdigit():
        raise UserError(f"{name}={text}: the launcher must set a number")
    return int(text)
