"""Runs cases of `failing.py` side by side, each under DeepSpeed's launcher; its processes are forks of this one.

failing_launches.py FOLDER CASE ...     FOLDER/CASE gets `out`, `err`, and in `ended.json` the exit code of the launcher
    and the numbers of the processes that are there half a minute later
"""

import base64
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
from deepspeed.launcher import launch
from launch import ROOT, _free_port

from workers.fork_ranks import redirect, run_script


class Forked:
    """In place of `subprocess.Popen`: a fork that runs the script of `python -u SCRIPT WORDS`."""

    def __init__(self, command: list[str], env: dict[str, str]):
        self.returncode, self.pid = None, os.fork()
        if self.pid == 0:
            os.environ.clear()
            os.environ.update(env)
            del os.environ["CROSS_RANK"]  # with it, a rank looks for the launcher by its command line
            run_script(command[2], command[3:])

    def poll(self) -> int | None:
        ended, status = os.waitpid(self.pid, os.WNOHANG)
        if ended:
            self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


def run_launcher(case: str, folder: Path) -> None:
    """Leads a session of its own. Ends the process with the exit code of the launcher."""
    os.setsid()
    redirect(os.devnull, str(folder / "out"), str(folder / "err"))
    os.environ["TMPDIR"], tempfile.tempdir = str(folder / "tmp"), None
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name)
    launch.subprocess = SimpleNamespace(Popen=Forked)
    world = base64.urlsafe_b64encode(json.dumps({"localhost": [0, 1]}).encode()).decode()
    sys.argv = ["launch.py", f"--world_info={world}", "--master_addr=127.0.0.1", f"--master_port={_free_port()}"]
    sys.argv += [str(ROOT / "tests/workers/failing.py"), case, str(folder)]
    code = 0
    try:
        launch.main()
    except SystemExit as ended:
        code = ended.code
    sys.stdout.flush()
    os._exit(code % 256)


def members(session: int) -> list[int]:
    """The processes of a session that run."""
    found = []
    for process in psutil.process_iter(["status"]):
        try:
            if os.getsid(process.pid) == session and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except ProcessLookupError:
            continue
    return found


def main() -> None:
    top, running = Path(sys.argv[2]), {}
    for case in sys.argv[3:]:
        folder = top / case
        (folder / "tmp").mkdir(parents=True)
        for name in ("out", "err"):
            (folder / name).touch()
        running[case] = os.fork()
        if running[case] == 0:
            run_launcher(case, folder)
    for case, process in running.items():
        code, deadline = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), time.monotonic() + 30
        while (left := members(process)) and time.monotonic() < deadline:
            time.sleep(0.1)
        for number in left:
            os.kill(number, 9)
        (top / case / "ended.json").write_text(json.dumps({"code": code, "left": left}))


main()
