"""One run of two machines, continued by each launcher: `deepspeed --no_ssh`, `--hostfile` over ssh, torchrun."""

import shutil
import signal
import subprocess
import sys

import pytest
from hosts import Command, Hosts, require_hosts, wait_until
from launch import ROOT, _free_port, metrics_of

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

SSHD = shutil.which("sshd", path="/usr/sbin:/usr/bin")
DEEPSPEED = [sys.executable, "-m", "deepspeed.launcher.runner"]
SCRIPT = ROOT / "tests/workers/slow_main.py"


@pytest.fixture
def hosts(tmp_path):
    require_hosts()
    found = Hosts(tmp_path)
    yield found
    found.end()


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


def run_flags(assets, output) -> list[object]:
    flags = (
        f"--model_name_or_path {assets}/lm --data_path {assets}/sft.jsonl --data_split 1,0,0 --num_train_epochs 1 "
        "--max_seq_len 48 --per_device_train_batch_size 2 --dtype fp32 --learning_rate 0.01 --save_minutes 0 "
        f"--eval_interval 0 --collective_timeout 60 --output_dir {output}"
    )
    return [SCRIPT, 0.7, *flags.split()]


def test_each_launcher_continues_the_run_of_the_one_before(hosts, ssh, assets, tmp_path):
    output, hostfile = tmp_path / "out", tmp_path / "hostfile"
    hostfile.write_text("alpha slots=1\nbeta slots=1\n")
    words, log = run_flags(assets, output), output / "logs" / "rank_0.log"

    def steps() -> int:
        lines = metrics_of(output) if (output / "metrics.jsonl").exists() else []
        return lines[-1]["step"] if lines else 0

    def wait_for(step: int, commands: list[Command]) -> None:
        wait_until(lambda: steps() >= step, 240, lambda: "\n".join(command.output() for command in commands))

    def address() -> list[object]:
        return ["--master_addr", hosts.address(0), "--master_port", _free_port()]

    # deepspeed --no_ssh on each machine; Ctrl-C on the second one
    common = [*DEEPSPEED, "--hostfile", hostfile, *address()]
    commands = [hosts.start(number, [*common, "--no_ssh", "--node_rank", number, *words]) for number in range(2)]
    wait_for(1, commands)
    commands[1].send(signal.SIGINT)
    assert commands[0].process.wait(100) == 0, commands[0].output()
    commands[1].process.wait(100)
    assert "stopped as asked, saved as" in commands[0].out.read_text()

    # deepspeed --hostfile on the first machine, which starts all ranks through ssh; Ctrl-C there
    before = steps()
    command = hosts.start(0, [*DEEPSPEED, "--hostfile", hostfile, "--no_ssh_check", *address(), *words], **ssh)
    wait_for(before + 1, [command])
    command.send(signal.SIGINT)
    command.process.wait(100)
    wait_until(lambda: log.read_text().count("stopped as asked, saved as") == 2, 60, command.output)

    # torchrun on each machine, to the end
    before = steps()
    common = [sys.executable, "-m", "torch.distributed.run", "--nnodes", 2, "--nproc_per_node", 1, *address()]
    commands = [hosts.start(number, [*common, "--node_rank", number, *words]) for number in range(2)]
    for command in commands:
        assert command.process.wait(240) == 0, command.output()
    assert f"resuming from {output}/checkpoints/step_{before:06d}" in commands[0].out.read_text()
    assert [line["step"] for line in metrics_of(output)] == list(range(len(metrics_of(output))))
    assert (output / "config.json").exists()
