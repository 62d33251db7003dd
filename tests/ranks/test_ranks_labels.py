"""KTO, ORPO, SimPO, CPO and process reward models on real ranks: one trajectory for every split."""

import copy
import json
import random

import numpy as np
import pytest
from launch import forked, succeed

pytestmark = [pytest.mark.ranks, pytest.mark.slow]
KTO = ["kto stage 0 micro 1", "kto stage 3 micro 2", "kto packed stage 0 micro 1"]
OTHERS = ["process stage 3 micro 1", "orpo stage 3 micro 1", "simpo stage 3 micro 1", "cpo stage 2 micro 1"]
SHARED = ["kto stage 3 micro 1", "process stage 3 micro 1", "orpo stage 3 micro 1"]
WORDS = ["red", "blue", "a lamp", "here", "yes", "no thanks"]


def write(path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def trajectories(assets, tmp_path_factory):
    """Ranks, or "shared" for two ranks that share their rows -> label -> output of the worker."""
    folder, rng = tmp_path_factory.mktemp("labels"), random.Random(1)

    def text() -> str:
        return " " + " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, 4)))

    # mostly desirable and much alike, so that the policy makes mismatched answers likelier and the baseline is above 0
    write(folder / "kto.jsonl", [{"prompt": f"Q{n}:", "completion": text(), "label": n % 4 > 0} for n in range(20)])
    counts = [rng.randint(1, 3) for _ in range(20)]
    write(folder / "steps.jsonl", [
        {"prompt": f"Q{n}:", "completions": [text() for _ in range(count)], "labels": [(n + k) % 3 > 0 for k in
         range(count)]} for n, count in enumerate(counts)
    ])  # fmt: skip
    found = {}
    for name, ranks, shared in ((1, 1, 1), (2, 2, 1), ("shared", 2, 2)):
        succeed(forked(ranks, "tests/workers/labels.py", assets, shared, folder / f"{name}.json"))
        found[name] = json.loads((folder / f"{name}.json").read_text())
    return found


def equal(found: dict, expected: dict, label: str) -> None:
    assert len(found["steps"]) == len(expected["steps"])
    for one, other in zip([*found["steps"], found["eval"]], [*expected["steps"], expected["eval"]], strict=True):
        assert one.keys() == other.keys()
        for name, value in one.items():
            np.testing.assert_allclose(value, other[name], rtol=2e-4, atol=5e-6, err_msg=f"{label}: {name}")


def test_kto_does_not_depend_on_ranks_micro_batches_zero_stage_or_packing(trajectories):
    reference = trajectories[1]["kto stage 0 micro 2"]
    assert reference["steps"][0]["kl"] == pytest.approx(0.0, abs=1e-5), "an untrained policy is its own reference"
    assert max(step["kl"] for step in reference["steps"]) > 0.1, "the baseline stays 0"
    assert reference["eval"]["eval_kl"] > 0.1
    assert reference["steps"][0]["loss"] != pytest.approx(reference["steps"][-1]["loss"], abs=1e-2)
    for label in KTO:
        equal(trajectories[2][label], reference, label)


@pytest.mark.parametrize("label", SHARED)
def test_ranks_that_share_rows_compute_what_one_rank_computes(trajectories, label):
    found, expected = (copy.deepcopy(trajectories[name][label]) for name in ("shared", 1))
    assert abs(expected["steps"][0]["loss"] - expected["steps"][-1]["loss"]) > 1e-2, "nothing was trained"
    first = "accuracy" if label.startswith("kto") else None  # of rewards that are 0 up to rounding: no update yet
    for entry in (found, expected):
        entry["steps"][0] = {name: value for name, value in entry["steps"][0].items() if name != first}
    equal(found, expected, label)
    described, wanted = found["described"], expected["described"]
    assert bool(wanted) == label.startswith("process")
    assert described.pop("step_separator", None) == wanted.pop("step_separator", None)
    assert described == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize("label", OTHERS)
def test_other_objectives_do_not_depend_on_ranks(trajectories, label):
    one, two = (trajectories[ranks][label] for ranks in (1, 2))
    assert abs(one["steps"][0]["loss"] - one["steps"][-1]["loss"]) > 1e-2, "nothing was trained"
    equal(two, one, label)


def test_the_zero_stage_does_not_change_the_training_on_steps(trajectories):
    equal(trajectories[2]["process stage 0 micro 2"], trajectories[1]["process stage 3 micro 1"], "process")
    described = [dict(trajectories[ranks]["process stage 3 micro 1"]["described"]) for ranks in (1, 2)]
    separators = [entries.pop("step_separator") for entries in described]
    assert separators == ["\n", "\n"]
    assert described[0] == pytest.approx(described[1], rel=1e-4)
