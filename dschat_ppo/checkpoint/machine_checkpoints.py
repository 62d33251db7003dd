"""`--local_checkpoints`: each machine keeps its part of a checkpoint on its own disk. Find the newest complete one."""

from __future__ import annotations

import os
import re
from collections.abc import Container, Sequence
from dataclasses import dataclass
from pathlib import Path

from dschat_ppo.checkpoint.folder import CheckpointFolder
from dschat_ppo.checkpoint.manifest import Manifest, damage
from dschat_ppo.common import dist
from dschat_ppo.common.logging import logger
from dschat_ppo.errors import UserError

_WAY_OUT = "restore it from a copy, or start from scratch with --overwrite_output_dir or another --output_dir"


@dataclass(frozen=True)
class HeldCheckpoint:
    """A machine's part of a checkpoint. `saved_at` is the same on all machines; `ranks` wrote its files."""

    name: str
    saved_at: str
    ranks: tuple[int, ...]
    world_size: int


@dataclass(frozen=True)
class HeldByMachine:
    """The checkpoints in the output folder of a machine: its intact parts, oldest first, and faults of damaged ones."""

    host: str
    ranks: tuple[int, ...]
    parts: tuple[HeldCheckpoint, ...]
    faults: tuple[str, ...]

    @property
    def title(self) -> str:
        """ "machine beta (ranks 2, 3)"."""
        return f"machine {self.host} ({'ranks' if len(self.ranks) > 1 else 'rank'} {', '.join(map(str, self.ranks))})"


def newest_on_all_machines(output: Path, named: str | None = None) -> str | None:
    """Name of the newest checkpoint whose parts are intact on all machines; None: no machine has any. Collective.
    `named`: the folder of the only checkpoint to use; then its path is returned. If machines have checkpoints, but none
    has all its parts, every rank raises the same `UserError`."""
    refused: dict[str, str] = {}  # name -> what is broken
    while True:
        held = [found for found in dist.gather_objects(_held(output, named, refused)) if found is not None]
        name = choose(held, output)
        if name is None and refused:
            raise UserError(f"--output_dir {output} --local_checkpoints: {next(iter(refused.values()))}; {_WAY_OUT}")
        if name is None:
            return None
        place = CheckpointFolder(output).root / name
        faults = dist.gather_objects(damage(place) if dist.local_rank() == 0 else None)
        broken = [f"{place} on rank {rank}'s machine: {fault}" for rank, fault in enumerate(faults) if fault]
        if not broken:
            _log_faults(held, name)
            return name
        if named is not None:
            raise UserError(f"--resume {named}: {broken[0]}")
        logger().warning(f"checkpoint {'; '.join(broken)}")
        refused[name] = broken[0]


def choose(held: Sequence[HeldByMachine], output: Path) -> str | None:
    """The newest checkpoint for which each machine has the files of its ranks; None: no machine has any. The
    `UserError`, if there are only parts, names the machine without its part."""
    if not any(machine.parts or machine.faults for machine in held):
        return None
    size = sum(len(machine.ranks) for machine in held)
    problem = ""
    newest = sorted({part.name for machine in held for part in machine.parts}, key=_position, reverse=True)
    for name in newest:
        parts = [next((part for part in machine.parts if part.name == name), None) for machine in held]
        fault = _fault(name, held, parts, size)
        if fault is None:
            return name
        problem = problem or fault
    if not problem:  # only damaged ones
        machine = next(machine for machine in held if machine.faults)
        problem = f"{machine.title}: {machine.faults[-1]}"
    raise UserError(f"--output_dir {output} --local_checkpoints: {problem}; {_WAY_OUT}")


def _position(name: str) -> list[int]:
    """[step] or [step, update] of a checkpoint's name, which orders checkpoints: large steps have more digits."""
    return [int(number) for number in re.findall(r"\d+", Path(name).name)]


def _fault(name: str, held: Sequence[HeldByMachine], parts: Sequence[HeldCheckpoint | None], size: int) -> str | None:
    """Why the parts do not form a checkpoint of these machines; None: they do."""
    present = [part for part in parts if part is not None]
    if present[0].world_size != size:
        return (
            f"{name} was saved by {present[0].world_size} ranks, and this run has {size}, which needs a shared folder"
        )
    for machine, part in zip(held, parts, strict=True):
        if part is None:
            there = f"its newest is {machine.parts[-1].name}" if machine.parts else "its disk has no checkpoint"
            reason = machine.faults[-1] if machine.faults else there
            return f"the part of {machine.title} of checkpoint {name} is missing: {reason}"
        if part.saved_at != present[0].saved_at:
            return f"{name} on {machine.title} is of another run than on {held[0].title}"
        if not set(machine.ranks) <= set(part.ranks):
            return (
                f"{machine.title} has the files of ranks {', '.join(map(str, part.ranks))} of checkpoint {name}: list "
                "the machines in the order of the saved run"
            )
    return None


def _held(output: Path, named: str | None, refused: Container[str]) -> HeldByMachine | None:
    """The parts on this machine, checked by size and manifest; None on all ranks but the first of the machine."""
    if dist.local_rank() != 0:
        return None
    folder = CheckpointFolder(output)
    names = [named] if named is not None else [name for name in folder.names() if name not in refused]
    parts, faults = [], []
    for name in names:
        fault = damage(folder.root / name, checksums=False)
        if fault is not None:
            faults.append(f"{folder.root / name}: {fault}")
            continue
        manifest = Manifest.read(folder.root / name)
        ranks = range(manifest.world_size) if manifest.ranks is None else manifest.ranks
        parts.append(HeldCheckpoint(name, manifest.saved_at, tuple(ranks), manifest.world_size))
    mine = range(dist.rank(), dist.rank() + dist.local_world_size())
    return HeldByMachine(os.uname().nodename, tuple(mine), tuple(parts), tuple(faults))


def _log_faults(held: Sequence[HeldByMachine], name: str) -> None:
    """Warn of damaged parts, and of checkpoints that are newer than the one that is used."""
    for machine in held:
        for fault in machine.faults:
            logger().warning(f"{machine.title}: checkpoint {fault}")
        for part in machine.parts:
            if _position(part.name) > _position(name):
                logger().warning(f"{machine.title}: checkpoint {part.name} is not on all machines; {name} is used")
