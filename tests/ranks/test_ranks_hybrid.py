"""The hybrid engine on two real ZeRO-3 ranks: 200 switches to generation and back do not change training."""

import json
import math

import pytest
from launch import forked, succeed

pytestmark = [pytest.mark.ranks, pytest.mark.slow]


@pytest.fixture(scope="module")
def found(assets, stored_rollout, tmp_path_factory):
    """What each rank reports."""
    out = tmp_path_factory.mktemp("hybrid") / "found"
    succeed(forked(2, "tests/workers/hybrid.py", assets, out))
    return [json.loads((out.parent / f"found.{rank}").read_text()) for rank in (0, 1)]


def test_generating_changes_no_weight_and_restores_training(found):
    for rank in found:
        toggles = rank["toggles"]
        assert toggles["weights_equal"]
        assert toggles["hooks_equal"]
        assert toggles["status_equal"]
        assert toggles["partitioned"] > 0, "nothing was partitioned, so nothing was tested"
        assert toggles["stack_growth"] == 0
        assert toggles["training_mode"]


def test_memory_does_not_grow_over_200_switches(found):
    for rank in found:
        assert rank["toggles"]["memory_growth_mib"] < 8


def test_log_probs_of_the_generating_model_match_the_engine(found):
    for rank in found:
        assert rank["gathered_difference"] < 1e-5


def test_updates_are_bit_equal_with_and_without_generating_in_between(found):
    for rank in found:
        assert len(rank["with_toggles"]) > 10
        assert rank["with_toggles"] == rank["without_toggles"]
        assert rank["asleep"] == rank["without_toggles"]


def test_ranks_that_finish_at_different_lengths_lose_no_row(found):
    for rank in found:
        assert rank["uneven"]["rows"] == 8
        assert rank["uneven"]["tokens"] > 8
        assert rank["uneven"] == found[0]["uneven"]


def test_a_rank_whose_answers_are_all_empty_neither_hangs_nor_loses_rows(found):
    for rank in found:
        assert rank["one_rank_empty"]["rows"] == 8
        assert rank["one_rank_empty"]["tokens"] == 4
        assert all(math.isfinite(value) for value in rank["one_rank_empty"].values())
        assert rank["one_rank_empty"]["optim/grad_norm/actor"] > 0


def test_dropout_is_off_in_rollout_and_scoring(found):
    for rank in found:
        assert rank["dropout"]["scored_alike"]
        assert rank["dropout"]["as_in_rollout"] < 1e-4
        assert rank["dropout"]["noise_in_training"] > 0.01, "dropout does nothing, so nothing was tested"


def test_layer_by_layer_gives_the_same_answers_with_ranks_of_uneven_work(found):
    for rank, most in zip(found, (2, 9), strict=True):
        report = rank["layer_by_layer"]
        assert report["collective"] == [True, False]
        assert report["engine"] == "continuous"
        assert report["same_tokens"]
        assert report["same_tokens_padded"]
        assert report["difference"] < 1e-4
        assert report["weights_equal"]
        assert report["partitioned"] > 0, "nothing was partitioned, so nothing was gathered layer by layer"
        assert report["longest"] == most
        assert report["trains"]


def test_answers_do_not_depend_on_the_number_of_ranks(found, assets, tmp_path):
    succeed(forked(1, "tests/workers/hybrid.py", assets, tmp_path / "one"))
    alone = json.loads((tmp_path / "one").read_text())["answers"]
    assert found[0]["answers"] == found[1]["answers"] == alone
    assert alone[0] != alone[1], "two steps with the same answers"


def test_each_rank_has_its_own_dropout_stream(found):
    assert found[0]["dropout_noise"] != found[1]["dropout_noise"]
