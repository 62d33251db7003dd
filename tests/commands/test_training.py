"""A step from its command line: `--dry_run` checks what a run checks before it loads weights, and writes nothing."""

import os
import shutil
from unittest.mock import patch

import pytest

from dschat_ppo.commands import _ranks_of, run_training
from dschat_ppo.common import dist, ranks
from dschat_ppo.config.cli import parse
from dschat_ppo.models import loading, model_folders
from dschat_ppo.planner import plan_step
from dschat_ppo.supervised import sft, supervised_run

SHORT = ["--max_seq_len", "64"]
LENGTHS = ["--max_prompt_seq_len", "32", "--max_answer_seq_len", "32"]


def dry_run(step: str, folder, *words: object) -> int:
    return run_training(step, [*map(str, words), "--output_dir", str(folder / "out"), "--dry_run"])


@pytest.mark.parametrize(("step", "title", "words"), [
    ("sft", "packed rows", ["--model_name_or_path", "{a}/lm", "--data_path", "{a}/sft.jsonl", *SHORT, "--packing"]),
    ("dpo", "DPO: batches", ["--model_name_or_path", "{a}/lm", "--data_path", "{a}/pairs.jsonl", *SHORT]),
    ("ppo", "PPO: batches", ["--actor_model_name_or_path", "{a}/lm", "--critic_model_name_or_path", "{a}/reward",
                             "--data_path", "{a}/prompts.jsonl", *LENGTHS]),
])  # fmt: skip
def test_a_dry_run_prints_the_batches_and_writes_nothing(assets, tmp_path, capsys, monkeypatch, step, title, words):
    monkeypatch.setattr(loading, "_loading", None)  # every model is loaded inside it
    assert dry_run(step, tmp_path, *(word.format(a=assets) for word in words), "--dry_run_ranks", 8) == 0
    assert "WORLD_SIZE" not in os.environ
    said = capsys.readouterr().out
    assert title in said
    assert "x 8 ranks = 128" in said  # 16 rows on each
    assert "expected peak: " in said
    assert "dry run for 8 ranks" in said
    assert not (tmp_path / "out").exists()
    assert not model_folders.wants_settings_only()


def test_before_a_run_the_plan_fetches_no_weights_and_gpu_memory_is_set_up_for_training(monkeypatch):
    seen, names = [], ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")

    def planned(config) -> None:
        seen.append((model_folders.wants_settings_only(), *map(os.environ.get, names)))

    monkeypatch.setattr(plan_step, "show_memory_plan", planned)
    monkeypatch.setattr(sft, "train_sft", lambda config: seen.append(model_folders.wants_settings_only()))
    monkeypatch.setattr(dist, "on_gpu", lambda: True)
    words = ["--model_name_or_path", "m", "--data_path", "d", "--output_dir", "o"]
    for given in ({}, {names[1]: "max_split_size_mb:99"}):
        with patch.dict(os.environ, given):
            assert run_training("sft", words) == 0
    grows = "expandable_segments:True"
    assert seen == [(True, grows, grows), False, (True, None, "max_split_size_mb:99"), False]


@pytest.mark.parametrize(("launch", "on_each"), [({}, 8), ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, 2),
    ({"WORLD_SIZE": "2", "LOCAL_SIZE": "2"}, 8), ({"WORLD_SIZE": "6", "LOCAL_SIZE": "3"}, 8)])  # fmt: skip
def test_a_dry_run_divides_its_ranks_over_the_machines_of_the_launch(monkeypatch, launch, on_each):
    for name in ("WORLD_SIZE", "LOCAL_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in launch.items():
        monkeypatch.setenv(name, value)
    words = ["--model_name_or_path", "m", "--data_path", "d", "--output_dir", "o", "--dry_run", "--dry_run_ranks", "8"]
    before = dict(os.environ)
    with _ranks_of(parse("sft", words).run):
        assert (ranks.world_size(), ranks.local_world_size()) == (8, on_each)
    assert dict(os.environ) == before


def test_a_dry_run_needs_no_weights(assets, tmp_path, capsys):
    for name in ("lm", "reward"):
        shutil.copytree(assets / name, tmp_path / name, ignore=shutil.ignore_patterns("*.safetensors"))
    models = ["--actor_model_name_or_path", tmp_path / "lm", "--critic_model_name_or_path", tmp_path / "reward"]
    assert dry_run("ppo", tmp_path, *models, "--data_path", assets / "prompts.jsonl", *LENGTHS) == 0
    said = capsys.readouterr().out
    assert said.count(f"note: {tmp_path / 'lm'} holds no weights") == 1
    assert said.count(f"note: {tmp_path / 'reward'} holds no weights") == 1


@pytest.mark.parametrize(("words", "named"), [
    (["--model_name_or_path", "{a}/reward"], "is a reward model or critic"),
    (["--model_name_or_path", "{a}/none"], "--model_name_or_path"),
    (["--data_path", "{a}/none.jsonl"], "none.jsonl"),
    (["--data_path", "{a}/prompts.jsonl"], "prompts.jsonl"),
    (["--output_dir", "{a}/lm"], "would be written over a model"),
    (["--dry_run", "False", "--dry_run_ranks", "2"], "--dry_run_ranks needs --dry_run"),
    (["--sequence_parallel_size", "2"], "--sequence_parallel_size 2"),
    (["--profile", "9999"], "--profile 9999: this run has"),
    (["--resume", "{a}/lmm"], "lmm: there is no such folder; did you mean"),
])  # fmt: skip
def test_a_dry_run_ends_with_the_error_of_the_run(assets, tmp_path, capsys, words, named):
    usual = ["--model_name_or_path", assets / "lm", "--data_path", assets / "sft.jsonl", "--output_dir", tmp_path]
    words = [word.format(a=assets) for word in words]
    code = run_training("sft", [*map(str, usual), *SHORT, "--dry_run", *words])
    found = capsys.readouterr().err
    assert (code, found.count("error: ")) == (2, 1)
    assert named in found


def test_other_ranks_of_a_dry_run_end_at_once(assets, tmp_path, monkeypatch):
    monkeypatch.setattr(supervised_run, "begin_run", None)
    launched = {"RANK": 1, "LOCAL_RANK": 1, "WORLD_SIZE": 2, "LOCAL_SIZE": 2, "MASTER_PORT": 1, "MASTER_ADDR": "here"}
    for name, value in launched.items():
        monkeypatch.setenv(name, str(value))
    assert dry_run("sft", tmp_path, "--model_name_or_path", "x", "--data_path", "y") == 0
