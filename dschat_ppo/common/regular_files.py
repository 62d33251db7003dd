"""Tell files and folders from pipes and devices, which a program must not read by mistake."""

from __future__ import annotations

import os
from pathlib import Path


def is_pipe_or_device(path: Path) -> bool:
    """Whether `path`, or what it links to, is neither a file nor a folder.

    Reading a pipe waits until somebody writes to it, and a device such as /dev/zero has no end.
    """
    return os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)
