"""Whether the machines of a run share the output folder, which they must, or with `--local_checkpoints` must not."""

from __future__ import annotations

import os
import time
import uuid
from contextlib import suppress
from pathlib import Path

from dschat_ppo.common import dist
from dschat_ppo.common.atomic_files import make_folder
from dschat_ppo.errors import UserError

_SECONDS = 10.0  # for a file on a network file system to appear on another machine
_POLL_SECONDS = 0.2


def check_machine_folders(folder: Path, local_checkpoints: bool) -> None:
    """Rank 0 writes a file in the folder, and the other machines look for it. Collective; nothing on one machine.

    Raises:
        UserError: a machine does not see the file and needs to, or sees it and must not; the same on every rank.
    """
    if dist.machines() == 1:
        return
    name = dist.broadcast_object(f".shared_{uuid.uuid4().hex}")  # a new name: no machine has looked for it before
    is_written = False
    if dist.is_main():
        with suppress(OSError):  # the lock, which is taken next, reports what is wrong with the folder
            make_folder(folder)
            (folder / name).touch()
            is_written = True
    if not dist.broadcast_object(is_written):
        return
    mine = None
    if dist.local_rank() == 0 and not dist.is_main():
        mine = (os.uname().nodename, _appears(folder / name, 0.0 if local_checkpoints else _SECONDS))
    others = [found for found in dist.gather_objects(mine) if found is not None]
    if dist.is_main():
        (folder / name).unlink(missing_ok=True)
    first = dist.broadcast_object(os.uname().nodename)
    for host, is_shared in others:
        if not is_shared and not local_checkpoints:
            raise UserError(
                f"--output_dir {folder}: machine {host} does not see what machine {first} writes there: name a folder "
                "that all machines share, or add --local_checkpoints to keep each machine's files on its own disk"
            )
        if is_shared and local_checkpoints:
            raise UserError(
                f"--output_dir {folder}: machines {first} and {host} share it: leave out --local_checkpoints, or "
                "name a folder on the machine's own disk"
            )


def _appears(path: Path, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True
