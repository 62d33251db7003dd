"""Machines for tests: namespaces of Linux with their own network address, name, processes, memory and local disk.

Only root may make them; `require_hosts` skips a test where they are forbidden.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from launch import ROOT, _free_port, environment

# $1: name, $2: folder that is its disk, $3: where it sees the disk; then the command
_ENTER = """
hostname "$1"
mount -t tmpfs -o size=1g none /dev/shm
mount --bind "$2/hosts" /etc/hosts
mount --bind "$2" "$3"
shift 3
"$@" &
wait $!
"""


@cache
def _hindrance() -> str | None:
    """Why this machine cannot make hosts, or None."""
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("unshare"):
        return "machines in network namespaces need root, and the programs ip and unshare"
    probe = f"dschat{os.getpid()}p"
    inside = "mount -t tmpfs none /dev/shm && hostname probe"
    commands = [
        ["ip", "netns", "add", probe],
        ["ip", "-n", probe, "link", "add", "v0", "type", "veth", "peer", "name", "v1"],
        ["ip", "netns", "exec", probe, *_UNSHARE, "sh", "-c", inside],
    ]
    problem = None
    for command in commands:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode and problem is None:
            problem = f"namespaces are forbidden here: {' '.join(command)}: {result.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", probe], capture_output=True, check=False)
    return problem


_UNSHARE = ["unshare", "--uts", "--pid", "--mount", "--ipc", "--kill-child", "--mount-proc"]


def require_hosts() -> None:
    """Skip the test where the kernel does not let it make namespaces."""
    if problem := _hindrance():
        pytest.skip(problem)


@dataclass
class Ranks:
    """The ranks of one machine: `pid` leads their process group; `folder` gets their output and exit code."""

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


@dataclass
class Command:
    """A command of `Hosts.start`, with the files of its output."""

    process: subprocess.Popen[str]
    out: Path
    err: Path

    def send(self, number: int) -> None:
        """Send a signal to it and all that it started, as a terminal does. SIGKILL is a loss of power."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def output(self) -> str:
        return "\n".join(path.read_text(errors="replace")[-4000:] for path in (self.out, self.err))


