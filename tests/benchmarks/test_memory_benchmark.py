"""The benchmark of memory: its command lines parse, its rows fill the passes, and a plan counts both memories."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import memory

from dschat_ppo.config.cli import parse
from dschat_ppo.data.prepare import prepare
from dschat_ppo.models.tokenizers import load_tokenizer

DATA_USE = {"ppo": "prompt", "sft": "sft", "reward": "preference"}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("memory") / "-".join(map(str, memory.TINY))
    memory.make_models(folder, memory.TINY)
    return folder


@pytest.mark.parametrize("name", memory.ALL)
def test_every_setting_parses(name):
    setting = memory.ALL[name]
    parse(setting.step, memory.words_of(setting, Path("models"), Path("data"), Path("out")))


@pytest.mark.parametrize(
    "name", ["ZeRO 0", "step 1, ZeRO 0", "step 1, ZeRO 2, packed, checkpointing", "step 2, ZeRO 3, checkpointing"]
)
def test_rows_fill_the_passes(name, models, tmp_path):
    setting, file = memory.ALL[name], tmp_path / "rows.jsonl"
    memory.write_rows(setting, file)
    config = parse(setting.step, memory.words_of(setting, models, file, tmp_path / "out"))
    tokenizer, longest = load_tokenizer(str(models / "lm"), "model"), setting.prompt + setting.answer
    rows = prepare(DATA_USE[setting.step], tokenizer, config.data, longest, eval_fraction=0.0).train
    parts = 4 if "--packing" in setting.flags else 1
    assert len(rows) == 2 * parts * setting.rows * setting.ranks
    for row in rows:
        assert len(row["prompt_ids"]) == setting.prompt // parts
        assert all(len(answer) == setting.answer // parts for answer in row.get("answers", []))


@pytest.mark.parametrize(
    ("step", "stage"), [("ppo", "--actor_zero_stage 2 --critic_zero_stage 2"), ("sft", "--zero_stage 2")]
)
def test_a_planned_peak_counts_device_and_host(step, stage, tmp_path):
    on_device, offloaded = (
        memory.planned_peak(memory.Setting(step, flags, 1, memory.TINY, 1, 8, 4), tmp_path)
        for flags in (stage, f"{stage} --offload_optimizer")
    )
    assert 0 < on_device < 0.1 and on_device / 2 < offloaded < 0.1
