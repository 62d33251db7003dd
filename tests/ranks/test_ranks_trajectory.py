"""The trajectory does not depend on ranks, micro-batches or ZeRO stages."""

import json

import numpy as np
import pytest
from launch import forked, succeed

REFERENCE = "stage 0 micro 4"


@pytest.fixture(scope="module")
def trajectories(assets, stored_rollout, tmp_path_factory):
    """Task -> label -> array (steps, numbers), for one and two ranks."""
    folder = tmp_path_factory.mktemp("trajectories")
    found = {"sft": {}, "reward": {}, "ppo": {}, "bf16": {}}
    for ranks in (1, 2):
        out = folder / f"{ranks}.json"
        succeed(forked(ranks, "tests/workers/trajectory.py", assets, out, timeout=900))
        for label, trajectory in json.loads(out.read_text()).items():
            task, how = label.split(" ", 1)
            found[task][f"{ranks} ranks {how}"] = np.array(trajectory)
    return found


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("task", ["sft", "reward", "ppo"])
def test_trajectory_does_not_depend_on_ranks_micro_batches_or_zero_stage(trajectories, task):
    reference = trajectories[task][f"1 ranks {REFERENCE}"]
    assert reference.shape[0] == 5
    assert np.abs(np.diff(reference, axis=0)).max() > 1e-3, "nothing was trained"
    assert len(trajectories[task]) == 1 + 4 + {"sft": 2, "reward": 0, "ppo": 1}[task]
    for label, trajectory in trajectories[task].items():
        np.testing.assert_allclose(trajectory, reference, rtol=1e-4, atol=1e-6, err_msg=label)


@pytest.mark.ranks
@pytest.mark.slow
def test_in_bf16_every_stage_is_near_fp32(trajectories):
    exact = trajectories["sft"][f"1 ranks {REFERENCE}"]
    assert len(trajectories["bf16"]) == 3
    for label, trajectory in trajectories["bf16"].items():
        np.testing.assert_allclose(trajectory[:, 0], exact[:, 0], rtol=1e-2, err_msg=label)
