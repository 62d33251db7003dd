"""Runs on two machines: the trajectory of one machine, stops, lost machines.

The machines are namespaces with their own network addresses (`hosts.py`).
"""

import signal

import pytest
from hosts import Hosts, Ranks, ended, require_hosts, wait_until
from launch import metrics_of, numbers_of

from dschat_ppo.checkpoint.store import CheckpointFolder

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

TIMEOUT = 15
PAUSE = 0.7


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    require_hosts()
    found = Hosts(tmp_path_factory.mktemp("hosts"))
    yield found
    found.end()


def sft(assets, output, *more: object, pause: float = PAUSE) -> list[object]:
    flags = (
        f"--model_name_or_path {assets}/lm --data_path {assets}/sft.jsonl --data_split 1,0,0 --num_train_epochs 1 "
        "--max_seq_len 48 --per_device_train_batch_size 4 --dtype fp32 --learning_rate 0.01 --zero_stage 3 "
        f"--save_steps 1 --save_minutes 0 --dropout 0.1 --eval_interval 0 --collective_timeout {TIMEOUT}"
    )
    return [pause, *flags.split(), "--output_dir", output, *more]


def steps_of(folder) -> int:
    return len(metrics_of(folder)) if (folder / "metrics.jsonl").exists() else 0


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
    words, output = sft(assets, tmp_path / "out"), tmp_path / "out"

    # Ctrl-C on the second machine stops both, with a checkpoint
    machines = hosts.fork(2, 1, words, slurm=True)
    wait_until(lambda: steps_of(output) >= 1, 200, lambda: machines[0].err + machines[1].err)
    machines[1].send(signal.SIGINT)
    assert ended(machines) == [0, 0]
    assert "stopped as asked, saved as" in machines[0].out
    assert CheckpointFolder(output).names()

    # a cut cable ends both machines once no rank has made progress for --collective_timeout
    before = steps_of(output)
    machines = hosts.fork(2, 1, words)
    wait_until(lambda: steps_of(output) > before, 200, lambda: machines[0].err + machines[1].err)
    hosts.cut()
    assert ended(machines, 4 * TIMEOUT) == [5, 5]
    hosts.join()
    assert all("has made no progress for" in machine.err for machine in machines)

    # a machine that loses power ends the other one, which says how to resume
    before = steps_of(output)
    machines = hosts.fork(2, 1, words)
    wait_until(lambda: steps_of(output) > before, 200, lambda: machines[0].err + machines[1].err)
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
