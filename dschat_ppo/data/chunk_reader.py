"""The process of a node that makes the chunks of a stream while the ranks train, and how the ranks wait for them.

Ranks and reader talk through files in the folder of the stream: `wanted_R.json` holds the chunks that rank R needs,
`ready.json` those that are on the disk, and `progress` is touched after each batch. All ranks of a node may ask, in any
order: a rank never waits for another rank, which may itself wait for it in a collective.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from dschat_ppo.common.atomic_files import make_folder, remove_folder
from dschat_ppo.common.heartbeat import heartbeat, on_heartbeat
from dschat_ppo.data.chunks import ChunkMaker, entry_name
from dschat_ppo.errors import StorageError, UserError, in_one_line
from dschat_ppo.runtime.processes import find_process, signal_when_parent_ends
from dschat_ppo.runtime.stop_requests import raise_if_stop_requested

POLL_SECONDS = 0.1
_READY, _PROGRESS, _PROCESS, _WANTED = "ready.json", "progress", "process.json", "wanted_{}.json"
_ENDED = (
    "the process that reads the stream has ended, most often because memory ran out (its own message, if any, is "
    "above); run the same command again to resume from the newest checkpoint"
)


class ChunkReader:
    """The reader process of this node. A rank has at most one: `in_free_folder` ends the one before. `lock` is held as
    long as the reader lives, so that no other run uses the folder of the stream, `home`."""

    _running: list[ChunkReader] = []

    def __init__(self, home: Path, lock: FileLock):
        self.home = home
        self._lock = lock
        self._process: BaseProcess | None = None

    @classmethod
    def in_free_folder(cls, home: Callable[[int], Path]) -> ChunkReader:
        """A reader, not yet started, in the first of the folders `home(0)`, `home(1)`, ... that no other run uses."""
        while cls._running:
            cls._running.pop().end()
        number = 0
        while True:
            folder = home(number)
            lock = FileLock(f"{folder}.lock")
            try:
                make_folder(folder)
                lock.acquire(timeout=0)
            except Timeout:
                number += 1
                continue
            except OSError as problem:
                raise UserError(
                    f"{folder}: cannot be written ({problem.strerror}), and prepared data are stored there; name "
                    "another folder with --data_output_path"
                ) from None
            reader = cls(folder, lock)
            cls._running.append(reader)
            for path in [*folder.glob(_WANTED.format("*")), folder / _READY, folder / _PROCESS]:
                path.unlink(missing_ok=True)
            return reader

    def start(self, maker: Callable[[Callable[[], None]], ChunkMaker]) -> None:
        """Start the process. `maker`: called there with what to call after each batch."""
        context = multiprocessing.get_context("fork")
        self._process = context.Process(target=_serve, args=(self.home, os.getpid(), maker), daemon=True)
        self._process.start()
        _put(self.home / _PROCESS, self._process.pid)

    def end(self) -> None:
        """Kill the process. What it has not finished is made again by the next one."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
        self._lock.release()


def want(home: Path, rank: int, first: int, last: int) -> None:
    """Ask for the chunks `first .. last`, and no longer for those that this rank asked for before."""
    _put(home / _WANTED.format(rank), [first, last])


def wait_until_ready(home: Path, chunk: int, may_stop: bool) -> None:
    """Wait for a wanted chunk. The watchdog ends the run if the reader makes no progress.

    In training a stop request does not end the wait (`may_stop` is False): the chunk is completed, and the state is
    saved after the optimizer step.

    Raises:
        UserError: the chunk cannot be made, or the reader has ended.
        StorageError: the chunk cannot be written.
        StopRequested: the run receives a stop request, and `may_stop`.
    """
    before: float | None = None
    while True:
        has_ended = _has_ended(home)
        found = _get(home / _READY) or {"chunks": [], "problem": None}
        if chunk in found["chunks"]:
            return
        if found["problem"] is not None and found["problem"]["chunk"] <= chunk:
            kind = StorageError if found["problem"]["is_storage"] else UserError
            raise kind(found["problem"]["text"])
        if may_stop:
            raise_if_stop_requested("prepared the data")
        if has_ended:
            raise UserError(_ENDED)
        progress = _modified(home / _PROGRESS)
        if progress != before:
            heartbeat()
        before = progress
        time.sleep(POLL_SECONDS)


def _serve(home: Path, parent: int, maker_of: Callable[[Callable[[], None]], ChunkMaker]) -> None:
    """Body of the process: make the chunks that ranks want, lowest first, and delete those that none may need.
    DeepSpeed's launcher sends SIGTERM to all its descendants. The ranks still need the rows of their last step then, so
    the process ignores it; it ends with the process that started it."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal_when_parent_ends(signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before the signal was set up
        return
    on_heartbeat(None)  # its timer belongs to the rank
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the threads of the tokenizer do not survive a fork
    maker = maker_of(lambda: (home / _PROGRESS).touch())
    ready: list[int] = []
    while True:
        ranges = [found for path in home.glob(_WANTED.format("*")) if (found := _get(path)) is not None]
        missing = sorted({chunk for first, last in ranges for chunk in range(first, last + 1)} - set(ready))
        if not missing:
            time.sleep(POLL_SECONDS)
            continue
        (home / _PROGRESS).touch()
        try:
            maker.provide(missing[0])
        except (UserError, OSError) as reason:
            is_storage = isinstance(reason, OSError)
            text = f"{home}: cannot be written ({in_one_line(reason)})" if is_storage else str(reason)
            problem = {"chunk": missing[0], "text": text, "is_storage": is_storage}
            _put(home / _READY, {"chunks": ready, "problem": problem})
            return
        # chunk 0 stays: it serves padding rows, measurements and the next epoch
        kept = {0, missing[0]}.union(*(range(first - 1, last + 1) for first, last in ranges))
        ready = sorted(kept.intersection([*ready, missing[0]]))
        _put(home / _READY, {"chunks": ready, "problem": None})
        if any(last > 0 for _, last in ranges):  # before, a resumed run may still need any of them
            _delete_others(home, {entry_name(chunk, maker.count(chunk)) for chunk in kept})


def _delete_others(home: Path, kept: set[str]) -> None:
    """Delete all chunks but these. A rank that still reads one has its files mapped."""
    for entry in home.glob("chunk_*"):
        if entry.is_dir() and entry.name not in kept:
            remove_folder(entry)
        elif entry.suffix == ".lock" and entry.stem not in kept:
            entry.unlink(missing_ok=True)


def _put(path: Path, value: Any) -> None:
    """Replace a file by JSON, for other processes of this machine: it need not survive a power loss."""
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    partial.write_text(json.dumps(value), encoding="utf-8")
    os.replace(partial, path)


def _get(path: Path) -> Any:
    """The JSON of `_put`, or None."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None


def _has_ended(home: Path) -> bool:
    """Whether the reader is gone; False where /proc does not tell."""
    process = find_process(_get(home / _PROCESS))
    return (process is None or process.ended) and find_process(os.getpid()) is not None


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0.0
