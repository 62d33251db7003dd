"""Exit codes, and the board on which the ranks of a machine leave word when the process group no longer carries any."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import shutil
import socket
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from dschat_ppo.common import dist
from dschat_ppo.errors import StopRequested, StorageError, UserError
from dschat_ppo.runtime.processes import look_up

DONE = 0  # finished, or stopped on request with everything saved
UNEXPECTED = 1  # an exception that nothing provides for; also a second interrupt
USER_ERROR = 2  # the user's to mend
NOT_FINITE = 3  # numbers that are not finite
NOT_WRITTEN = 4  # the disk is full, or the output may not be written
RANK_LOST = 5  # a rank hung, or is gone without a word

TO_GO_ON = "run the same command again to go on from the newest checkpoint"

_CANNOT_WRITE = tuple(os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT, errno.EROFS))
_OWN_FOLDERS = f"dschat_ppo_{os.getuid()}_{socket.gethostname()}_"  # machines may share TMPDIR, but not processes
# What gloo, NCCL and the store of torch.distributed say when the process at the other end has ended.
_OTHER_END_IS_GONE = (
    "Connection closed by peer", "Connection reset by peer", "Connection refused", "Broken pipe", "Socket closed",
    "recvValue failed", "failed to recv", "Connection was likely closed", "remote process exited", "ncclRemoteError",
    "ncclSystemError", "NCCL communicator was aborted",
)  # fmt: skip


def exit_code(problem: BaseException) -> int:
    """The exit code of a run that ends with this exception."""
    if isinstance(problem, StopRequested):
        return DONE
    if isinstance(problem, StorageError) or any(text in str(problem) for text in _CANNOT_WRITE):
        return NOT_WRITTEN
    if isinstance(problem, UserError):
        return USER_ERROR
    if isinstance(problem, FloatingPointError):
        return NOT_FINITE
    return RANK_LOST if other_end_is_gone(problem) else UNEXPECTED


def other_end_is_gone(problem: BaseException) -> bool:
    """Whether a collective failed because another rank's process has ended, by the words of the libraries."""
    return isinstance(problem, RuntimeError) and any(text in str(problem) for text in _OTHER_END_IS_GONE)


@dataclass(frozen=True)
class FirstFailure:
    """The first word on how a run ends: whose it is, the exit code, whether a rank hangs, seconds since the epoch."""

    rank: int
    code: int
    hung: bool
    when: float


