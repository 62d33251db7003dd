"""What a run prints around its training."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from dschat_ppo.html_report.run_folder import read_run
from dschat_ppo.monitor.writers import is_finished
from dschat_ppo.session import start_and_end
from dschat_ppo.session.start_and_end import (
    VALIDATION,
    ModelSize,
    changes_of,
    model_size,
    short_count,
    show_end,
    show_models,
    write_validation,
)


@pytest.mark.parametrize(("count", "text"), [
    (950, "950"), (1000, "1 K"), (1_712_000, "1.71 M"), (7_241_732_096, "7.24 B"), (70_000_000_000, "70 B"),
    (999_499, "999 K"), (999_600, "1 M"), (999_700_000, "1 B"),
])  # fmt: skip
def test_counts_are_short(count, text):
    assert short_count(count) == text


def test_sizes_are_those_of_whole_weights():
    model = nn.Sequential(nn.Linear(10, 20, bias=False).requires_grad_(False), nn.Linear(20, 5, bias=False))
    assert model_size(model) == ModelSize(300, 100)
    assert str(model_size(model)) == "300 parameters, 33.3 % trained"
    assert str(model_size(model[0])) == "200 parameters, frozen"
    weight = model[1].weight
    weight.data, weight.ds_numel = torch.empty(0), 100  # ZeRO-3
    assert model_size(model) == ModelSize(300, 100)
    weight.quant_state = SimpleNamespace(shape=torch.Size([20, 10]))  # 4 bits
    assert model_size(model) == ModelSize(400, 200)


def engine_of(module: nn.Module):
    module.config = SimpleNamespace(model_type="llama")
    return SimpleNamespace(module=module)


def test_the_models_are_a_table(said, monkeypatch, tmp_path):
    monkeypatch.setattr(start_and_end.dist, "device", lambda: torch.device("cpu"))
    monkeypatch.setattr(start_and_end.dist, "world_size", lambda: 2)
    monkeypatch.setattr(start_and_end.shutil, "disk_usage", lambda folder: SimpleNamespace(free=12_000))
    actor, reward = nn.Linear(10, 100, bias=False), nn.Linear(10, 10, bias=False).requires_grad_(False)
    roles = {"actor": (engine_of(actor), "/sft"), "critic": (None, None), "reward model": (engine_of(reward), "/rm")}
    show_models(roles, "bf16", tmp_path, [("rollout", "continuous batching")])
    assert said == [
        "models\n"
        "  actor         llama, 1 K parameters, 100 % trained, from /sft\n"
        "  reward model  llama, 100 parameters, frozen, from /rm\n"
        "  devices       2 cpu ranks, bf16\n"
        "  rollout       continuous batching\n"
        f"  outputs       {tmp_path} (report.html at the end)"
    ]
    assert json.loads((tmp_path / "models.json").read_text()) == {
        "actor": "llama, 1 K parameters, 100 % trained, from /sft",
        "reward model": "llama, 100 parameters, frozen, from /rm",
        "devices": "2 cpu ranks, bf16",
        "rollout": "continuous batching",
    }


def test_a_disk_without_room_for_a_checkpoint_is_said_before_training(said, monkeypatch, tmp_path):
    monkeypatch.setattr(start_and_end.dist, "device", lambda: torch.device("cpu"))
    monkeypatch.setattr(start_and_end.shutil, "disk_usage", lambda folder: SimpleNamespace(free=2**20))
    frozen, trained = nn.Linear(1000, 1000).requires_grad_(False), nn.Linear(1024, 1024, bias=False)
    roles = {"actor": (engine_of(trained), "/sft"), "reward model": (engine_of(frozen), "/rm")}
    show_models(roles, "bf16", tmp_path)
    assert said[1:] == [
        f"--output_dir {tmp_path}: its disk has 1.0 MiB left, and a checkpoint takes about 12.0 MiB: free space, or "
        "name a folder on another disk"
    ]
    said.clear()
    show_models(roles, "bf16", tmp_path, trains=False)
    assert len(said) == 1


def test_a_run_that_only_evaluates_trains_no_weights(said, monkeypatch, tmp_path):
    monkeypatch.setattr(start_and_end.dist, "device", lambda: torch.device("cpu"))
    show_models({"actor": (engine_of(nn.Linear(10, 100)), "/sft")}, "bf16", tmp_path, trains=False)
    assert "  actor    llama, 1.1 K parameters, frozen, from /sft\n" in said[0]


def test_folders_in_the_working_directory_are_relative_and_scripts_omit_the_next_command(said, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DSCHAT_PPO_NO_NEXT", "1")
    show_end("SFT", "1 optimizer step", 1.0, {}, [tmp_path / "out/a"], "python -m x")
    assert said == ["SFT: done\n  trained   1 optimizer step in 0:01\n  saved to  out/a"]


def test_the_time_of_a_resumed_run_is_not_that_of_all_its_steps(said):
    show_end("SFT", "250 optimizer steps", 22.0, {}, [Path("/o")], "python -m x", resumed=True)
    assert "  trained   250 optimizer steps, 0:22 since it resumed\n" in said[0]


def test_the_end_names_results_folders_and_the_next_command(said):
    result = {"eval_loss_before": 6.50512, "eval_loss_after": 4.4189, "kl/ref_k1_after": 1.0, "seconds": 3}
    changes = changes_of(result, {"eval_loss": "evaluation loss", "kl/ref_k1": "KL", "eval_accuracy": "accuracy"})
    show_end("SFT", "250 optimizer steps", 83.4, changes, [Path("/o/a"), Path("/o/b")], "python -m x 'a b'")
    assert said == [
        "SFT: done\n"
        "  trained          250 optimizer steps in 1:23\n"
        "  evaluation loss  6.505 -> 4.419\n"
        "  saved to         /o/a\n"
        "                   /o/b\n"
        "  next             python -m x 'a b'"
    ]


def test_a_validation_is_a_run_of_step_0_that_does_not_finish_the_training_around_it(tmp_path):
    folder = tmp_path / VALIDATION
    (folder / "eval").mkdir(parents=True)
    (folder / "metrics.jsonl").write_text('{"step": 0, "eval/score": 9.0}\n')  # of an earlier validation
    metrics = {"eval/score": 0.5, "eval/kl_ref_k1": math.nan}
    found = write_validation(folder, metrics, 1.234)
    assert found == {**metrics, "world_size": 1, "seconds": 1.23}
    expected = {"eval/score": 0.5, "eval/kl_ref_k1": None, "world_size": 1, "seconds": 1.23}
    assert json.loads((folder / "result.json").read_text()) == expected
    run = read_run(folder, "a")
    assert (run.steps, run.metrics) == ([0], {"eval/score": [(0, 0.5)], "eval/kl_ref_k1": [(0, None)]})
    assert "<html" in (folder / "report.html").read_text()
    assert not is_finished(tmp_path) and [path.name for path in tmp_path.iterdir()] == [VALIDATION]
