"""Starting real deepspeed ranks from a test."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent


def deepspeed(ranks: int, script: str | Path, *words: object, timeout: int = 300) -> subprocess.CompletedProcess[str]:
    """Run `script` (relative to the repository) on this many ranks, as a user would; output is kept in the result."""
    return run(deepspeed_command(ranks, script, *words), timeout)


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
    """As `deepspeed`, for a worker: its ranks are forked from a process that has imported the libraries.

    For tests of what ranks compute, not of how they start and end. A forked process cannot use a GPU. The ranks run in
    `folder`, read the file `stdin` and have `env` in their environment; with a GPU they have neither of these two.
    If one fails, the others get the signal `end`.
    """
    if torch.cuda.is_available():
        return run(deepspeed_command(ranks, script, *words), timeout, folder)
    with tempfile.TemporaryDirectory() as temporary:
        out, err = Path(temporary, "out"), Path(temporary, "err")
        out.touch(), err.touch()
        launch = {"ranks": ranks, "port": _free_port(), "script": str(ROOT / script), "words": [*map(str, words)]}
        launch |= {
            "env": env or {},
            "end": int(end),
            "folder": str(folder),
            "stdin": str(stdin),
            "out": str(out),
            "err": str(err),
            "timeout": timeout,
        }
        server = _fork_server()
        print(json.dumps(launch), file=server.stdin, flush=True)
        answer = server.stdout.readline()
        assert answer, f"the process that forks ranks ended with exit code {server.wait()}"
        output = [file.read_text(errors="replace") for file in (out, err)]
    if int(answer) == -signal.SIGALRM:
        raise subprocess.TimeoutExpired(launch["script"], timeout, *output)
    return subprocess.CompletedProcess(launch["words"], int(answer), *output)


@cache
def _fork_server() -> subprocess.Popen[str]:
    """Runs `workers/fork_ranks.py` until this process ends."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    command = [sys.executable, str(ROOT / "tests/workers/fork_ranks.py")]
    return subprocess.Popen(command, cwd=ROOT, env=environment(), text=True, start_new_session=True, **pipes)


def deepspeed_command(ranks: int, script: str | Path, *words: object) -> list[str]:
    """The command that starts these ranks, on a free port."""
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_accelerators", str(ranks)]
    return [*command, "--master_port", str(_free_port()), str(ROOT / script), *map(str, words)]


def _free_port() -> int:
    """Below the ports that systems give to connections: those of another launch take none before the ranks do."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def environment() -> dict[str, str]:
    """This one, with one thread and this interpreter's programs first in PATH."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    return env | {"PATH": f"{Path(sys.executable).parent}:{env['PATH']}"}


def run(command: list[str], timeout: int = 300, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run a command, by default from the repository's top."""
    return subprocess.run(
        command, cwd=folder, env=environment(), text=True, capture_output=True, timeout=timeout, check=False
    )


def succeed(result: subprocess.CompletedProcess[str]) -> subprocess.CompletedProcess[str]:
    """The same result, or an assertion with the end of its output."""
    assert result.returncode == 0, f"exit code {result.returncode}\n{result.stdout[-3000:]}\n{result.stderr[-6000:]}"
    return result


def run_steps(cases: dict[str, tuple], folder: Path, ranks: int = 2, timeout: int = 900) -> dict:
    """Each case, name -> (step, words), as a user would run it, all in one launch: how it ended; see `workers/runs.py`.

    (step, words, ends) for a case that is stopped: how each of its starts ended.
    """
    given = {name: [step, [*map(str, words)], *(ends or [[None]])] for name, (step, words, *ends) in cases.items()}
    (folder / "cases.json").write_text(json.dumps(given))
    found = folder / f"found_{ranks}.json"
    succeed(forked(ranks, "tests/workers/runs.py", folder / "cases.json", found, timeout=timeout))
    starts = json.loads(found.read_text())
    return {name: starts[name] if len(case) > 2 else starts[name][0] for name, case in cases.items()}


def numbers_of(folder: Path) -> list[dict]:
    """The lines of a run's `metrics.jsonl` without what measures the machine."""
    measured = ("time", "time/", "memory/")
    return [{name: line[name] for name in line if not name.startswith(measured)} for line in metrics_of(folder)]


def metrics_of(folder: Path) -> list[dict]:
    """The lines of a run's `metrics.jsonl`."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
