"""NaN and infinity on one of two real ranks: both ranks skip the update, at every ZeRO stage."""

import json
import re
from collections import ChainMap

import pytest
from launch import forked, succeed

from dschat_ppo.features import hooks

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

GOOD = [True, False, None]
REFUSED = [False, False, None]
BAD_LOSS = [False, False, ["loss", 1, 1]]
BAD_GRADIENT = [False, False, ["gradient", 1, 1]]
OVERFLOW = [False, True, None]


@pytest.fixture(scope="module")
def out(assets, stored_rollout, tmp_path_factory):
    folder = tmp_path_factory.mktemp("nonfinite")
    succeed(forked(2, "tests/workers/nonfinite.py", assets, folder))
    return folder


@pytest.fixture(scope="module")
def found(out):
    """The results of both ranks, which must be the same."""
    first, second = (json.loads((out / f"{rank}.json").read_text()) for rank in (0, 1))
    assert first == second
    return first


def test_skipped_updates_do_not_affect_later_steps(found):
    cases = {name: case for name, case in found.items() if " stage " in name}
    assert len(cases) == 8
    for name, case in cases.items():
        of_gradient = OVERFLOW if "fp16" in name else BAD_GRADIENT
        expected = [GOOD, GOOD, BAD_LOSS, GOOD, BAD_LOSS, GOOD, of_gradient, GOOD, REFUSED, GOOD]
        assert case["results"] == expected, name
        assert all(case["equal"]), f"{name}: weights differ from an engine that saw only good steps"
        assert all(case["same_rate"]), name
        assert all(one == other for one, other in case["norms"]), name
        assert case["moved"], name
        assert case["scales"] == ([256] * 6 + [128] * 4 if "fp16" in name else [1] * 10), name


def test_bad_weights_on_any_rank_are_found_at_every_stage(found):
    """After the steps above: no bad weight; one on rank 1; those of an update with a huge learning
    rate."""
    for name, case in found.items():
        if " stage " in name:
            good, on_one_rank, result, of_update = case["bad weights"]
            assert good == "", name
            assert on_one_rank.startswith(
                "actor: weights are not finite (rank 1: second.weight): an update"
            ), name
            assert result == GOOD, f"{name}: the gradients are finite"
            assert of_update.startswith("actor: weights are not finite (rank 0: "), name


def test_a_skipped_update_of_the_actor_does_not_affect_the_critic_or_the_metrics(found):
    skip = found["skip"]
    assert sum(skip["bad_ranks"]) == 1
    assert skip["norms"] == ["critic"]
    assert skip["unmoved"]
    assert "value/loss" in skip["names"]
    assert not any(name.startswith("policy/") for name in skip["names"])
    assert skip["state"] == {
        "in_a_row": {"actor": 1, "critic": 0},
        "skipped": 1,
        "overflows": {"actor": 0, "critic": 0},
    }
    assert skip["after a good one"] == ["actor", "critic"]
    assert skip["in a row"] == {"actor": 0, "critic": 0}
    rank, message = skip["bad_ranks"].index(True), skip["stopped"]
    assert f"actor, step 6: the loss is not finite (rank {rank}, micro-batch " in message
    assert f"nonfinite/step_000006_rank_{rank}" in message
    assert "that makes 2 in a row (--max_nonfinite_skips)" in message
    assert skip["rows"] and skip["nothing adapted"], "bad values skip all updates of a PPO step"


def test_bundles_are_bounded_and_replay_in_one_process(found, out, capsys):
    rank = found["skip"]["bad_ranks"].index(True)
    folders = sorted(path.name for path in (out / "skip/nonfinite").iterdir())
    # --max_nonfinite_skips and one
    assert folders == [f"step_00000{step}_rank_{rank}" for step in (5, 6)]
    programs = ChainMap(*hooks("programs.PROGRAMS"))
    assert programs["replay"]([str(out / "skip/nonfinite" / folders[1])]) == 0
    said = capsys.readouterr().out
    assert "loss nan" in said
    assert re.search(r"advantages is not finite in \d+ of its rows", said)
