"""LoRA on real ranks: one trajectory over ranks and ZeRO stages, and what trains."""

import json

import numpy as np
import peft
import pytest
import torch
from launch import forked, succeed
from transformers import AutoModelForCausalLM

from dschat_ppo.models.adapters import is_adapter_parameter

CASES, LAYOUTS = ("lora", "beside", "reward", "dora"), ((1, 0), (2, 2), (2, 3))  # ranks, ZeRO stage
SAVED = ((1, 0), (2, 3))
IDS = torch.randint(3, 300, (2, 9), generator=torch.Generator().manual_seed(3))

pytestmark = [pytest.mark.ranks]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def found(assets, folder):
    """(ranks, case, stage) -> what the worker found."""
    names = ("param_persistence_threshold", "max_live_parameters", "max_reuse_distance", "prefetch_bucket_size")
    everything = {"zero_optimization": {f"stage3_{name}": 0 for name in names}}  # else tiny tensors stay whole
    (folder / "partition_everything.json").write_text(json.dumps(everything))
    results = {}
    for ranks in (1, 2):
        out = folder / f"{ranks}.json"
        succeed(forked(ranks, "tests/workers/adapters.py", assets, folder, out, timeout=600))
        for label, result in json.loads(out.read_text()).items():
            case, stage = label.split()
            results[ranks, case, int(stage)] = result
    return results


@pytest.mark.parametrize("case", CASES)
def test_the_trajectory_does_not_depend_on_ranks_or_zero_stage(found, case):
    reference = np.array(found[1, case, 0]["trajectory"])
    assert reference.shape == (4, 2) and np.abs(np.diff(reference[:, 0])).min() > 1e-3, "nothing was trained"
    for ranks, stage in LAYOUTS:
        result = found[ranks, case, stage]
        label = f"{ranks} ranks, stage {stage}"
        assert result["first"] == found[1, case, 0]["first"], f"{label}: another adapter at the start"
        np.testing.assert_allclose(result["trajectory"], reference, rtol=1e-4, atol=1e-6, err_msg=label)
        for name, total in found[1, case, 0]["last"].items():
            assert result["last"][name] == pytest.approx(total, rel=1e-3, abs=1e-4), f"{label}: {name}"


@pytest.mark.parametrize("case", CASES)
def test_only_what_should_train_changes(found, case):
    for ranks, stage in LAYOUTS:
        result = found[ranks, case, stage]
        adapter = {name for name in result["names"] if is_adapter_parameter(name)}
        beside = {name for name in result["names"] if not name.endswith(".base_layer.weight")}
        wanted = {"beside": beside, "reward": adapter | {"classifier.score.weight"}}
        assert set(result["changed"]) == wanted.get(case, adapter), f"{ranks} ranks, stage {stage}"


@pytest.mark.parametrize("case", ["lora", "dora"])
def test_every_layout_saves_the_same_adapter(found, folder, case):
    logits = {}
    for ranks, stage in SAVED:
        model = peft.AutoPeftModelForCausalLM.from_pretrained(folder / str(ranks) / f"{case}{stage}").eval()
        with torch.no_grad():
            logits[ranks, stage] = model(input_ids=IDS).logits
    for each in logits.values():
        torch.testing.assert_close(each, logits[1, 0], rtol=1e-3, atol=1e-3)


def test_weights_that_train_beside_lora_are_saved_merged(found, folder):
    logits = {}
    for ranks, stage in SAVED:
        model = AutoModelForCausalLM.from_pretrained(folder / str(ranks) / f"beside{stage}").eval()
        with torch.no_grad():
            logits[ranks, stage] = model(input_ids=IDS).logits
    for each in logits.values():
        torch.testing.assert_close(each, logits[1, 0], rtol=1e-3, atol=1e-3)
