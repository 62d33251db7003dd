"""Running a step: exit codes, and the one message of a run that fails."""

import os
import signal

import pytest

from dschat_ppo.common.phases import PhaseClock, announce, announce_step, reset_phases
from dschat_ppo.errors import NonFiniteError, StopRequested, UnhealthyRun, UserError, reading
from dschat_ppo.runtime import launch, stop_requests
from dschat_ppo.runtime.exit_codes import HOW_TO_RESUME
from dschat_ppo.runtime.first_failure import FirstFailureRecord
from dschat_ppo.runtime.launch import run_step
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


def test_the_error_of_a_library_is_only_in_the_log(capsys, tmp_path):
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


def test_a_nonfinite_error_is_its_message_and_exit_code_3(capsys):
    def train(_config):
        raise NonFiniteError("step 3: the loss is not finite")

    assert run_step(lambda argv: argv, train, []) == 3
    assert capsys.readouterr().err == "error: step 3: the loss is not finite\n"


def test_an_unhealthy_run_is_one_line_and_exit_code_6(capsys):
    def train(_config):
        raise UnhealthyRun("--stop_on_health error: step 3: kl_negative")

    assert run_step(lambda argv: argv, train, []) == 6
    assert capsys.readouterr().err == "error: --stop_on_health error: step 3: kl_negative\n"


def test_a_second_interrupt_prints_no_traceback(capsys):
    def train(_config):
        announce_step(7)
        raise KeyboardInterrupt

    assert run_step(lambda argv: argv, train, []) == 1
    message = "rank 0 was interrupted a second time (phase 'start', step 7): the run ends at once"
    assert capsys.readouterr().err == f"{message}; {HOW_TO_RESUME}\n"


def test_messages_show_no_credentials(capsys, tmp_path):
    open_log(tmp_path)
    try:
        for kind in (UserError, RuntimeError, NonFiniteError):

            def fails(_, kind=kind):
                raise kind("http://me:s3cret@host/")

            run_step(list, fails, [])
    finally:
        close_log()
    for text in (capsys.readouterr().err, (tmp_path / "logs" / "rank_0.log").read_text()):
        assert text.count("http://***@host/") >= 3 and "s3cret" not in text


def test_without_steps_there_is_no_step_in_the_message(capsys):
    def train(_config):
        raise ZeroDivisionError

    capsys.readouterr()
    assert run_step(lambda argv: argv, train, []) == 1
    assert capsys.readouterr().err.startswith("rank 0 failed in phase 'start':\n")


def test_a_second_run_in_a_process_starts_without_phase_and_step(capsys):
    def train(_config):
        announce_step(7)
        with PhaseClock().phase("score"):
            raise ZeroDivisionError

    assert run_step(lambda argv: argv, train, []) == 1
    test_without_steps_there_is_no_step_in_the_message(capsys)


def test_a_stop_on_request_is_no_failure(capsys):
    def train(_config):
        raise StopRequested("saved; run the same command again to resume")

    assert run_step(lambda argv: argv, train, []) == 0
    said = capsys.readouterr()
    assert (said.out, said.err) == ("saved; run the same command again to resume\n", "")


def test_signals_are_noted_while_a_step_runs():
    noted = []

    def train(_config):
        os.kill(os.getpid(), signal.SIGTERM)
        noted.append(stop_requests.requested())

    assert run_step(lambda argv: argv, train, []) == 0
    assert noted == [True]


def test_help_is_no_failure(capsys):
    from dschat_ppo.config.cli import parse

    with pytest.raises(SystemExit) as leaving:
        run_step(lambda argv: parse("sft", argv), lambda config: None, ["--help"])
    assert leaving.value.code == 0
    assert "failed" not in capsys.readouterr().err


@pytest.mark.parametrize(("first_code", "code", "is_reported"), [(0, 1, True), (3, 3, False)])
def test_a_failure_after_another_rank_is_reported_only_if_that_rank_stopped_in_order(
    capsys, tmp_path, monkeypatch, first_code, code, is_reported
):
    record = FirstFailureRecord(tmp_path)
    with monkeypatch.context() as patch:
        patch.setenv("RANK", "1")
        FirstFailureRecord(tmp_path).record(first_code)
    monkeypatch.setattr(launch, "open_failure_record", lambda: record)

    def train(_config):
        raise ZeroDivisionError("boom")

    assert run_step(lambda argv: argv, train, []) == code
    assert ("boom" in capsys.readouterr().err) is is_reported
