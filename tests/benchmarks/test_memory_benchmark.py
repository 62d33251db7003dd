"""The benchmark of memory: its settings parse, what it counts, and its table."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import memory
import memory_phases
import planned_memory

from dschat_ppo.config.cli import parse


@pytest.mark.parametrize("name", list(memory.SETTINGS))
def test_every_setting_parses(name):
    step, words = memory.SETTINGS[name]
    models = {"ppo": "--actor_model_name_or_path a --critic_model_name_or_path c"}.get(step, "--model_name_or_path m")
    parse(step, f"{models} --data_path d --output_dir o {words}".split())


def test_there_are_twelve_settings_of_step_3_and_some_of_the_others():
    steps = [step for step, _ in memory.SETTINGS.values()]
    assert steps.count("ppo") >= 12 and {"sft", "reward"} < set(steps)


def test_the_adapter_fits_the_settings_with_one_base(tmp_path):
    load = memory_phases.Workload((512, 1, 128))
    memory.make_models(tmp_path, load)
    folder = tmp_path / load.folder
    adapter = json.loads((folder / "adapter/adapter_config.json").read_text())
    assert adapter["base_model_name_or_path"] == str(folder / "lm")
    shared = [words.split() for _, words in memory.SETTINGS.values() if "--share_base" in words]
    assert [words[words.index("--critic_lora_dim") + 1] for words in shared] == [str(adapter["r"])]


def engine_of(model: nn.Module, parameters: str, optimizer: str):
    states = {"w": {"exp_avg": torch.zeros(100), "exp_avg_sq": torch.zeros(100)}}
    return SimpleNamespace(
        module=model,
        basic_optimizer=SimpleNamespace(state=states),
        optimizer=SimpleNamespace(single_partition_of_fp32_groups=[torch.zeros(100)]),
        zero_offload_param=lambda: SimpleNamespace(device=parameters),
        zero_offload_optimizer=lambda: SimpleNamespace(device=optimizer),
    )


@pytest.mark.parametrize(
    ("parameters", "optimizer", "held"), [("none", "none", 40 + 1200), ("none", "cpu", 40), ("cpu", "cpu", 40)]
)
def test_tensors_that_are_offloaded_are_not_held_on_the_device(parameters, optimizer, held):
    """A weight whose partition is offloaded counts where it is gathered; here it is."""
    assert memory_phases.held_bytes([engine_of(nn.Linear(9, 1), parameters, optimizer)]) == held


def test_shared_memory_counts_once():
    layer = nn.Linear(9, 1)
    assert memory_phases.held_bytes([engine_of(layer, "none", "cpu"), engine_of(layer, "none", "cpu")]) == 40


def test_weights_that_merged_ones_replace_count_until_they_are_freed():
    layer = nn.Linear(9, 1)
    original = layer.weight.data
    layer.weight.data = original + 1
    assert memory_phases.held_bytes([engine_of(layer, "none", "cpu")], [original]) == 40 + 36
    original.untyped_storage().resize_(0)
    assert memory_phases.held_bytes([engine_of(layer, "none", "cpu")], [original]) == 40


def test_the_table_has_the_settings_that_were_measured():
    found = {
        "step 1, ZeRO 0": {"peak": {"load": 1.0, "actor": 2.25}, "held": {"training": 0.5}, "seconds": {"actor": 3.0}},
        "ZeRO 2": {
            "peak": dict.fromkeys(memory.PHASES, 1.5),
            "held": {"training": 1.0, "rollout": 0.25},
            "seconds": {"load": 9.0, "rollout": 1.0, "actor": 1.0},
        },
    }
    lines = memory.table(found).splitlines()
    assert lines[2] == "| ZeRO 2 | 1.50 | 1.50 | 1.50 | 1.50 | 1.50 | 1.00 | 0.25 |"
    assert lines[3] == "| step 1, ZeRO 0 | 1.00 |  |  | 2.25 |  | 0.50 |  |"


def test_the_planner_has_twelve_cases_that_parse(tmp_path):
    cases = [name for name in planned_memory.CASES if name not in planned_memory.BASELINES]
    assert len(cases) == 12
    steps = [planned_memory.CASES[name].step for name in cases]
    assert steps.count("ppo") >= 6 and {"sft", "reward"} < set(steps)
    for name in planned_memory.CASES:
        step, words, load = memory.setting_of(name)
        config = memory_phases.config_of_setting(step, tmp_path, words, load)
        assert config.run.folder == "unused"


def test_the_comparison_takes_the_largest_peak_less_the_baseline():
    name = "step 1, ZeRO 3, fp32"
    planned = {name: {"load": 1.0, "actor": 2.2}, "baseline, step 1": {"load": 0.0}}
    found = {
        "baseline, step 1": {"peak": {"load": 0.2, "actor": 0.5}},
        name: {"peak": {"load": 2.0, "actor": 2.5}},
    }
    lines = planned_memory.comparison(planned, found).splitlines()
    assert lines[2] == f"| {name} | update | 2.20 | 2.00 | +10 % |"
    assert lines[3] == "| largest difference |  |  |  | 10 % |"


def test_planned_peaks_are_sums_of_device_and_host(tmp_path):
    load = memory_phases.Workload((512, 1, 128), 1, 8, 4)
    memory.make_models(tmp_path, load)
    for step, phases in (("ppo", {"rollout", "score", "actor", "critic"}), ("sft", {"actor"})):
        config = memory_phases.config_of_setting(step, tmp_path, [], load)
        peaks = planned_memory.planned_peaks(config, 1)
        assert set(peaks) == phases
        assert 0 < max(peaks.values()) < 0.1
