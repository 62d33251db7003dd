"""Exit codes, and what is said when something is wrong."""

import os
import signal
import socket

import pytest
from torch.distributed import DistNetworkError

from dschat_ppo.common.phases import PhaseClock, announce, announce_step, current_phase, reset_phases, where
from dschat_ppo.errors import NonFiniteError, StopRequested, UserError, reading
from dschat_ppo.runtime import stop_requests
from dschat_ppo.runtime.first_failure import HOW_TO_RESUME
from dschat_ppo.runtime.launch import run_step
from dschat_ppo.runtime.process_group import init_process_group
from dschat_ppo.runtime.rank_log import close_log, open_log


@pytest.fixture(autouse=True)
def own_signals():
    yield
    stop_requests.restore()
    reset_phases()


def test_success_returns_0():
    assert run_step(lambda argv: argv, lambda config: None, ["--x"]) == 0


@pytest.mark.parametrize("message", ["--data_path nowhere: no such file", "other settings:\n- --seed 1\n+ --seed 2"])
def test_user_error_is_its_message_and_exit_code_2(capsys, message):
    def train(_config):
        raise UserError(message)

    assert run_step(lambda argv: argv, train, []) == 2
    assert capsys.readouterr().err == f"error: {message}\n"


def test_what_a_library_raised_stands_in_the_log_alone(capsys, tmp_path):
    def train(_config):
        open_log(tmp_path)
        with reading("--data_path x: cannot be read"):
            int("no number")

    assert run_step(lambda argv: argv, train, []) == 2
    close_log()
    log = (tmp_path / "logs/rank_0.log").read_text()
    assert capsys.readouterr().err.count("\n") == 1
    assert "error: --data_path x: cannot be read: invalid literal" in log
    assert "Traceback" in log and "ValueError: invalid literal for int()" in log


def test_a_port_in_use_is_the_users_to_mend(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        group = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        for name, value in (group | {"MASTER_PORT": str(port)}).items():
            monkeypatch.setenv(name, value)
        with pytest.raises(UserError, match=f"port {port} .* in use.*--master_port"):
            init_process_group()


def test_other_trouble_of_the_network_is_told_as_it_is(monkeypatch):
    def unreachable(**_):
        raise DistNetworkError("no route to host")

    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr("deepspeed.init_distributed", unreachable)
    with pytest.raises(DistNetworkError, match="no route"):
        init_process_group()


def test_other_exceptions_are_one_message_with_rank_phase_and_step(capsys):
    clock = PhaseClock()

    def train(_config):
        announce("load models")
        announce_step(7)
        with clock.phase("score"):
            raise ZeroDivisionError("boom")

    assert run_step(lambda argv: argv, train, []) == 1
    first, second, *_, last = capsys.readouterr().err.splitlines()
    assert first == "rank 0 failed in phase 'score' at step 7:"
    assert second == "Traceback (most recent call last):"
    assert last == "ZeroDivisionError: boom"


def test_numbers_that_are_not_finite_are_no_fault_of_the_code(capsys):
    def train(_config):
        raise NonFiniteError("step 3: the loss is not finite")

    assert run_step(lambda argv: argv, train, []) == 3
    assert capsys.readouterr().err == "error: step 3: the loss is not finite\n"


def test_a_second_interrupt_is_the_users_will(capsys):
    def train(_config):
        announce_step(7)
        raise KeyboardInterrupt

    assert run_step(lambda argv: argv, train, []) == 1
    said = capsys.readouterr().err
    assert (
        said == f"rank 0 was interrupted a second time (phase 'start', step 7): the run ends at once; {HOW_TO_RESUME}\n"
    )


def test_without_steps_there_is_no_step_in_the_message(capsys):
    def train(_config):
        raise ZeroDivisionError

    capsys.readouterr()
    assert run_step(lambda argv: argv, train, []) == 1
    assert capsys.readouterr().err.startswith("rank 0 failed in phase 'start':\n")


def test_a_second_run_in_a_process_begins_anew(capsys):
    def train(_config):
        announce_step(7)
        with PhaseClock().phase("score"):
            raise ZeroDivisionError

    assert run_step(lambda argv: argv, train, []) == 1
    test_without_steps_there_is_no_step_in_the_message(capsys)


def test_a_stop_on_request_is_no_failure(capsys):
    def train(_config):
        raise StopRequested("saved; run the same command again to go on")

    assert run_step(lambda argv: argv, train, []) == 0
    said = capsys.readouterr()
    assert (said.out, said.err) == ("saved; run the same command again to go on\n", "")


def test_signals_are_noted_while_a_step_runs():
    noted = []

    def train(_config):
        os.kill(os.getpid(), signal.SIGTERM)
        noted.append(stop_requests.requested())

    assert run_step(lambda argv: argv, train, []) == 0
    assert noted == [True]


def test_phases_nest_and_add_up():
    clock = PhaseClock()
    announce("prepare data")
    for _ in range(2):
        with clock.phase("train"):
            clock.count_tokens("train", 5)
            assert current_phase() == "train"
            assert where() == "phase 'train'"
    seconds, tokens, peak = clock.take()
    assert tokens == {"train": 10}
    assert seconds["train"] > 0
    assert peak["train"] > 0
    assert clock.take() == ({}, {}, {})


def test_help_is_no_failure(capsys):
    from dschat_ppo.config.cli import parse

    with pytest.raises(SystemExit) as leaving:
        run_step(lambda argv: parse("sft", argv), lambda config: None, ["--help"])
    assert leaving.value.code == 0
    assert "failed" not in capsys.readouterr().err
