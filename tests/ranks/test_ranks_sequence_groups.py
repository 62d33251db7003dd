"""`--sequence_parallel_size 2` on four ranks: two groups compute what two ranks compute without it."""

import json

import numpy as np
import pytest
from launch import forked, succeed

pytestmark = [pytest.mark.ranks, pytest.mark.slow]
LAUNCHES = {"alone": (2, 1), "groups": (4, 2)}  # name -> ranks, and how many of them share their rows


@pytest.fixture(scope="module")
def found(assets, stored_rollout, tmp_path_factory):
    """Launch -> output of the worker."""
    folder = tmp_path_factory.mktemp("groups")
    for name, (ranks, shared) in LAUNCHES.items():
        out = folder / name
        # every weight of the tiny models is partitioned, the small ones too
        (folder / f"{name}.ds.json").write_text('{"zero_optimization": {"stage3_param_persistence_threshold": 0}}')
        succeed(forked(ranks, "tests/workers/sequence_parallel.py", assets, shared, out, timeout=300))
    return {name: json.loads((folder / name).read_text()) for name in LAUNCHES}


@pytest.mark.parametrize("step", ["sft", "ppo"])
def test_two_groups_have_the_trajectory_of_two_ranks(found, step):
    reference = found["alone"][step]["trajectory"]
    losses = [row[0] for row in (reference[1:] if step == "ppo" else reference[:-1])]
    assert np.abs(np.diff(losses)).max() > 1e-3, "nothing was trained"
    for launch in found.values():
        for label in (step, f"{step} tiled"):
            for row, expected in zip(launch[label]["trajectory"], reference, strict=True):
                np.testing.assert_allclose(row, expected, rtol=2e-5, atol=2e-6, err_msg=label)


@pytest.mark.parametrize("step", ["sft", "ppo"])
def test_ranks_with_uneven_rows_run_equally_many_pieces_of_tiled_mlps(found, step):
    """ZeRO-3 gathers the weights for each piece, so a rank with fewer pieces would make the others wait forever."""
    for launch in found.values():
        pieces = launch[f"{step} tiled"]["pieces"]
        assert len({len(of_rank) for of_rank in pieces}) == 1
        assert any(0 in of_rank for of_rank in pieces), "no rank has fewer tokens than another"
