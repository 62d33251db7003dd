"""Machines for tests: namespaces of Linux with their own network address, name, processes, memory and local disk.

Only root may make them; `require_hosts` skips a test where they are forbidden.
"""

import os
import shutil
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from launch import ROOT, Ranks, _free_port, environment, fork_ranks, wait_until

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


_UNSHARE = ["unshare", "--uts", "--pid", "--mount", "--ipc", "--kill-child", "--mount-proc"]


def require_hosts() -> None:
    """Skip the test where the kernel does not let it make namespaces."""
    if os.geteuid() or not shutil.which("ip") or not shutil.which("unshare"):
        pytest.skip("machines in network namespaces need root, and the programs ip and unshare")
    probe = "ip link add v0 type veth peer name v1 && mount -t tmpfs none /dev/shm && hostname probe"
    result = subprocess.run([*_UNSHARE, "--net", "sh", "-c", probe], capture_output=True, text=True, check=False)
    if result.returncode:
        pytest.skip(f"namespaces are forbidden here: {result.stderr.strip()}")


@dataclass
class Command(Ranks):
    """A command of `Hosts.start`."""

    process: subprocess.Popen[bytes]

    @property
    def code(self) -> int | None:
        """The exit code, once it has ended."""
        return self.process.poll()


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
        self._launches: list[Ranks] = []
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

    def start(self, number: int, command: list[object], **changes: str) -> Command:
        """Run a command on a machine, from the repository's top, in an environment with `changes`."""
        enter = ["ip", "netns", "exec", self._spaces[number], *_UNSHARE, "bash", "-c", _ENTER]
        enter += ["bash", self.names[number], str(self.disk_of(number)), str(self.disk)]
        env = environment() | {"TMPDIR": str(self.disk / "tmp"), "GLOO_SOCKET_IFNAME": "eth0"} | changes
        files = self._new_folder()
        with (files / "out").open("w") as out, (files / "err").open("w") as err:
            process = subprocess.Popen(
                [*enter, *map(str, command)], cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                start_new_session=True,
            )  # fmt: skip
        self._launches.append(Command(process.pid, files, process))
        return self._launches[-1]

    def fork(self, machines: int, ranks: int, words: list[object], slurm: bool = False) -> list[Ranks]:
        """Start `ranks` ranks of `workers/slow_main.py` on each of the first machines.

        Their environment is that of a launcher; `slurm`: only what `srun` sets.
        """
        port, size = _free_port(), machines * ranks
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
                environments.append(own | {"TMPDIR": self.disk / "tmp", "GLOO_SOCKET_IFNAME": "eth0"})
            machine = {"space": self._spaces[number], "name": self.names[number]}
            machine |= {"disk": str(self.disk_of(number)), "place": str(self.disk)}
            script = "tests/workers/slow_main.py"
            self._launches.append(fork_ranks(self._new_folder(), environments, script, *words, machine=machine))
        return self._launches[-machines:]

    def _new_folder(self) -> Path:
        folder = self._folder / f"launch_{len(self._launches)}"
        folder.mkdir()
        return folder

    def end(self) -> None:
        """End what runs there, and remove the network."""
        for launch in self._launches:
            launch.send(signal.SIGKILL)
        for space in self._spaces:
            subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)


def ended(machines: list[Ranks], seconds: float = 200) -> list[int]:
    """The exit codes of the ranks of each machine, once all have ended."""

    def output() -> str:
        return "\n".join(f"{ranks.out[-2000:]}\n{ranks.err[-3000:]}" for ranks in machines)

    wait_until(lambda: all(ranks.code is not None for ranks in machines), seconds, output)
    return [ranks.code for ranks in machines]
