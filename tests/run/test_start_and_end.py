"""What a run prints around its training, and the commands that it prints at its end."""

import json
import math
import os
import re
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from launch import forked, succeed
from tiny_vlms import tiny_vlm_tokenizer
from torch import nn

from dschat_ppo.common.paths import VALIDATION
from dschat_ppo.config.cli import parse
from dschat_ppo.config.data_flags import DataFlags
from dschat_ppo.config.schema import changed_words
from dschat_ppo.html_report.run_folder import read_run
from dschat_ppo.monitor.writers import is_finished
from dschat_ppo.run import start_and_end
from dschat_ppo.run.start_and_end import (
    model_size,
    row_sample,
    short_count,
    show_models,
    tool_command,
    write_validation,
)
from dschat_ppo.supervised.train_preference import ppo_words, step_command

ROOT = Path(__file__).parents[2]


def test_sizes_are_those_of_whole_weights():
    model = nn.Sequential(
        nn.Linear(10, 20, bias=False).requires_grad_(False), nn.Linear(20, 5, bias=False)
    )
    assert model_size(model) == (300, 100)
    weight = model[1].weight
    weight.data, weight.ds_numel = torch.empty(0), 100  # ZeRO-3
    assert model_size(model) == (300, 100)
    weight.quant_state = SimpleNamespace(shape=torch.Size([20, 10]))  # 4 bits
    assert model_size(model) == (400, 200)
    counts = {950: "950", 1000: "1 K", 7_241_732_096: "7.24 B", 999_499: "999 K", 999_600: "1 M"}
    assert {count: short_count(count) for count in counts} == counts


def engine_of(module: nn.Module):
    module.config = SimpleNamespace(model_type="llama")
    return SimpleNamespace(module=module)


def test_the_models_are_a_table(said, monkeypatch, tmp_path):
    monkeypatch.setattr(start_and_end.dist, "device", lambda: torch.device("cpu"))
    monkeypatch.setattr(start_and_end.dist, "world_size", lambda: 2)
    monkeypatch.setattr(
        start_and_end.shutil, "disk_usage", lambda folder: SimpleNamespace(free=12_000)
    )
    actor, reward = (
        nn.Linear(10, 100, bias=False),
        nn.Linear(10, 10, bias=False).requires_grad_(False),
    )
    roles = {
        "actor": (engine_of(actor), "/sft"),
        "critic": (None, None),
        "reward model": (engine_of(reward), "/rm"),
    }
    show_models(roles, "bf16", tmp_path, [("rollout", "continuous batching")])
    found = json.loads((tmp_path / "models.json").read_text())
    assert found == {
        "actor": "llama, 1 K parameters, 100 % trained, from /sft",
        "reward model": "llama, 100 parameters, frozen, from /rm",
        "devices": "2 cpu ranks, bf16",
        "rollout": "continuous batching",
    }
    assert len(said) == 1 and all(
        name in said[0] and text in said[0] for name, text in found.items()
    )
    monkeypatch.setattr(
        start_and_end.shutil, "disk_usage", lambda folder: SimpleNamespace(free=11_999)
    )
    show_models(roles, "bf16", tmp_path, trains=False)
    show_models(roles, "bf16", tmp_path)
    assert "1 K parameters, frozen, from /sft" in said[1]
    assert said[3].startswith(
        f"--output_dir {tmp_path}: its disk has 0.0 MiB left, and a checkpoint takes about 0.0 "
    )


def test_a_validation_is_a_run_of_step_0_that_does_not_finish_the_training_around_it(tmp_path):
    folder = tmp_path / VALIDATION
    (folder / "eval").mkdir(parents=True)
    # of an earlier validation
    (folder / "metrics.jsonl").write_text('{"step": 0, "eval/score": 9.0}\n')
    metrics = {"eval/score": 0.5, "eval/kl_ref_k1": math.nan}
    found = write_validation(folder, metrics, 1.234)
    assert found == {**metrics, "world_size": 1, "seconds": 1.23}
    expected = {"eval/score": 0.5, "eval/kl_ref_k1": None, "world_size": 1, "seconds": 1.23}
    assert json.loads((folder / "result.json").read_text()) == expected
    found = read_run(folder, "a")
    assert (found.steps, found.metrics) == (
        [0],
        {"eval/score": [(0, 0.5)], "eval/kl_ref_k1": [(0, None)]},
    )
    assert not is_finished(tmp_path) and [path.name for path in tmp_path.iterdir()] == [VALIDATION]


@pytest.fixture
def python(monkeypatch, tmp_path):
    """This environment has a program `python`, which the shell finds; the working directory is the
    repository."""
    monkeypatch.chdir(ROOT)
    (tmp_path / "python").touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path / "python"


