"""The benchmark of memory: its settings parse, and the peaks that it plans."""

import json
import sys
from pathlib import Path

import pytest

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


def test_the_adapter_fits_the_settings_with_one_base(tmp_path):
    load = memory_phases.Workload((512, 1, 128))
    memory.make_models(tmp_path, load)
    folder = tmp_path / load.folder
    adapter = json.loads((folder / "adapter/adapter_config.json").read_text())
    assert adapter["base_model_name_or_path"] == str(folder / "lm")
    shared = [words.split() for _, words in memory.SETTINGS.values() if "--share_base" in words]
    assert [words[words.index("--critic_lora_dim") + 1] for words in shared] == [str(adapter["r"])]


def test_the_planner_has_twelve_cases_that_parse(tmp_path):
    cases = [name for name in planned_memory.CASES if name not in planned_memory.BASELINES]
    assert len(cases) == 12
    steps = [planned_memory.CASES[name].step for name in cases]
    assert steps.count("ppo") >= 6 and {"sft", "reward"} < set(steps)
    for name in planned_memory.CASES:
        step, words, load = memory.setting_of(name)
        config = memory_phases.config_of_setting(step, tmp_path, words, load)
        assert config.run.folder == "unused"


def test_planned_peaks_are_sums_of_device_and_host(tmp_path):
    load = memory_phases.Workload((512, 1, 128), 1, 8, 4)
    memory.make_models(tmp_path, load)
    for step, phases in (("ppo", {"rollout", "score", "actor", "critic"}), ("sft", {"actor"})):
        config = memory_phases.config_of_setting(step, tmp_path, [], load)
        peaks = planned_memory.planned_peaks(config, 1)
        assert set(peaks) == phases
        assert 0 < max(peaks.values()) < 0.1
