"""The hybrid engine on real ranks: switches to generation change no training, and memory flags
change no number."""

import json

import numpy as np
import pytest
from adapter_folders import save_adapter
from launch import forked, succeed

pytestmark = [pytest.mark.ranks, pytest.mark.slow]


@pytest.fixture(scope="module")
def launches(assets, tmp_path_factory):
    """What each rank reports, of a launch of two and of one."""
    folder = tmp_path_factory.mktemp("hybrid")
    (assets / "partition_all.json").write_text(
        '{"zero_optimization": {"stage3_param_persistence_threshold": 0}}'
    )
    save_adapter(assets / "lm", assets / "reward_adapter", scalar=True)
    save_adapter(assets / "lm", assets / "reward_dora", scalar=True, use_dora=True)
    for ranks in (1, 2):
        succeed(forked(ranks, "tests/workers/hybrid.py", assets, folder / str(ranks), timeout=900))
    return [json.loads((folder / name).read_text()) for name in ("1.0", "2.0", "2.1")]


@pytest.fixture(scope="module")
def found(launches):
    """Of the two ranks."""
    return launches[1:]


def test_switches_change_no_weight_and_restore_training(found):
    for rank in found:
        toggles = rank["toggles"]
        assert toggles["weights equal"] and toggles["equal"] and toggles["training"]
        assert toggles["left tensors"] <= 0 and toggles["difference"] < 1e-5
        assert rank["steps"]["plain"]["partitioned"] == 21, "all"


def test_generating_in_between_changes_no_bit(found):
    for rank in found:
        assert rank["steps"]["toggled"] == rank["steps"]["plain"]


@pytest.mark.parametrize("how", ["stage 2", "offload", "layer by layer", "one rank"])
def test_answers_and_updates_differ_by_rounding_alone(launches, how):
    alone, *found = launches
    for rank in found:
        expected, other = (
            rank["steps"]["plain"],
            alone["steps"]["plain"] if how == "one rank" else rank["steps"][how],
        )
        assert (
            expected["answers"][0] != expected["answers"][1]
            and min(expected["metrics"][0][2:4]) > 1e-3
        )
        assert other["answers"] == expected["answers"]
        np.testing.assert_allclose(other["metrics"], expected["metrics"], rtol=1e-4, atol=1e-6)


def test_calls_of_one_rank_are_answered_alike_in_the_passes_of_both_and_alone(found):
    """With weights gathered layer by layer the rank without a program makes the same passes; with
    whole weights the other one goes on by itself, between any two tokens."""
    assert [calls["numbers"] for calls in found[1]["calls"].values()] == [[], []]
    calls = found[0]["calls"]
    alone, together = calls["toggled"], calls["layer by layer"]
    assert len(alone["numbers"]) > 3 and min(map(len, alone["ids"])) < max(map(len, alone["ids"]))
    for name in ("numbers", "ids"):
        assert together[name] == alone[name]
    np.testing.assert_allclose(together["logprobs"], alone["logprobs"], atol=1e-4)


def test_ranks_with_answers_of_other_lengths_or_none_lose_no_row(found):
    for rank in found:
        assert rank["uneven"] == found[0]["uneven"] and rank["empty"] == found[0]["empty"]
        assert (rank["uneven"]["rows"], rank["empty"]["rows"], rank["empty"]["tokens"]) == (8, 8, 4)
        assert rank["uneven"]["tokens"] > 8


def test_dropout_is_off_in_rollout_and_scoring_and_each_rank_has_its_own_stream(found):
    assert found[0]["dropout"]["stream"] != found[1]["dropout"]["stream"]
    for rank in found:
        assert rank["dropout"]["alike"] and rank["dropout"]["as in rollout"] < 1e-4
        assert rank["dropout"]["noise"] > 0.01, "dropout does nothing, so nothing was tested"


def test_switches_with_adapters_change_no_bit_and_the_merged_model_gives_the_log_probs_of_training(
    launches,
):
    assert [len(rank["adapters"]) for rank in launches] == [1, 2, 2]
    for rank in launches:
        for label, seen in rank["adapters"].items():
            for name in ("weights equal", "layers equal", "plain", "same forwards"):
                assert seen[name], f"{label}: {name}"
            assert seen["effect"] > 0.03, (
                f"{label}: the adapter does nothing, so nothing was tested"
            )
            assert seen["difference"] < 1e-4, label
