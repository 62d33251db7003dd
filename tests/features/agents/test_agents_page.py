"""The function of docs/agents.md plays an episode as it stands there."""

import re

from launch import ROOT
from test_agents import played

PAGE = ROOT / "docs/agents.md"


def test_the_function_of_the_page(tmp_path):
    [code] = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "my_agent.py").write_text(code)
    rows = [{"question": "say yes", "answer": "said yes"}, {"question": "say no", "answer": "yes"}]
    turns, _ = played({"function": f"{tmp_path / 'my_agent.py'}:play"}, rows)
    assert [episode.problem for episode in turns.episodes] == ["", ""]
    assert [episode.result.reward for episode in turns.episodes] == [1, 0]
