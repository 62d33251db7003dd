"""Updates on answers whose prompt is run once: the same trajectory as with separate rows, on one rank and on two."""

import json

import numpy as np
import pytest
from launch import forked, succeed


@pytest.mark.ranks
@pytest.mark.slow
def test_shared_prompts_change_no_trajectory_on_one_rank_or_two(assets, tmp_path):
    found = {}
    for ranks in (1, 2):
        out = tmp_path / f"{ranks}.json"
        succeed(forked(ranks, "tests/workers/shared_prompts.py", assets, out))
        found[ranks] = json.loads(out.read_text())
    separate = np.array(found[1]["False"]["numbers"])
    assert separate.shape == (3, 5)
    assert np.abs(np.diff(separate, axis=0)).max() > 1e-3, "nothing was trained"
    for ranks in (1, 2):
        for shares in ("True", "False"):
            np.testing.assert_allclose(found[ranks][shares]["numbers"], separate, rtol=1e-4, atol=1e-6)
        assert found[ranks]["True"]["tokens"] < 0.65 * found[ranks]["False"]["tokens"]
