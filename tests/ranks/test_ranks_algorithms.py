"""Every estimator and loss makes the same updates on any number of ranks and with any micro-batch size."""

import json

import numpy as np
import pytest
from launch import forked, succeed
from workers.algorithms import CASES


@pytest.fixture(scope="module")
def updates(assets, stored_rollout, tmp_path_factory):
    """(ranks, label) -> array (updates, numbers): one rank without ZeRO, two ranks with ZeRO-3."""
    folder = tmp_path_factory.mktemp("algorithms")
    lines = [json.dumps({"text": "a few words " * count}) + "\n" for count in range(1, 30)]
    (assets / "texts.jsonl").write_text("".join(lines), encoding="utf-8")
    found = {}
    for ranks, stage in ((1, 0), (2, 3)):
        out = folder / f"{ranks}.json"
        succeed(forked(ranks, "tests/workers/algorithms.py", assets, out, stage, timeout=900))
        found |= {(ranks, label): np.array(numbers) for label, numbers in json.loads(out.read_text()).items()}
    return found


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_updates_do_not_depend_on_ranks_or_micro_batches(updates, case):
    reference = updates[1, f"{case}, micro 4"]
    assert reference.shape[0] == 4
    assert np.abs(np.diff(reference, axis=0)).max() > 1e-3, "nothing was trained"
    for ranks in (1, 2):
        for micro in (1, 4):
            found = updates[ranks, f"{case}, micro {micro}"]
            np.testing.assert_allclose(found, reference, rtol=2e-4, atol=2e-6, err_msg=f"{ranks} ranks, micro {micro}")


@pytest.mark.ranks
@pytest.mark.slow
def test_cases_are_different(updates):
    first = {case: updates[1, f"{case}, micro 4"][0, -1 if not case.startswith("gae") else -2] for case in CASES}
    assert len({round(float(norm), 6) for norm in first.values()}) == len(CASES), first
