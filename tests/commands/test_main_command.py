"""`python -m dschat_ppo`: each training step and each tool is a command."""

import sys
from pathlib import Path

import pytest

import dschat_ppo
from dschat_ppo import __main__ as program
from dschat_ppo.commands import TRAINERS

TOOLS = Path(dschat_ppo.__file__).parent / "tools"


def test_every_program_of_the_tools_is_a_command():
    programs = {path.stem for path in TOOLS.glob("*.py") if '__name__ == "__main__"' in path.read_text()}
    assert programs == set(program.TOOLS)
    assert set(program.TRAINING) == set(TRAINERS)


def test_a_step_gets_its_flags(monkeypatch):
    started = []
    monkeypatch.setattr(program, "start", lambda step, words: started.append((step, words)) or 7)
    assert program.main(["ppo", "--seed", "3"]) == 7
    assert program.main(["--local_rank=1", "sft", "--seed", "3"]) == 7  # as DeepSpeed's launcher writes it
    assert started == [("ppo", ["--seed", "3"]), ("sft", ["--seed", "3"])]


@pytest.mark.parametrize("name", ["export", "serve-reward"])
def test_a_tool_runs_as_its_module(monkeypatch, capsys, name):
    monkeypatch.setattr(sys, "argv", ["dschat_ppo"])
    with pytest.raises(SystemExit) as ended:
        program.main([name, "--help"])
    assert ended.value.code == 0
    assert "usage: " in capsys.readouterr().out


def test_an_unknown_command_is_refused(capsys):
    assert program.main(["rewrad"]) == 2
    assert "error: rewrad: no such command; did you mean reward?" in capsys.readouterr().err
