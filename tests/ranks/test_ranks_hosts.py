"""Runs on two machines: the trajectory of one machine, stops, lost machines; one run continued by each launcher.

The machines are namespaces with their own network addresses (`hosts.py`).
"""

import shutil
import signal
import subprocess
import sys

import pytest
from hosts import Hosts, ended, require_hosts
from launch import ROOT, Ranks, _free_port, metrics_of, numbers_of, wait_until

from dschat_ppo.checkpoint.store import CheckpointFolder

pytestmark = [pytest.mark.ranks, pytest.mark.slow, pytest.mark.release]

TIMEOUT = 15
SSHD = shutil.which("sshd", path="/usr/sbin:/usr/bin")
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
        f"--model_name_or_path {assets}/lm --data_path {assets}/sft.jsonl --data_split 1,0,0 --num_train_epochs 1 "
        "--max_seq_len 48 --per_device_train_batch_size 4 --dtype fp32 --learning_rate 0.01 --zero_stage 3 "
        f"--save_steps 1 --save_minutes 0 --dropout 0.1 --eval_interval 0 --collective_timeout {TIMEOUT}"
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


def test_a_stop_a_cut_cable_and_a_machine_that_loses_power(hosts, assets, alone, tmp_path):
    output = tmp_path / "out"
    words = sft(assets, output)

    # Ctrl-C on the second machine stops both, with a checkpoint
    machines = hosts.fork(2, 1, words, slurm=True)
    wait_for_step(1, output, machines)
    machines[1].send(signal.SIGINT)
    assert ended(machines) == [0, 0]
    assert "stopped as asked, saved as" in machines[0].out
    assert CheckpointFolder(output).names()

    # a cut cable ends both machines once no rank has made progress for --collective_timeout
    before = len(metrics_of(output))
    machines = hosts.fork(2, 1, words)
    wait_for_step(before + 1, output, machines)
    hosts.cut()
    assert ended(machines, 4 * TIMEOUT) == [5, 5]
    hosts.join()
    assert all("has made no progress for" in machine.err for machine in machines)

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


@pytest.fixture
def ssh(hosts, tmp_path) -> dict[str, str]:
    """sshd on both machines; the variables with which pdsh reaches them, and deepspeed passes on what ranks need."""
    if SSHD is None or not shutil.which("pdsh"):
        pytest.skip("deepspeed --hostfile needs sshd, ssh and pdsh")
    folder = tmp_path / "ssh"
    folder.mkdir(mode=0o700)
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    settings = f"HostKey {folder}/host\nAuthorizedKeysFile {folder}/user.pub\nStrictModes no\nUsePAM no\nPidFile none\n"
    (folder / "config").write_text(settings + "PermitRootLogin prohibit-password\n")
    subprocess.run(["mkdir", "-p", "/run/sshd"], check=True)
    for number in range(2):
        hosts.start(number, [SSHD, "-D", "-e", "-f", folder / "config"])
    variables = {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1", "TMPDIR": hosts.disk / "tmp"}
    (folder / "variables").write_text("".join(f"{name}={value}\n" for name, value in variables.items()))
    options = f"-i {folder}/user -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR"
    return {"PDSH_SSH_ARGS_APPEND": options, "DS_ENV_FILE": str(folder / "variables")}


def test_each_launcher_continues_the_run_of_the_one_before(hosts, ssh, assets, tmp_path):
    """`deepspeed --no_ssh`, `--hostfile` over ssh, torchrun."""
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
    commands = [hosts.start(number, [*common, "--no_ssh", "--node_rank", number, *words]) for number in range(2)]
    wait_for_step(2, output, commands)
    commands[1].send(signal.SIGINT)
    assert ended(commands)[0] == 0
    assert "stopped as asked, saved as" in commands[0].out

    # deepspeed --hostfile on the first machine, which starts all ranks through ssh; Ctrl-C there
    before = len(metrics_of(output))
    command = hosts.start(0, [*DEEPSPEED, "--hostfile", hostfile, "--no_ssh_check", *address(), *words], **ssh)
    wait_for_step(before + 1, output, [command])
    command.send(signal.SIGINT)
    ended([command])
    log = output / "logs/rank_0.log"
    wait_until(lambda: log.read_text().count("stopped as asked, saved as") == 2, 60, lambda: command.err)

    # torchrun on each machine, to the end
    common = [sys.executable, "-m", "torch.distributed.run", "--nnodes", 2, "--nproc_per_node", 1, *address()]
    commands = [hosts.start(number, [*common, "--node_rank", number, *words]) for number in range(2)]
    assert ended(commands) == [0, 0]
    assert f"resuming from {output}/checkpoints/step_" in commands[0].out
    assert [line["step"] for line in metrics_of(output)] == list(range(len(metrics_of(output))))
    assert (output / "config.json").exists()
