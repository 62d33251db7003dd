"""Runs on two machines: the trajectory of one machine, stops, lost machines; one run continued by
each launcher.

The machines are namespaces of Linux with their own network address, name, processes, memory and
local disk. Only root may make them; `require_hosts` skips a test where they are forbidden."""

import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from launch import (
    ROOT,
    Ranks,
    _free_port,
    environment,
    fork_ranks,
    metrics_of,
    numbers_of,
    wait_until,
)

from dschat_ppo.checkpoint.store import CheckpointFolder

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
    probe = (
        "ip link add v0 type veth peer name v1 && mount -t tmpfs none /dev/shm && hostname probe"
    )
    result = subprocess.run(
        [*_UNSHARE, "--net", "sh", "-c", probe], capture_output=True, text=True, check=False
    )
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

    They share every file except those below `disk`: there each one sees its own disk, which the
    test finds at `disk_of(number)`.
    """

    names = ("alpha", "beta")

    def __init__(self, folder: Path):
        self.disk = folder / "disk"
        self.disk.mkdir()
        self._folder = folder
        self._spaces = [f"dschat{os.getpid()}{name[0]}" for name in self.names]
        self._launches: list[Ranks] = []
        hosts = "127.0.0.1 localhost\n" + "".join(
            f"{self.address(n)} {name}\n" for n, name in enumerate(self.names)
        )
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
        self._ip(
            "-n",
            first,
            "link",
            "add",
            "eth0",
            "type",
            "veth",
            "peer",
            "name",
            "eth0",
            "netns",
            second,
        )
        for number, space in enumerate(self._spaces):
            self._ip("-n", space, "addr", "add", f"{self.address(number)}/24", "dev", "eth0")
            self._ip("-n", space, "link", "set", "eth0", "up")

    def start(self, number: int, command: list[object], **changes: str) -> Command:
        """Run a command on a machine, from the repository's top, in an environment with
        `changes`."""
        enter = ["ip", "netns", "exec", self._spaces[number], *_UNSHARE, "bash", "-c", _ENTER]
        enter += ["bash", self.names[number], str(self.disk_of(number)), str(self.disk)]
        env = (
            environment()
            | {"TMPDIR": str(self.disk / "tmp"), "GLOO_SOCKET_IFNAME": "eth0"}
            | changes
        )
        files = self._new_folder()
        with (files / "out").open("w") as out, (files / "err").open("w") as err:
            process = subprocess.Popen(
                [*enter, *map(str, command)],
                cwd=ROOT,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        self._launches.append(Command(process.pid, files, process))
        return self._launches[-1]

    def fork(
        self, machines: int, ranks: int, words: list[object], slurm: bool = False
    ) -> list[Ranks]:
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
                    own |= {
                        "MASTER_ADDR": "alpha",
                        "SLURM_STEP_NUM_TASKS": size,
                        "SLURM_NTASKS": size,
                    }
                    own |= {"SLURM_STEP_TASKS_PER_NODE": f"{ranks}(x{machines})"}
                environments.append(
                    own | {"TMPDIR": self.disk / "tmp", "GLOO_SOCKET_IFNAME": "eth0"}
                )
            machine = {"space": self._spaces[number], "name": self.names[number]}
            machine |= {"disk": str(self.disk_of(number)), "place": str(self.disk)}
            script = "tests/workers/slow_main.py"
            self._launches.append(
                fork_ranks(self._new_folder(), environments, script, *words, machine=machine)
            )
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


pytestmark = [pytest.mark.ranks, pytest.mark.slow, pytest.mark.release]

TIMEOUT = 15
DEEPSPEED = [sys.executable, "-m", "deepspeed.launcher.runner"]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    require_hosts()
    found = Hosts(tmp_path_factory.mktemp("hosts"))
    yield found
    found.end()


def sft(assets, output, *more: object, pause: float = 0.7) -> list[object]:
    """Words of `slow_main.py`."""
    flags = (
        f"--model_name_or_path {assets}/lm --data_path {assets}/sft.jsonl --data_split 1,0,0"
        " --num_train_epochs 1 --max_seq_len 48 --per_device_train_batch_size 4 --dtype fp32"
        " --learning_rate 0.01 --zero_stage 3 --save_steps 1 --save_minutes 0 --dropout 0.1"
        f" --eval_interval 0 --collective_timeout {TIMEOUT}"
    )
    return [pause, *flags.split(), "--output_dir", output, *more]


def wait_for_step(step: int, output, machines: list[Ranks]) -> None:
    def is_done() -> bool:
        return (output / "metrics.jsonl").exists() and len(metrics_of(output)) >= step

    wait_until(is_done, 240, lambda: "\n".join(machine.out + machine.err for machine in machines))


def message_of(machine: Ranks) -> str:
    """The only message of a machine."""
    found = [line for line in machine.err.splitlines() if line.startswith(("rank ", "error"))]
    assert len(found) == 1, machine.err
    return found[0]


@pytest.fixture(scope="module")
def alone(hosts, assets, tmp_path_factory):
    """The output folder of a run of two ranks on one machine."""
    output = tmp_path_factory.mktemp("alone")
    assert ended(hosts.fork(1, 2, sft(assets, output, pause=0))) == [0]
    return output


def test_a_stop_and_a_machine_that_loses_power(hosts, assets, alone, tmp_path):
    output = tmp_path / "out"
    words = sft(assets, output)

    # Ctrl-C on the second machine stops both, with a checkpoint
    machines = hosts.fork(2, 1, words, slurm=True)
    wait_for_step(1, output, machines)
    machines[1].send(signal.SIGINT)
    assert ended(machines) == [0, 0]
    assert "stopped as asked, saved as" in machines[0].out
    assert CheckpointFolder(output).names()

    # a machine that loses power ends the other one, which says how to resume
    before = len(metrics_of(output))
    machines = hosts.fork(2, 1, words)
    wait_for_step(before + 1, output, machines)
    machines[1].send(signal.SIGKILL)
    assert ended(machines[:1], 3 * TIMEOUT) == [5]
    message = message_of(machines[0])
    assert "another rank is gone" in message and "run the same command again" in message

    # the same command resumes
    machines = hosts.fork(2, 1, words)
    assert ended(machines) == [0, 0]
    assert "resuming from" in machines[0].out
    assert numbers_of(output) == numbers_of(alone)


def test_a_folder_that_the_machines_do_not_share_is_refused(hosts, assets):
    machines = hosts.fork(2, 1, sft(assets, hosts.disk / "unshared"))
    assert ended(machines) == [2, 2]
    assert "machine beta does not see what the first machine writes" in message_of(machines[0])


def test_each_launcher_continues_the_run_of_the_one_before(hosts, assets, tmp_path):
    """`deepspeed --no_ssh`, torchrun."""
    output, hostfile = tmp_path / "out", tmp_path / "hostfile"
    hostfile.write_text("alpha slots=1\nbeta slots=1\n")
    words = [
        ROOT / "tests/workers/slow_main.py",
        *sft(assets, output, "--collective_timeout", 60, "--per_device_train_batch_size", 2),
    ]

    def address() -> list[object]:
        return ["--master_addr", hosts.address(0), "--master_port", _free_port()]

    # deepspeed --no_ssh on each machine; Ctrl-C on the second one
    common = [*DEEPSPEED, "--hostfile", hostfile, *address()]
    commands = [
        hosts.start(number, [*common, "--no_ssh", "--node_rank", number, *words])
        for number in range(2)
    ]
    wait_for_step(2, output, commands)
    commands[1].send(signal.SIGINT)
    assert ended(commands)[0] == 0
    assert "stopped as asked, saved as" in commands[0].out

    # torchrun on each machine, to the end
    common = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes",
        2,
        "--nproc_per_node",
        1,
        *address(),
    ]
    commands = [
        hosts.start(number, [*common, "--node_rank", number, *words]) for number in range(2)
    ]
    assert ended(commands) == [0, 0]
    assert f"resuming from {output}/checkpoints/step_" in commands[0].out
    assert [line["step"] for line in metrics_of(output)] == list(range(len(metrics_of(output))))
    assert (output / "config.json").exists()
