"""Judges in processes of their own: of a run on two ranks, and of one that is killed."""

import json
import signal
import threading

import pytest
from judge_parts import ROLLOUT, Server, address_judge, request, tokens
from launch import fork_ranks, forked, rank_environments, succeed, wait_until

pytestmark = pytest.mark.ranks


def test_scores_are_those_of_transformers_on_each_rank_and_with_divided_weights(assets, tmp_path):
    (assets / "partition_all.json").write_text(
        '{"zero_optimization": {"stage3_param_persistence_threshold": 0}}'
    )
    (assets / "short.jinja").write_text("{{ prompt }} {{ answer }}")
    out = tmp_path / "out"
    succeed(forked(2, "tests/features/judges/judge_ranks.py", assets, out))
    for rank in range(2):
        results = json.loads((tmp_path / f"out.{rank}").read_text())
        for stage, is_divided in (("2", False), ("3", True)):
            assert results[stage]["largest"] < 1e-5 < 1e-3 < results[stage]["spread"]
            assert (results[stage]["divided"] > 0) == is_divided


def test_a_run_that_is_killed_after_10_of_20_replies_asks_for_10_more(tmp_path):
    started = []
    killed = threading.Event()

    def reply(query, count):
        if count == 11:
            started[0].send(signal.SIGKILL)
            killed.set()
        return 200, tokens(yes=0.5, no=0.5)

    server = Server(reply)
    script = "tests/features/judges/killed_judge.py"
    ranks = rank_environments(1, {})
    started.append(fork_ranks(tmp_path, ranks, script, server.url, tmp_path))
    wait_until(killed.is_set, 60, lambda: started[0].err)
    asked_before = len(server.queries)
    answers = [f"answer {number}" for number in range(20)]
    resumed = address_judge(server.url, journal=tmp_path)
    assert resumed(request(answers, step=1), ROLLOUT).tolist() == pytest.approx([0.5] * 20)
    assert (asked_before, len(server.queries) - asked_before) == (11, 10)
    server.server.shutdown()
    server.server.server_close()
