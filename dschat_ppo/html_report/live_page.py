"""The report as a page of this machine that follows its runs while they train.

`GET /` is the page of the files as they are, and `GET /state` tells what the runs do, and by its
`version` whether their files have changed. `assets/live.js` asks for the state, and takes a new
page into the one that is shown.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import socket
import struct
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from dschat_ppo.common.http_server import reason_to_refuse
from dschat_ppo.common.paths import LOCK, METRICS, RESULT
from dschat_ppo.errors import UserError
from dschat_ppo.html_report.page import check_count, last_written, page
from dschat_ppo.html_report.run_folder import files_of, read_run, require_run, short_names

# seconds until a page asks again: while a run trains, and while all have stopped
SECONDS = 2
SECONDS_WHILE_STOPPED = 10
STOPPED = "stopped before its end"


@dataclass
class LiveReport:
    """The page of some runs, and what they do, for the server."""

    folders: Sequence[Path]
    _version: str = ""  # of the page that is kept
    _content: bytes = b""
    _one_at_a_time: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        """`UserError` for a folder in which no run has begun."""
        check_count(self.folders)
        self.names = short_names(self.folders)
        for folder in self.folders:
            if not (folder / LOCK).exists():  # a run has one before its first step
                require_run(folder)

    def state(self) -> dict[str, Any]:
        """For the page: `version` changes with the files of the runs, `text` says what they do, and
        `again` is the number of seconds until it asks again; None: all runs have ended."""
        activities = [activity_of(folder) for folder in self.folders]
        texts = activities
        if len(self.folders) > 1:
            named = zip(self.names, activities, strict=True)
            texts = [f"{name}: {activity}" for name, activity in named]
        again = None
        if "running" in activities:
            again = SECONDS
        elif STOPPED in activities:
            again = SECONDS_WHILE_STOPPED
        text = "; ".join(texts)
        if again is None:
            text += ". The page is complete and asks no more"
        return {"version": version_of(self.folders, activities), "text": text, "again": again}

    def content(self) -> bytes:
        """The page, which is made again if files have changed since it was made."""
        with self._one_at_a_time:
            state = self.state()  # before the files are read: a later change gives another version
            if state["version"] != self._version:
                self._content = self._page(state)
                self._version = state["version"]
            return self._content

    def _page(self, state: dict[str, Any]) -> bytes:
        """The page of the runs that have a step, with a line for each other one."""
        runs = []
        waiting = []
        for folder, name in zip(self.folders, self.names, strict=True):
            if last_written(folder / METRICS) == 0:
                waiting.append(f"{name}: no step has ended yet; the page shows its first one")
                continue
            try:
                runs.append(read_run(folder, name))
            except UserError as problem:
                waiting.append(str(problem))
        live = state | {"names": self.names, "waiting": waiting}
        text = page(runs, time.time(), live)
        # JSON may hold half a surrogate pair, which UTF-8 cannot
        return text.encode(errors="replace")


def activity_of(folder: Path) -> str:
    """What a run does: "finished", "running" or `STOPPED`: its process has ended before its last
    step."""
    if (folder / RESULT).exists():
        return "finished"
    if is_locked(folder / LOCK):
        return "running"
    return STOPPED


def is_locked(path: Path) -> bool:
    """Whether a process holds a lock of `lockf` on a file. It is only asked for (F_GETLK), because
    a lock taken here could meet a run that starts. On a file system without locks False."""
    # struct flock of Linux: type, whence, start, length (0: the whole file), process
    layout = "hhqqi"
    question = struct.pack(layout, fcntl.F_RDLCK, 0, 0, 0, 0)
    try:
        with path.open("rb") as file:
            answer = fcntl.fcntl(file, fcntl.F_GETLK, question)
    except OSError:
        return False
    kind = struct.unpack(layout, answer)[0]
    return bool(kind != fcntl.F_UNLCK)


def version_of(folders: Sequence[Path], activities: Sequence[str]) -> str:
    """A hash that changes if a file that the page shows, or what a run does, changes."""
    digest = hashlib.sha256(json.dumps(activities).encode())
    for folder in folders:
        for path in files_of(folder):
            try:
                status = path.stat()
            except OSError:  # none, or it went away
                continue
            seen = (str(path), status.st_ino, status.st_size, status.st_mtime_ns)
            digest.update(json.dumps(seen).encode())
    return digest.hexdigest()[:16]


class _Handler(BaseHTTPRequestHandler):
    """Answers one request for the page or the state."""

    server: ReportServer
    timeout = 60  # a browser keeps spare connections open

    def do_GET(self) -> None:  # noqa: N802  the name that http.server calls
        """Answer with the page or the state, or refuse."""
        problem = reason_to_refuse(self.headers["Host"], self.headers["Origin"])
        if problem is not None:
            self._answer(400, "text/plain", f"{problem}\n".encode())
        elif self.path == "/":
            self._answer(200, "text/html", self.server.report.content())
        elif self.path == "/state":
            self._answer(200, "application/json", json.dumps(self.server.report.state()).encode())
        else:
            self._answer(404, "text/plain", b"there is / and /state\n")

    def _answer(self, status: int, kind: str, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        # no other page may show this one, or load it as a part
        self.send_header("Content-Security-Policy", "frame-ancestors 'none'")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Requests are not logged."""


class ReportServer(ThreadingHTTPServer):
    """Serves a report at a socket that listens, in threads that end with the process."""

    def __init__(self, report: LiveReport, listening: socket.socket):
        super().__init__(listening.getsockname(), _Handler, bind_and_activate=False)
        self.report = report
        self.socket.close()  # the one that the library has made
        self.socket = listening

    def handle_error(self, *address: Any) -> None:
        """A browser that has gone away is no error."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(*address)