class Hosts:
    """Two machines, `alpha` and `beta`, at the two ends of a cable.

    They share every file except those below `disk`: there each one sees its own disk, which the test finds at
    `disk_of(number)`.
    """

    names = ("alpha", "beta")

    def __init__(self, folder: Path):
        self.disk = folder / "disk"
        self.disk.mkdir()
        self._folder = folder
        self._spaces = [f"dschat{os.getpid()}{name[0]}" for name in self.names]
        self._launches = 0
        self._commands: list[Command] = []
        self._server: subprocess.Popen[str] | None = None
        hosts = "127.0.0.1 localhost\n" + "".join(f"{self.address(n)} {name}\n" for n, name in enumerate(self.names))
        for number in range(2):
            self.disk_of(number).mkdir()
            (self.disk_of(number) / "hosts").write_text(hosts)
            (self.disk_of(number) / "tmp").mkdir()
        self._make_network()

    def address(self, number: int) -> str:
        return f"10.213.7.{number + 1}"

    def disk_of(self, number: int) -> Path:
        return self._folder / f"disk_of_{self.names[number]}"

    def _ip(self, *words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    def _make_network(self) -> None:
        first, second = self._spaces
        for space in self._spaces:
            self._ip("netns", "add", space)
            self._ip("-n", space, "link", "set", "lo", "up")
        self._ip("-n", first, "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", second)
        for number, space in enumerate(self._spaces):
            self._ip("-n", space, "addr", "add", f"{self.address(number)}/24", "dev", "eth0")
            self._ip("-n", space, "link", "set", "eth0", "up")

    def cut(self) -> None:
        """Unplug the cable."""
        self._ip("-n", self._spaces[1], "link", "set", "eth0", "down")

    def join(self) -> None:
        """Plug it in again."""
        self._ip("-n", self._spaces[1], "link", "set", "eth0", "up")

    def start(self, number: int, command: list[object], **changes: str) -> "Command":
        """Run a command on a machine, from the repository's top, in an environment with `changes`."""
        enter = ["ip", "netns", "exec", self._spaces[number], *_UNSHARE, "bash", "-c", _ENTER]
        enter += ["bash", self.names[number], str(self.disk_of(number)), str(self.disk)]
        env = environment() | {"TMPDIR": str(self.disk / "tmp"), "GLOO_SOCKET_IFNAME": "eth0"} | changes
        out, err = self._files("out", "err")
        with out.open("w") as stdout, err.open("w") as stderr:
            process = subprocess.Popen(
                [*enter, *map(str, command)], cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr,
                text=True, start_new_session=True,
            )  # fmt: skip
        self._commands.append(Command(process, out, err))
        return self._commands[-1]

    def fork(self, machines: int, ranks: int, words: list[object], slurm: bool = False) -> list[Ranks]:
        """Start `ranks` ranks of `workers/slow_main.py` on each of the first machines.

        Their environment is that of a launcher; `slurm`: only what `srun` sets.
        """
        if self._server is None:
            command = [sys.executable, str(ROOT / "tests/workers/host_ranks.py")]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            self._server = subprocess.Popen(command, cwd=ROOT, env=environment(), text=True, **pipes)
        port, size, started = _free_port(), machines * ranks, []
        for number in range(machines):
            environments = []
            for local in range(ranks):
                rank = number * ranks + local
                own = {"RANK": rank, "LOCAL_RANK": local, "WORLD_SIZE": size, "LOCAL_SIZE": ranks}
                own |= {"MASTER_ADDR": self.address(0), "MASTER_PORT": port}
                if slurm:
                    own = {"SLURM_PROCID": rank, "SLURM_LOCALID": local, "SLURM_JOB_ID": port}
                    own |= {"MASTER_ADDR": "alpha", "SLURM_STEP_NUM_TASKS": size, "SLURM_NTASKS": size}
                    own |= {"SLURM_STEP_TASKS_PER_NODE": f"{ranks}(x{machines})"}
                own |= {"TMPDIR": self.disk / "tmp", "GLOO_SOCKET_IFNAME": "eth0"}
                environments.append({name: str(value) for name, value in own.items()})
            folder = self._files("out", "err")[0].parent
            machine = {"space": self._spaces[number], "name": self.names[number], "environments": environments}
            machine |= {"disk": str(self.disk_of(number)), "place": str(self.disk), "words": [*map(str, words)]}
            machine |= {name: str(folder / name) for name in ("out", "err", "code")}
            print(json.dumps(machine | {"script": str(ROOT / "tests/workers/slow_main.py")}), file=self._server.stdin)
            self._server.stdin.flush()
            started.append(Ranks(int(self._server.stdout.readline()), folder))
        return started

    def _files(self, *names: str) -> list[Path]:
        self._launches += 1
        folder = self._folder / f"launch_{self._launches}"
        folder.mkdir()
        for name in names:
            (folder / name).touch()
        return [folder / name for name in names]

    def end(self) -> None:
        """End what runs there, and remove the network."""
        for command in self._commands:
            command.send(signal.SIGKILL)
            command.process.wait()
        if self._server is not None:
            self._server.kill()
            self._server.wait()
        for space in self._spaces:
            subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)


def wait_until(condition, seconds: float, shown=lambda: "") -> None:
    """Wait for a condition, or fail with what `shown` returns."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {shown()}"
        time.sleep(0.05)


def ended(machines: list[Ranks], seconds: float = 200) -> list[int]:
    """The exit codes of the ranks of each machine, once all have ended."""

    def output() -> str:
        return "\n".join(f"{ranks.out[-2000:]}\n{ranks.err[-3000:]}" for ranks in machines)

    wait_until(lambda: all(ranks.code is not None for ranks in machines), seconds, output)
    return [ranks.code for ranks in machines]
