"""The functions of docs/rewards.md run, as they stand there."""

import pytest
from bash_blocks import ROOT, files_of

from dschat_ppo.rewards.function_reward import FunctionReward, parse_function
from dschat_ppo.rewards.reward_source import RewardRequest


def test_the_ranking_function_compares_the_responses_of_a_group(tmp_path, monkeypatch):
    page = ROOT / "docs/rewards.md"
    (tmp_path / "ranking.py").write_text(files_of(page)["ranking.py"], encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert "--reward_function ranking.py:shorter_wins" in page.read_text(encoding="utf-8")
    reward = FunctionReward(parse_function("ranking.py:shorter_wins"), 1, 10.0)
    responses = ["aaa", "b", "ccccc", "dd", "eeee", "ffff"]
    for samples, scores in (
        (3, [1.5 / 3, 2.5 / 3, 0.5 / 3, 2.5 / 3, 1 / 3, 1 / 3]),
        (1, [0.5] * 6),  # nothing to compare
    ):
        request = RewardRequest.of(["same"] * 6, responses, [{}] * 6, samples=samples)
        assert reward(request, None).tolist() == pytest.approx(scores)
    assert reward.counts.failed == 0
    reward.close()
