"""Step 3 with LoRA on one and two ranks: one trajectory, one base, exact switches to generation."""

import json

import numpy as np
import pytest
from adapter_folders import save_adapter
from launch import deepspeed, succeed

pytestmark = [pytest.mark.ranks, pytest.mark.slow]


@pytest.fixture(scope="module")
def found(assets, stored_rollout, tmp_path_factory):
    """What one and two ranks report."""
    save_adapter(assets / "lm", assets / "reward_adapter", scalar=True)
    save_adapter(assets / "lm", assets / "reward_dora", scalar=True, use_dora=True)
    folder = tmp_path_factory.mktemp("lora_ppo")
    results = []
    for ranks in (1, 2):
        succeed(deepspeed(ranks, "tests/workers/lora_ppo.py", assets, folder / f"{ranks}.json", timeout=300))
        results.append(json.loads((folder / f"{ranks}.json").read_text()))
    return results


def test_trajectories_do_not_depend_on_ranks_stages_or_the_number_of_bases(found):
    reference = [np.array(row) for row in found[0]["trajectories"]["stage 0 own bases"]]
    assert len(reference) == 4 and abs(reference[1] - reference[-1]).max() > 1e-3, "nothing was trained"
    for result in found:
        for label, trajectory in result["trajectories"].items():
            for row, expected in zip(trajectory, reference, strict=True):
                np.testing.assert_allclose(row, expected, rtol=1e-5, atol=1e-5, err_msg=label)


def test_two_hundred_switches_change_no_bit(found):
    assert [len(result["switches"]) for result in found] == [2, 8]
    for result in found:
        for label, seen in result["switches"].items():
            for name in ("weights_equal", "layers_equal", "plain", "whole", "same_forward"):
                assert seen[name], f"{label}: {name}"


def test_the_merged_model_gives_the_log_probs_of_training(found):
    for result in found:
        for label, seen in result["switches"].items():
            assert seen["adapter_effect"] > 0.05, f"{label}: the adapter does nothing, so nothing was tested"
            assert seen["merged_difference"] < (1e-4 if "fp32" in label else 0.3), label
