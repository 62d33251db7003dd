"""What is suggested for a path that does not exist."""

import pytest

from dschat_ppo.common.nearest_path import nearest_path


@pytest.mark.parametrize(("path", "meant"), [
    ("data/prompt.jsonl", "data/prompts.jsonl"), ("data/prompts.json", "data/prompts.jsonl"),
    ("dta/prompts.jsonl", "data/prompts.jsonl"), ("dta/prompt.jsonl", "data/prompts.jsonl"), ("dat", "data"),
    ("data/other.csv", None), ("elsewhere/prompts.jsonl", None), ("data/prompts.jsonl/x", None), ("", None),
    ("dta/sft.csv", None),
])  # fmt: skip
def test_the_nearest_existing_path_is_suggested(tmp_path, monkeypatch, path, meant):
    (tmp_path / "data").mkdir()
    (tmp_path / "data/prompts.jsonl").touch()
    monkeypatch.chdir(tmp_path)
    assert nearest_path(path) == (f"; did you mean {meant}?" if meant else "")
    absolute = tmp_path / path
    if path:
        assert nearest_path(absolute) == (f"; did you mean {tmp_path / meant}?" if meant else "")
