"""Exit codes, and what is said when something is wrong."""

import pytest

from dschat_ppo.common.launch import run_step
from dschat_ppo.common.phases import PhaseClock, announce, current_phase
from dschat_ppo.errors import UserError


def test_success_returns_0():
    assert run_step(lambda argv: argv, lambda config: None, ["--x"]) == 0


def test_user_error_is_one_line_and_exit_code_2(capsys):
    def train(_config):
        raise UserError("--data_path nowhere: no such file")

    assert run_step(lambda argv: argv, train, []) == 2
    assert capsys.readouterr().err == "error: --data_path nowhere: no such file\n"


def test_other_exceptions_propagate_after_rank_and_phase(capsys):
    clock = PhaseClock()

    def train(_config):
        announce("load models")
        with clock.phase("score"):
            raise ZeroDivisionError("boom")

    with pytest.raises(ZeroDivisionError, match="boom"):
        run_step(lambda argv: argv, train, [])
    assert "rank 0 failed in phase 'score':" in capsys.readouterr().err


def test_phases_nest_and_add_up():
    clock = PhaseClock()
    announce("prepare data")
    for _ in range(2):
        with clock.phase("train"):
            clock.count_tokens("train", 5)
            assert current_phase() == "train"
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
