"""Temporary folders whose names say which process owns them. A process that is killed leaves its
folder, and a later start removes those that no living process owns."""

from __future__ import annotations

import glob
import os
import socket
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from dschat_ppo.common.processes import find_process


def owned_name(kind: str, pid: int) -> str:
    """The start of the name of a folder of process `pid`, which is followed by anything."""
    started = 0
    process = find_process(pid)
    if process is not None:
        started = process.started
    return f"{_start_of_names(kind)}{pid}_{started}_"


def ownerless_folders(kind: str) -> list[Path]:
    """Folders of this user whose process has ended. Machines and containers may share the folder,
    but not processes: only those of this host and process namespace are looked at."""
    start = _start_of_names(kind)
    ownerless = []
    for folder in Path(tempfile.gettempdir()).glob(f"{glob.escape(start)}*"):
        pid, started, *_ = folder.name.removeprefix(start).split("_")
        process = find_process(int(pid))
        if process is None or process.ended or process.started != int(started):
            ownerless.append(folder)
    return ownerless


def _start_of_names(kind: str) -> str:
    namespace = os.stat("/proc/self/ns/pid").st_ino
    return f"{kind}_{os.getuid()}_{socket.gethostname()}_{namespace}_"


def remove_tree(folders: Sequence[str | Path]) -> None:
    """Remove folders, however deeply others are nested in them: `shutil` fails at a thousand. What
    cannot be removed stays."""
    if folders:
        subprocess.run(["rm", "-rf", "--", *folders], check=False, capture_output=True)
