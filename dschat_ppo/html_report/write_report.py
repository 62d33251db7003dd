"""Write the report of some runs to a file."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from dschat_ppo.common.atomic_files import write_file
from dschat_ppo.common.logging import logger
from dschat_ppo.common.paths import shown_path
from dschat_ppo.errors import UserError
from dschat_ppo.html_report.page import REPORT, page
from dschat_ppo.html_report.run_folder import read_runs

MOST_RUNS = 6  # that colours and dashes still distinguish


def write_report(folders: Sequence[Path], path: Path) -> None:
    """Write one HTML file, whole or not at all, that compares the runs in 1 to `MOST_RUNS` `folders`, finished or not;
    it needs no network, and no large library is imported."""
    if not 1 <= len(folders) <= MOST_RUNS:
        raise UserError(f"a report shows 1 to {MOST_RUNS} runs, got {len(folders)}; name fewer")
    text = page(read_runs(folders), time.time())
    content = text.encode(errors="replace")  # JSON may hold half a surrogate pair, which UTF-8 cannot
    try:
        write_file(path, content)
    except OSError as problem:
        raise UserError(f"{path}: cannot be written ({problem.strerror}); name another file by --out") from problem


def report_run(folder: Path) -> None:
    """Write `report.html` into the output folder of a run at its end; call it on rank 0.

    Files that cannot be read or written are a warning, because the run itself is complete. Every other exception is a
    bug of the report: it ends the process with its traceback in the rank log, after the run has written its models and
    `result.json`.
    """
    path = folder / REPORT
    try:
        write_report([folder], path)
    except UserError as problem:
        logger().warning(f"no report: {problem}")
    else:
        logger().info(f"report: {shown_path(path)}")
