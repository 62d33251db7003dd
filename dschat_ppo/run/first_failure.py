"""The first-failure record of a machine, through which its ranks still communicate when the process
group is broken, or does not exist yet."""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from dschat_ppo.common import ranks
from dschat_ppo.common.owned_folders import owned_name, ownerless_folders, remove_tree
from dschat_ppo.common.processes import find_process
from dschat_ppo.rewards import sandbox

# files in the folder
FAILURE = "failure"
STOP = "stop"
_RECORDS = "dschat_ppo"  # the start of the names of the folders
NO_FOLDER = Path(os.devnull, "none")  # in which nothing can be read or written


@dataclass(frozen=True)
class FirstFailure:
    """How a run ends, by the first rank that knows: its rank, the exit code (0: stopped on
    request), and whether it hangs."""

    rank: int
    code: int
    hung: bool


class FirstFailureRecord:
    """A small folder that the ranks of one machine share from start to end. Each running rank has a
    file in it, and the last one to leave removes it. What cannot be read or written (`NO_FOLDER`, a
    full disk) costs only what the ranks tell each other: each then reports its own failure."""

    def __init__(self, folder: Path = NO_FOLDER):
        self.folder = folder
        self._failure: FirstFailure | None = None  # remains valid when the folder is removed

    def record(self, code: int, hung: bool = False) -> FirstFailure:
        """Record a failure of this rank, unless there is one; returns the first one."""
        of_this_rank = FirstFailure(ranks.rank(), code, hung)
        draft = self.folder / f"draft_{ranks.rank()}_{time.monotonic_ns()}"
        with suppress(OSError):  # another rank was first
            draft.write_text(json.dumps(asdict(of_this_rank)), encoding="ascii")
            # fails if it exists, and is never visible half written
            os.link(draft, self.folder / FAILURE)
        self._failure = self.read() or of_this_rank
        return self._failure

    def read(self) -> FirstFailure | None:
        """The first failure of the ranks of this machine; None if there is none yet."""
        if self._failure is None:
            with suppress(OSError):
                text = (self.folder / FAILURE).read_text(encoding="ascii")
                self._failure = FirstFailure(**json.loads(text))
        return self._failure

    def lost_ranks(self) -> list[int]:
        """Ranks of this machine whose process ended without `leave`. Those of other machines are
        not known."""
        return sorted(rank for rank, runs in self._is_running().items() if not runs)

    def request_stop(self) -> None:
        """Tell the other ranks of this machine that this rank received a stop request."""
        with suppress(OSError):  # they learn of it at the next checkpoint opportunity
            (self.folder / STOP).touch()

    def stop_requested(self) -> bool:
        """Whether a rank of this machine received a stop request."""
        return (self.folder / STOP).exists()

    def mark_progress(self) -> None:
        """Note that this rank makes progress now."""
        with suppress(OSError):
            os.utime(self.folder / f"rank_{ranks.rank()}")

    def seconds_since_progress(self) -> float:
        """Seconds since any rank of this machine made progress; infinity if unknown."""
        latest = -math.inf
        for path in self._rank_files():
            with suppress(OSError):  # the rank leaves at this moment
                latest = max(latest, path.stat().st_mtime)
        return time.time() - latest

    def leave(self) -> None:
        """Remove this rank, which ends in order. The last one removes the folder."""
        with suppress(OSError):
            (self.folder / f"rank_{ranks.rank()}").unlink()
        if not any(self._is_running().values()):
            shutil.rmtree(self.folder, ignore_errors=True)

    def _is_running(self) -> dict[int, bool]:
        """Rank -> whether its process runs, for all ranks that have not left."""
        is_running = {}
        for path in self._rank_files():
            # it leaves at this moment; or a power loss took the content
            with suppress(OSError, ValueError):
                pid, started = map(int, path.read_text(encoding="ascii").split())
                process = find_process(pid)
                runs = process is not None and process.started == started and not process.ended
                is_running[int(path.name.removeprefix("rank_"))] = runs
        return is_running

    def _rank_files(self) -> list[Path]:
        with suppress(OSError):  # the last rank removes the folder at this moment
            return list(self.folder.glob("rank_*"))
        return []


def open_failure_record() -> FirstFailureRecord:
    """Add this rank to the record of its machine and launch. Without other ranks, /proc or a
    temporary folder, each rank reports its own failures."""
    launcher = find_process(os.getppid())
    this_process = find_process(os.getpid())
    if ranks.world_size() == 1 or launcher is None or this_process is None:
        return FirstFailureRecord()
    # the same for all ranks of one launch on this machine, and for no other launch
    address = os.environ.get("MASTER_ADDR", "")
    port = os.environ.get("MASTER_PORT", "")
    try:
        name = f"{owned_name(_RECORDS, os.getppid())}{address}_{port}".replace("/", "_")
        # raises where no temporary folder can be written
        folder = Path(tempfile.gettempdir(), name)
        folder.mkdir(mode=0o700, exist_ok=True)
        draft = folder / f"draft_{ranks.rank()}"
        draft.write_text(f"{os.getpid()} {this_process.started}", encoding="ascii")
        draft.rename(folder / f"rank_{ranks.rank()}")
    except OSError:
        return FirstFailureRecord()
    return FirstFailureRecord(folder)


def remove_left_folders() -> None:
    """Remove the temporary folders that killed runs and their sandboxes left on this machine."""
    with suppress(OSError):  # no /proc, or no temporary folder
        folders = ownerless_folders(sandbox.FOLDERS)
        for folder in ownerless_folders(_RECORDS):
            # ranks may still run for a moment after their launcher
            if not any(FirstFailureRecord(folder)._is_running().values()):
                folders.append(folder)
        remove_tree(folders)
