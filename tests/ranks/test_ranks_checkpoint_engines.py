"""Saving engines on real ranks, and resuming from the files in the same layout and in others."""

import json
import math

import numpy as np
import pytest
from launch import forked, succeed

from dschat_ppo.checkpoint.engine_state import common_state

pytestmark = [pytest.mark.ranks, pytest.mark.slow, pytest.mark.release]

RANKS = {"first": 1, "main": 2, "last": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("engines")


@pytest.fixture(scope="module")
def found(folder):
    """Part -> what each of its ranks reports."""
    reports = {}
    for part, ranks in RANKS.items():
        succeed(forked(ranks, "tests/workers/engine_states.py", folder, part))
        reports[part] = [
            json.loads((folder / f"{part}.{rank}").read_text()) for rank in range(ranks)
        ]
    return reports


def saved_and_resumed(found):
    for part in ("first", "main"):
        for rank, report in enumerate(found[part]):
            for case, saved in report["saved"].items():
                yield f"{part}, rank {rank}: {case}", saved, report["resumed"][case]


def test_resumed_training_is_bit_equal(found):
    seen = []
    for case, saved, resumed in saved_and_resumed(found):
        assert resumed["other"] != saved["saved"], (
            f"{case}: the fresh engine was the saved one already"
        )
        assert resumed["loaded"] == saved["saved"], case
        assert resumed["after"] == saved["after"], case
        assert resumed["end"] == saved["end"] != saved["saved"], case
        seen.append(case)
    assert len(seen) == 3 + 2 * 10


def test_the_schedule_is_past_its_warm_up_and_losses_fall(found):
    for case, saved, _ in saved_and_resumed(found):
        if "unstarted" in case:
            continue
        rates = [step[2] for step in saved["before"] + saved["after"]]
        if "fp16" not in case:
            assert rates[0] == 0 < rates[1] < rates[2], case
            assert rates[2] > rates[3] > rates[6] > 0, case
        losses = [step[0] for step in saved["before"] + saved["after"]]
        # what is frozen there is random
        assert "frozen" in case or losses[0] - losses[-1] > 0.1, case


def test_fp16_overflows_before_and_after_the_save_lower_the_scale_once(found):
    """DeepSpeed forgives the first overflow (hysteresis 2): only who remembers it halves the scale
    at the second."""
    for case, saved, resumed in saved_and_resumed(found):
        if "fp16" in case:
            norms = [step[1] for step in saved["before"] + resumed["after"]]
            assert [number for number, norm in enumerate(norms) if math.isinf(norm)] == [1, 5], case
            scales = [step[3] for step in saved["before"] + resumed["after"]]
            assert scales == [2.0**10] * 5 + [2.0**9] * 2, case


def test_files_hold_no_frozen_weight_under_any_of_its_names(folder):
    """Of the frozen cases only biases, the norm and one matrix, of 60 elements, train; the buffer
    is there."""
    for part, case in (("main", case.name) for case in (folder / "main").iterdir()):
        common = common_state(folder / part / case)
        trained = {"narrow.bias", "norm.weight", "norm.bias", "widen.weight"}
        frozen = {"embedding.weight", "narrow.weight"}  # head.weight is tied to the embedding
        assert common["buffers"].keys() == {"passes"}
        assert common["shapes"].keys() == (trained if "frozen" in case else trained | frozen), case
        assert set(common["frozen"]) == {"shift"} | (frozen if "frozen" in case else set()), case


def resharded(found):
    for part, reports in found.items():
        for rank, report in enumerate(reports):
            for case, how in report["resharded"].items():
                yield f"{part}, rank {rank}: {case}", how


def test_another_layout_starts_from_the_same_numbers_to_the_last_bit(found):
    seen = []
    for case, how in resharded(found):
        assert how["differing"] == [], case
        assert not how["masters_are_bf16"] or "unstarted" in case, case
        assert how["settled"], case
        loaded, expected = how["steps"]
        skipped, steps = int("fp16" in case), 0 if "unstarted" in case else 4
        assert loaded == expected == ([steps - skipped] if steps else []), case
        assert how["counters"][:2] == [steps, skipped], case
        assert how["decays"] == pytest.approx([0.3, 0.0] + [0.3] * ("muon" in case)), case
        # micro-batches of 2 of 8 rows, on 1 or 2 ranks
        per_step = 4 if how["source"] == "first" else 2
        assert how["counters"][2:] == [steps * per_step], case
        assert len(how["names"]) == (4 if "frozen" in case else 6), case
        seen.append(case)
    assert len(seen) == 2 * 10 + 4


def test_training_in_another_layout_continues_like_the_saved_one(found):
    for case, how in resharded(found):
        losses, expected = (
            np.array([step[0] for step in how[key]]) for key in ("after", "expected")
        )
        rates, expected_rates = (
            np.array([step[2] for step in how[key]]) for key in ("after", "expected")
        )
        # after two steps fp16 has skipped another one
        same = 2 if "fp16 -> stage 2 bf16" in case else 3
        rtol = 1e-4 if "bf16" not in case else 1e-2
        np.testing.assert_allclose(losses[:same], expected[:same], rtol=rtol, err_msg=case)
        np.testing.assert_array_equal(rates[:same], expected_rates[:same], err_msg=case)
        assert np.abs(np.diff(expected)).max() > 1e-2, f"{case}: nothing was trained"


def test_fp16_keeps_its_scale_in_another_layout_but_not_in_another_dtype(found):
    scales = {
        case.split(": ")[-1]: [step[3] for step in how["after"]]
        for case, how in resharded(found)
        if "fp16" in case
    }
    assert scales == {
        "stage 2 fp16 -> stage 3 fp16": [2.0**10, 2.0**9, 2.0**9],
        "stage 2 fp16 -> stage 2 bf16": [1.0, 1.0, 1.0],
    }
