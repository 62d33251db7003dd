"""The benchmark of memory: its command lines parse, and a planned peak counts device and host."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import memory

from dschat_ppo.config.cli import parse


@pytest.mark.parametrize("name", memory.ALL)
def test_every_setting_parses(name):
    setting = memory.ALL[name]
    parse(setting.step, memory.words_of(setting, Path("models"), Path("data"), Path("out")))


@pytest.mark.parametrize(
    ("step", "stage"), [("ppo", "--actor_zero_stage 2 --critic_zero_stage 2"), ("sft", "--zero_stage 2")]
)
def test_a_planned_peak_counts_device_and_host(step, stage, tmp_path):
    on_device, offloaded = (
        memory.planned_peak(memory.Setting(step, flags, 1, memory.TINY, 1, 8, 4), tmp_path)
        for flags in (stage, f"{stage} --offload_optimizer")
    )
    assert 0 < on_device < 0.1 and on_device / 2 < offloaded < 0.1
