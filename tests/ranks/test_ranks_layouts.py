"""Training does not depend on ranks, micro-batches, ZeRO stages, packing, or on how ranks share
their rows."""

import json
import math
import random
from functools import cache

import numpy as np
import pytest
import torch
from adapter_folders import save_adapter
from launch import forked, succeed
from transformers import AutoModelForCausalLM, AutoTokenizer
from workers.layouts import (
    CASES,
    CASES_OF_A_CHANGE,
    CASES_OF_A_RELEASE,
    LAUNCHES,
    SUPERVISED_STEPS,
    UPDATES,
)

pytestmark = [pytest.mark.ranks, pytest.mark.slow]
WORDS = ["red", "blue", "a lamp", "here", "yes", "no thanks"]
# which the policy begins as: the accuracy before an update is that of rounding
AS_REFERENCE = "dpo", "kto"


def write_rows(path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


class Launches:
    """Starts a launch when its numbers are first asked for."""

    def __init__(self, assets, folder):
        self.assets = assets
        self.folder = folder

    @cache  # noqa: B019  (a module has one)
    def numbers(self, launch: str) -> dict:
        """ "case: layout" -> the numbers of each step."""
        ranks, _, _ = LAUNCHES[launch]
        out = self.folder / launch
        succeed(forked(ranks, "tests/workers/layouts.py", launch, self.assets, out, timeout=1800))
        return json.loads(out.read_text())

    def of_one_rank(self, launch: str) -> dict:
        """Case -> the numbers of one rank without ZeRO."""
        numbers = self.numbers(launch)
        return {label.split(":")[0]: rows for label, rows in numbers.items()}


@pytest.fixture(scope="module")
def launches(assets, stored_rollout, tmp_path_factory):
    """The launches, with the data and the models that they read."""
    folder, rng = tmp_path_factory.mktemp("layouts"), random.Random(1)

    def text() -> str:
        return " " + " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, 4)))

    # mostly desirable and much alike, so that the policy makes mismatched answers likelier and the
    # baseline is above 0
    write_rows(
        assets / "kto.jsonl",
        [{"prompt": f"Q{n}:", "completion": text(), "label": n % 4 > 0} for n in range(40)],
    )
    counts = [rng.randint(1, 3) for _ in range(40)]
    write_rows(
        assets / "steps.jsonl",
        [
            {
                "prompt": f"Q{n}:",
                "completions": [text() for _ in range(count)],
                "labels": [(n + k) % 3 > 0 for k in range(count)],
            }
            for n, count in enumerate(counts)
        ],
    )
    write_rows(assets / "texts.jsonl", [{"text": "a few words " * count} for count in range(1, 30)])
    # every weight of the tiny models is partitioned under ZeRO-3, the small ones too
    (assets / "partition_all.json").write_text(
        '{"zero_optimization": {"stage3_param_persistence_threshold": 0}}'
    )
    teacher = AutoModelForCausalLM.from_pretrained(assets / "lm")
    with torch.no_grad():
        for number, weight in enumerate(teacher.parameters()):
            weight += 0.02 * torch.randn(
                weight.shape, generator=torch.Generator().manual_seed(number)
            )
    for saved in (teacher, AutoTokenizer.from_pretrained(assets / "lm")):
        saved.save_pretrained(assets / "teacher")
    save_adapter(assets / "lm", assets / "reward_adapter", scalar=True)
    save_adapter(assets / "lm", assets / "reward_dora", scalar=True, use_dora=True)
    return Launches(assets, folder)


@pytest.fixture(scope="module")
def alone(launches):
    """Case -> the numbers of one rank without ZeRO."""
    return launches.of_one_rank("one")


def check_numbers(numbers: dict, alone: dict, case: str) -> bool:
    """Whether a launch has this case, whose numbers must be those of one rank."""
    seen = [label for label in numbers if label.startswith(f"{case}:") and "bf16" not in label]
    for label in seen:
        for number, (row, expected) in enumerate(zip(numbers[label], alone[case], strict=True)):
            assert row.keys() == expected.keys()
            for name, value in row.items():
                if name == "accuracy" and number == 0 and case in AS_REFERENCE:
                    continue
                if isinstance(value, str):
                    assert value == expected[name]
                else:
                    np.testing.assert_allclose(
                        value, expected[name], rtol=2e-4, atol=5e-6, err_msg=f"{label} {name}"
                    )
    return bool(seen)


@pytest.mark.parametrize("case", CASES_OF_A_CHANGE)
@pytest.mark.parametrize("launch", ["two", "shared", "groups"])
def test_the_numbers_are_those_of_one_rank(launches, alone, launch, case):
    checked = check_numbers(launches.numbers(launch), alone, case)
    assert checked or launch != "two" or case == "ppo lora alone"


@pytest.mark.release
@pytest.mark.parametrize("case", CASES_OF_A_RELEASE)
def test_the_numbers_of_further_cases_are_those_of_one_rank(launches, case):
    numbers = launches.numbers("two, release")
    assert check_numbers(numbers, launches.of_one_rank("one, release"), case)


def check_training(alone: dict) -> None:
    """Each case has a loss that moves, and a gradient of its own."""
    norms = set()
    for case, rows in alone.items():
        ppo = case.startswith("ppo")
        loss, norm = ("policy/loss", "actor") if ppo else ("loss", "grad_norm")
        losses = [row[loss] for row in rows if loss in row]
        assert (
            len(losses) == (UPDATES if ppo else SUPERVISED_STEPS)
            and np.abs(np.diff(losses)).max() > 1e-3
        ), case
        norms.add(round([row[norm] for row in rows if norm in row][-1], 6))
    assert len(norms) == len(alone)


def test_each_case_trains_in_its_own_way(alone):
    check_training(alone)
    assert alone.keys() == set(CASES_OF_A_CHANGE)


@pytest.mark.release
def test_each_case_of_a_release_trains_in_its_own_way(launches, alone):
    further = launches.of_one_rank("one, release")
    check_training(alone | further)
    assert alone.keys() | further.keys() == CASES.keys()


def test_an_untrained_policy_is_its_own_reference_and_the_baseline_rises(alone):
    assert alone["dpo"][0]["loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert alone["kto"][0]["kl"] == pytest.approx(0.0, abs=1e-5)
    assert max(step["kl"] for step in alone["kto"][:SUPERVISED_STEPS]) > 0.05


def test_in_bf16_every_stage_is_near_fp32(launches, alone):
    found = launches.numbers("two")
    labels = [label for label in found if "bf16" in label]
    assert len(labels) == 3
    for label in labels:
        losses, exact = (
            [row["loss"] for row in rows[:SUPERVISED_STEPS]]
            for rows in (found[label], alone["sft"])
        )
        np.testing.assert_allclose(losses, exact, rtol=1e-2, err_msg=label)


def test_models_whose_numbers_would_change_are_refused_by_name(launches):
    shift, window = launches.numbers("shared")["refusals"]
    assert (
        "LlamaModel cannot be divided, because divided rows do not give the numbers of whole rows"
        in shift
    )
    assert "LlamaModel cannot be divided, because its sliding window is in its mask" in window


def test_each_architecture_gives_the_numbers_and_gradients_of_whole_rows(launches):
    families = launches.numbers("shared")["families"]
    assert len(families) == 28
    for name, (outputs, gradients) in families.items():
        assert outputs < 2e-5, name
        assert gradients < 2e-5, name