@pytest.mark.parametrize(
    ("ranks", "on_gpu", "count"), [(2, False, " --num_accelerators 2"), (1, False, "")]
)
def test_a_step_has_as_many_ranks_as_this_one(python, monkeypatch, ranks, on_gpu, count):
    monkeypatch.setenv("WORLD_SIZE", str(2 * ranks))
    monkeypatch.setenv("LOCAL_SIZE", str(ranks))
    monkeypatch.setattr(start_and_end.dist, "on_gpu", lambda: on_gpu)
    command = step_command("ppo", ["--data_path", f"{ROOT}/a b.jsonl", "--output_dir", "/o"])
    assert command == f"python -m dschat_ppo ppo{count} --data_path 'a b.jsonl' --output_dir /o"
    monkeypatch.setenv("PATH", "/nowhere")
    assert tool_command("chat", []) == f"{python} -m dschat_ppo.tools.chat", (
        "the shell does not find it"
    )


def test_the_next_command_has_every_flag_of_the_data_that_differs_from_its_default():
    given = {
        "data_path": ["a.jsonl", "b:0.5"],
        "data_split": "0,1,1",
        "apply_chat_template": False,
        "input_template": "-{}\n",
        "truncation": "right",
        "chosen_column": "better",
    }
    flags = DataFlags(**given)
    models = ["--actor_model_name_or_path", "sft", "--critic_model_name_or_path", "reward"]
    read = parse("ppo", [*models, *changed_words(flags), "--output_dir", "ppo"])
    assert read.data == flags
    assert changed_words(DataFlags(data_path=["a.jsonl"])) == ["--data_path", "a.jsonl"]


@pytest.mark.parametrize(
    ("split", "theirs"), [("1,9,0", "0,0,1"), ("2,4,4", None), ("0,1,1", "0,1,1")]
)
def test_step_3_after_a_reward_model_has_rows_and_fits_as_step_2_did(tmp_path, split, theirs):
    given = (
        f"--data_path d --data_split {split} --output_dir {tmp_path}/reward --max_seq_len 101"
        " --zero_stage 3 "
    )
    given += "--gradient_checkpointing --dtype fp32 --offload"
    words = ppo_words(
        parse("reward", ["--model_name_or_path", "m", *given.split()]), "m", f"{tmp_path}/reward"
    )
    config = parse("ppo", words)
    assert config.run.output_dir == f"{tmp_path}/ppo"
    assert config.data.data_split == (theirs or "2,4,4") and (
        f"--data_split={theirs}" in words
    ) is (theirs is not None)
    assert (config.ppo.max_prompt_seq_len, config.ppo.max_answer_seq_len) == (50, 51)
    assert (config.ppo.actor_zero_stage, config.ppo.critic_zero_stage, config.run.dtype) == (
        3,
        3,
        "fp32",
    )
    assert (
        config.ppo.actor_gradient_checkpointing
        and config.ppo.critic_gradient_checkpointing
        and config.ppo.offload
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "flags"),
    [
        (
            "sft",
            "--model_name_or_path {lm} --data_path {pairs} --data_split 1,0,0 --max_seq_len 48",
        ),
        (
            "reward",
            "--model_name_or_path {lm} --data_path {pairs} --data_split 0,1,0 --max_seq_len 48",
        ),
        pytest.param(
            "dpo",
            "--model_name_or_path {lm} --data_path {pairs} --data_split 0,1,0 --max_seq_len 48",
            marks=pytest.mark.release,
        ),
        pytest.param(
            "ppo",
            (
                "--actor_model_name_or_path {lm} --critic_model_name_or_path {reward} --data_path"
                " {pairs} --data_split 0,0,1 --max_prompt_seq_len 24 --max_answer_seq_len 8"
            ),
            marks=pytest.mark.release,
        ),
    ],
)
def test_the_printed_command_of_each_step_runs(assets, tmp_path, step, flags):
    places = {name: assets / name for name in ("lm", "reward")} | {"pairs": assets / "pairs.jsonl"}
    words = [
        *flags.format(**places).split(),
        "--max_steps",
        "1",
        "--dtype",
        "fp32",
        "--output_dir",
        tmp_path / "out",
    ]
    done = succeed(forked(1, "tests/workers/run_module.py", "dschat_ppo", step, *words))
    [command] = re.findall(r"^ *next +(.*)$", done.stdout, re.MULTILINE)
    (tmp_path / "input").write_text("Hello\n")
    start, module, *flags = shlex.split(command.replace("python -m", "python_m"))
    assert start == "python_m"
    succeed(forked(1, "tests/workers/run_module.py", module, *flags, stdin=tmp_path / "input"))
    assert (tmp_path / "ppo/result.json").is_file() is (step == "reward")


def test_repeated_tags_are_counted_in_a_sample():
    """A sample of a row with an image is not hundreds of placeholders."""
    tokenizer = tiny_vlm_tokenizer("idefics3")
    ids = tokenizer("what <image> <image> <image> <image> <image> is <s> <s> <s>")["input_ids"]
    row = {"prompt_ids": ids, "answers": [tokenizer("red")["input_ids"]]}
    assert row_sample(tokenizer, row) == "what <image>[5 times] is <s> <s> <s>⟦ red⟧"