class FirstFailureRecord:
    """A small folder that the ranks of one machine share from their start to their end.

    Each rank is on the board while it works. The first that has something to say about the run's end claims it, and the
    others keep silent. The last rank to leave takes the folder away.

    Args:
        folder: None where there is nobody to tell; the first claim of this process then counts.
    """

    def __init__(self, folder: Path | None):
        self.folder = folder
        self._known: FirstFailure | None = None  # it still counts when the folder is taken away

    def claim(self, code: int, hung: bool = False) -> FirstFailure:
        """Be the one who says how the run ends; returns the claim that counts, which may be another rank's."""
        mine = FirstFailure(dist.rank(), code, hung, time.time())
        try:
            self._post(mine)
        except FileExistsError:
            self.claimed()
        except OSError:  # a full disk: then this rank speaks, whatever the others do
            pass
        self._known = self._known or mine
        return self._known

    def _post(self, claim: FirstFailure) -> None:
        if self.folder is not None:
            draft = self.folder / f"draft_{dist.rank()}_{time.monotonic_ns()}"
            draft.write_text(json.dumps(asdict(claim)), encoding="ascii")
            os.link(draft, self.folder / "claim")  # fails if it exists, and it never exists in part

    def claimed(self) -> FirstFailure | None:
        """The claim that counts, if there is one."""
        if self._known is None and self.folder is not None:
            with suppress(OSError):
                self._known = FirstFailure(**json.loads((self.folder / "claim").read_text(encoding="ascii")))
        return self._known

    def lost_ranks(self) -> list[int]:
        """Ranks of this machine whose process ended without leaving the board. Other machines' are not known."""
        return sorted(rank for rank, works in self._present().items() if not works)

    def is_present(self, rank: int) -> bool:
        """Whether this rank, of this machine, is on the board and its process works."""
        return self._present().get(rank, False)

    def ask_to_stop(self) -> None:
        """Let the other ranks know that this one is asked to stop."""
        if self.folder is not None:
            with suppress(OSError):  # a full disk: they learn of it at the next boundary
                (self.folder / "stop").touch()

    def asks_to_stop(self) -> bool:
        """Whether a rank of this machine is asked to stop."""
        return self.folder is not None and (self.folder / "stop").exists()

    def show_progress(self) -> None:
        """This rank makes progress now."""
        if self.folder is not None:
            with suppress(OSError):
                os.utime(self.folder / f"rank_{dist.rank()}")

    def seconds_since_progress(self) -> float:
        """Seconds since any rank of this machine made progress; infinite where that is not known."""
        latest = -math.inf
        for path in self._files("rank_*"):
            with suppress(OSError):  # it leaves just now
                latest = max(latest, path.stat().st_mtime)
        return time.time() - latest

    def mark_told(self) -> None:
        """This rank has written its stacks."""
        if self.folder is not None:
            with suppress(OSError):
                (self.folder / f"told_{dist.rank()}").touch()

    def untold_ranks(self) -> list[int]:
        """Ranks of this machine that work and have not written their stacks."""
        told = {path.name.removeprefix("told_") for path in self._files("told_*")}
        return sorted(rank for rank, works in self._present().items() if works and str(rank) not in told)

    def _present(self) -> dict[int, bool]:
        """Whether their process works, of all ranks on the board."""
        found = {}
        for path in self._files("rank_*"):
            with suppress(OSError, ValueError):  # it leaves just now; its content was lost with the machine's power
                pid, started = map(int, path.read_text(encoding="ascii").split())
                process = look_up(pid)
                works = process is not None and process.started == started and not process.ended
                found[int(path.name.removeprefix("rank_"))] = works
        return found

    def _files(self, pattern: str) -> list[Path]:
        """None where there is no folder, or where the last rank takes it away just now."""
        with suppress(OSError):
            return list(self.folder.glob(pattern)) if self.folder else []
        return []

    def leave(self) -> None:
        """This rank ends in order. The last one takes the folder away."""
        if self.folder is not None:
            with suppress(OSError):
                (self.folder / f"rank_{dist.rank()}").unlink()
            if not any(self._present().values()):
                shutil.rmtree(self.folder, ignore_errors=True)


def open_board() -> FirstFailureRecord:
    """This rank's way to the others of its machine, before the process group exists and when it is broken.

    Without other ranks, without /proc, or where the folder cannot be made, each rank speaks for itself.
    """
    launcher, own = look_up(os.getppid()), look_up(os.getpid())
    if dist.world_size() == 1 or launcher is None or own is None:
        return FirstFailureRecord(None)
    # the same for all ranks of one launch on this machine, and of no other launch
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    name = f"{_OWN_FOLDERS}{address}_{port}_{os.getppid()}_{launcher.started}".replace("/", "_")
    try:
        folder = Path(tempfile.gettempdir(), name)  # there may be none that can be written
        _sweep()
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.lstat().st_uid != os.getuid():  # the place is everybody's: another user may have been there first
            return FirstFailureRecord(None)
        draft = folder / f"draft_{dist.rank()}"
        draft.write_text(f"{os.getpid()} {own.started}", encoding="ascii")
        draft.rename(folder / f"rank_{dist.rank()}")
    except OSError:
        return FirstFailureRecord(None)
    return FirstFailureRecord(folder)


def _sweep() -> None:
    """Take away folders of runs whose ranks were all killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_OWN_FOLDERS}*"):
        numbers = re.fullmatch(r".*_(\d+)_(\d+)", folder.name)
        if numbers is None:
            continue
        launcher = look_up(int(numbers[1]))
        launcher_works = launcher is not None and launcher.started == int(numbers[2])
        if not launcher_works and not any(FirstFailureRecord(folder)._present().values()):
            shutil.rmtree(folder, ignore_errors=True)
