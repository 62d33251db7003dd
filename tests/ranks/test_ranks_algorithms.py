"""Every estimator and loss makes the same updates on any number of ranks and with any micro-batch size."""

import json

import numpy as np
import pytest
from launch import forked, succeed
from workers.algorithms import CASES


@pytest.fixture(scope="module")
def updates(assets, stored_rollout, tmp_path_factory):
    """(ranks, case) -> array (updates, numbers): one rank without ZeRO, two with ZeRO-3 and one row a micro-batch."""
    folder = tmp_path_factory.mktemp("algorithms")
    lines = [json.dumps({"text": "a few words " * count}) + "\n" for count in range(1, 30)]
    (assets / "texts.jsonl").write_text("".join(lines), encoding="utf-8")
    found = {}
    for ranks, stage, micro in ((1, 0, 4), (2, 3, 1)):
        out = folder / f"{ranks}.json"
        succeed(forked(ranks, "tests/workers/algorithms.py", assets, out, stage, micro))
        found |= {(ranks, label): np.array(numbers) for label, numbers in json.loads(out.read_text()).items()}
    return found


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_updates_do_not_depend_on_ranks_or_micro_batches(updates, case):
    reference = updates[1, case]
    assert reference.shape[0] == 4
    assert np.abs(np.diff(reference, axis=0)).max() > 1e-3, "nothing was trained"
    np.testing.assert_allclose(updates[2, case], reference, rtol=2e-4, atol=2e-6)


@pytest.mark.ranks
@pytest.mark.slow
def test_cases_are_different(updates):
    first = {case: updates[1, case][0, -1 if not case.startswith("gae") else -2] for case in CASES}
    assert len({round(float(norm), 6) for norm in first.values()}) == len(CASES), first
