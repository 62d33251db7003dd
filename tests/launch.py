"""Starting real deepspeed ranks from a test."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent


@dataclass
class Ranks:
    """Ranks that were forked: `pid` leads their process group; `folder` gets their output and exit
    code."""

    pid: int
    folder: Path

    @property
    def code(self) -> int | None:
        """The exit code, once they have ended."""
        path = self.folder / "code"
        return int(path.read_text()) if path.exists() else None

    @property
    def out(self) -> str:
        return (self.folder / "out").read_text(errors="replace")

    @property
    def err(self) -> str:
        return (self.folder / "err").read_text(errors="replace")

    def send(self, number: int) -> None:
        """Send a signal to all of them, as a terminal does. SIGKILL is a loss of power."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, number)


def wait_until(condition, seconds: float, shown=lambda: "") -> None:
    """Wait for a condition, or fail with what `shown` returns."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {shown()}"
        time.sleep(0.05)


def rank_environments(ranks: int, env: dict[str, str]) -> list[dict]:
    """What a launcher adds to the environment of each of `ranks` ranks on one machine, and
    `env`."""
    shared = {
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": ranks,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": _free_port(),
        "GLOO_SOCKET_IFNAME": "lo",  # whatever this machine's name resolves to
    }
    return [{"RANK": rank, "LOCAL_RANK": rank, **shared, **env} for rank in range(ranks)]


def fork_ranks(
    files: Path, environments: list[dict], script: str | Path, *words: object, **changes: object
) -> Ranks:
    """Fork ranks from a process that has imported the libraries; see `workers/fork_ranks.py` for
    `changes` of a launch.

    Args:
        files: a folder for their output and exit code.
        environments: of each rank, in addition to that of the tests.
        script: that they run, relative to the repository.
        words: of its command line.
        changes: of the launch.
    """
    launch = {"ranks": [{name: str(value) for name, value in one.items()} for one in environments]}
    launch |= {
        "script": str(ROOT / script),
        "words": [*map(str, words)],
        "folder": str(ROOT),
        "stdin": os.devnull,
    }
    launch |= {name: str(files / name) for name in ("out", "err", "code")}
    launch |= {"end": int(signal.SIGTERM), "machine": None} | changes
    for name in ("out", "err"):
        (files / name).touch()
    server = _fork_server()
    print(json.dumps(launch), file=server.stdin, flush=True)
    answer = server.stdout.readline()
    assert answer, f"the process that forks ranks ended with exit code {server.wait()}"
    return Ranks(int(answer), files)


def forked(
    ranks: int,
    script: str | Path,
    *words: object,
    timeout: int = 300,
    folder: Path = ROOT,
    stdin: str | Path = os.devnull,
    env: dict[str, str] | None = None,
    end: int = signal.SIGKILL,
) -> subprocess.CompletedProcess[str]:
    """Run `script` (relative to the repository) on this many ranks, forked where the libraries are
    imported already.

    For tests of what ranks compute, not of how they start and end. A forked process cannot use a
    GPU. The ranks run in `folder`, read the file `stdin` and have `env` in their environment; with
    a GPU they have neither of these two. If one fails, the others get the signal `end`.
    """
    if torch.cuda.is_available():
        return run(deepspeed_command(ranks, script, *words), timeout, folder)
    environments = rank_environments(ranks, env or {})
    with tempfile.TemporaryDirectory() as files:
        changes = {"folder": str(folder), "stdin": str(stdin), "end": int(end)}
        started, deadline = (
            fork_ranks(Path(files), environments, script, *words, **changes),
            time.monotonic() + timeout,
        )
        while started.code is None:
            if time.monotonic() > deadline:
                started.send(signal.SIGKILL)
                raise subprocess.TimeoutExpired(str(script), timeout, started.out, started.err)
            time.sleep(0.02)
        return subprocess.CompletedProcess(
            [*map(str, words)], started.code, started.out, started.err
        )


@cache
def _fork_server() -> subprocess.Popen[str]:
    """Runs `workers/fork_ranks.py` until this process ends."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    command = [sys.executable, str(ROOT / "tests/workers/fork_ranks.py")]
    return subprocess.Popen(
        command, cwd=ROOT, env=environment(), text=True, start_new_session=True, **pipes
    )


def deepspeed_command(ranks: int, script: str | Path, *words: object) -> list[str]:
    """The command that starts these ranks, on a free port."""
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_accelerators", str(ranks)]
    return [*command, "--master_port", str(_free_port()), str(ROOT / script), *map(str, words)]


def _free_port() -> int:
    """Below the ports that systems give to connections: those of another launch take none before
    the ranks do. Nor does this function give one twice."""
    for port in _ports():
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")


@cache
def _ports() -> Iterator[int]:
    """Each port once, in a random order; two processes of pytest have none in common."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")
    ports = list(range(20_000 + int(worker) % 2, 32_000, 2))
    random.SystemRandom().shuffle(ports)
    return iter(ports)


def environment() -> dict[str, str]:
    """This one, with one thread and this interpreter's programs first in PATH."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    return env | {"PATH": f"{Path(sys.executable).parent}:{env['PATH']}"}


def run(
    command: list[str], timeout: int = 300, folder: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    """Run a command, by default from the repository's top."""
    return subprocess.run(
        command,
        cwd=folder,
        env=environment(),
        text=True,
        capture_output=True,
        timeout=timeout,
        check=False,
    )


def succeed(result: subprocess.CompletedProcess[str]) -> subprocess.CompletedProcess[str]:
    """The same result, or an assertion with the end of its output."""
    assert result.returncode == 0, (
        f"exit code {result.returncode}\n{result.stdout[-3000:]}\n{result.stderr[-6000:]}"
    )
    return result


def run_steps(cases: dict[str, tuple], folder: Path, ranks: int = 2, timeout: int = 900) -> dict:
    """Each case, name -> (step, words), as a user would run it, all in one launch: how it ended;
    see `workers/runs.py`.

    (step, words, ends) for a case that is stopped: how each of its starts ended.
    """
    given = {
        name: [step, [*map(str, words)], *(ends or [[None]])]
        for name, (step, words, *ends) in cases.items()
    }
    (folder / "cases.json").write_text(json.dumps(given))
    found = folder / f"found_{ranks}.json"
    succeed(forked(ranks, "tests/workers/runs.py", folder / "cases.json", found, timeout=timeout))
    starts = json.loads(found.read_text())
    return {
        name: starts[name] if len(case) > 2 else starts[name][0] for name, case in cases.items()
    }


def numbers_of(folder: Path) -> list[dict]:
    """The lines of a run's `metrics.jsonl` without what measures the machine."""
    measured = ("time", "time/", "memory/")
    return [
        {name: line[name] for name in line if not name.startswith(measured)}
        for line in metrics_of(folder)
    ]


def metrics_of(folder: Path) -> list[dict]:
    """The lines of a run's `metrics.jsonl`."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
