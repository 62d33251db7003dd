"""Training does not depend on ranks, micro-batches, ZeRO stages, packing, or on how ranks share
their rows."""

import json
import math
import random

import numpy as np
import pytest
import torch
from adapter_folders import save_adapter
from launch import forked, succeed
from transformers import AutoModelForCausalLM, AutoTokenizer
from workers.layouts import CASES, LAUNCHES, SUPERVISED_STEPS, UPDATES

pytestmark = [pytest.mark.ranks, pytest.mark.slow]
WORDS = ["red", "blue", "a lamp", "here", "yes", "no thanks"]
# which the policy begins as: the accuracy before an update is that of rounding
AS_REFERENCE = "dpo", "kto"


def write_rows(path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def found(assets, stored_rollout, tmp_path_factory):
    """Launch -> "case: layout" -> the numbers of each step."""
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
    for name, (ranks, _, _) in LAUNCHES.items():
        succeed(
            forked(ranks, "tests/workers/layouts.py", name, assets, folder / name, timeout=1800)
        )
    return {name: json.loads((folder / name).read_text()) for name in LAUNCHES}


@pytest.fixture(scope="module")
def alone(found):
    """Case -> the numbers of one rank without ZeRO."""
    return {label.split(":")[0]: numbers for label, numbers in found["one"].items()}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("launch", ["two", "shared", "groups"])
def test_the_numbers_are_those_of_one_rank(found, alone, launch, case):
    seen = [
        label for label in found[launch] if label.startswith(f"{case}:") and "bf16" not in label
    ]
    assert seen or launch != "two" or case == "ppo lora alone"
    for label in seen:
        for number, (row, expected) in enumerate(
            zip(found[launch][label], alone[case], strict=True)
        ):
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


def test_each_case_trains_in_its_own_way(alone):
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
    assert len(norms) == len(CASES)


def test_an_untrained_policy_is_its_own_reference_and_the_baseline_rises(alone):
    assert alone["dpo"][0]["loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert alone["kto"][0]["kl"] == pytest.approx(0.0, abs=1e-5)
    assert max(step["kl"] for step in alone["kto"][:SUPERVISED_STEPS]) > 0.05


def test_in_bf16_every_stage_is_near_fp32(found, alone):
    labels = [label for label in found["two"] if "bf16" in label]
    assert len(labels) == 3
    for label in labels:
        losses, exact = (
            [row["loss"] for row in rows[:SUPERVISED_STEPS]]
            for rows in (found["two"][label], alone["sft"])
        )
        np.testing.assert_allclose(losses, exact, rtol=1e-2, err_msg=label)


def test_models_whose_numbers_would_change_are_refused_by_name(found):
    shift, window = found["shared"]["refusals"]
    assert (
        "LlamaModel cannot be divided, because divided rows do not give the numbers of whole rows"
        in shift
    )
    assert "LlamaModel cannot be divided, because its sliding window is in its mask" in window


def test_each_architecture_gives_the_numbers_and_gradients_of_whole_rows(found):
    families = found["shared"]["families"]
    assert len(families) == 28
    for name, (outputs, gradients) in families.items():
        assert outputs < 2e-5, name
        assert gradients < 2e-5, name
