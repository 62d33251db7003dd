"""The function and the program of docs/agents.md play episodes as they stand there."""

import re
import shutil

import pytest
from launch import ROOT
from test_agents import played

PAGE = ROOT / "docs/agents.md"
ROWS = [{"question": "say yes", "answer": "said yes"}, {"question": "say no", "answer": "yes"}]


def test_the_function_of_the_page(tmp_path):
    [code] = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "my_agent.py").write_text(code)
    turns, _ = played({"function": f"{tmp_path / 'my_agent.py'}:play"}, ROWS)
    assert [episode.problem for episode in turns.episodes] == ["", ""]
    assert [episode.result.reward for episode in turns.episodes] == [1, 0]


@pytest.mark.skipif(not shutil.which("jq") or not shutil.which("curl"), reason="needs jq and curl")
def test_the_program_of_the_page(tmp_path):
    [code] = re.findall(r"```sh\n(#!/bin/bash\n.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "agent.sh").write_text(code)
    turns, _ = played({"command": f"bash '{tmp_path / 'agent.sh'}'"}, ROWS)
    assert [episode.problem for episode in turns.episodes] == ["", ""]
    assert [episode.result.reward for episode in turns.episodes] == [1, 0]
