"""The commands: each step and each tool is one; how many ranks they start, and what they refuse;
what `--dry_run` checks."""

import base64
import json
import os
import signal
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

import dschat_ppo
from dschat_ppo import __main__ as program
from dschat_ppo import commands
from dschat_ppo.commands import (
    TRAINERS,
    _ranks_of,
    count_gpus,
    run_training,
    start_ranks,
    take_num_accelerators,
    visible_devices,
)
from dschat_ppo.common import dist, ranks, stop_requests
from dschat_ppo.config.cli import parse
from dschat_ppo.errors import UserError
from dschat_ppo.models import loading, model_folders
from dschat_ppo.planner import plan_step
from dschat_ppo.run import session
from dschat_ppo.supervised import sft, supervised_run

TOOLS = Path(dschat_ppo.__file__).parent / "tools"


def test_every_program_of_the_tools_is_a_command():
    programs = {
        path.stem for path in TOOLS.glob("*.py") if '__name__ == "__main__"' in path.read_text()
    }
    assert programs == set(program.TOOLS)
    assert set(program.TITLES) == set(TRAINERS)


def test_a_step_gets_its_flags(monkeypatch):
    started = []
    monkeypatch.setattr(
        program, "start_ranks", lambda step, words: started.append((step, words)) or 7
    )
    assert program.main(["ppo", "--seed", "3"]) == 7
    # as DeepSpeed's launcher writes it
    assert program.main(["--local_rank=1", "sft", "--seed", "3"]) == 7
    assert started == [("ppo", ["--seed", "3"]), ("sft", ["--seed", "3"])]


def test_an_unknown_command_is_refused(capsys):
    assert program.main(["rewrad"]) == 2
    assert "error: rewrad: no such command; did you mean reward?" in capsys.readouterr().err


SFT = ["--model_name_or_path", "m", "--data_path", "d", "--output_dir", "o"]


class Replaced(Exception):  # noqa: N818
    """In place of `os.execv`."""


@pytest.fixture
def machine(monkeypatch):
    """A function that sets the number of GPUs; the environment is restored."""
    for name in (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "CUDA_VISIBLE_DEVICES",
        "DS_ACCELERATOR",
        "OMP_NUM_THREADS",
        "SLURM_STEP_NUM_TASKS",
    ):
        monkeypatch.setenv(name, "")  # so that what `start_ranks` sets is removed
        monkeypatch.delenv(name)

    def execv(program: str, command: list[str]) -> None:
        raise Replaced(command)

    ran = []
    monkeypatch.setattr(os, "execv", execv)
    monkeypatch.setattr(
        commands, "run_training", lambda step, words: ran.append((step, list(words))) or 0
    )
    monkeypatch.setattr(commands, "ran", ran, raising=False)
    return lambda gpus: monkeypatch.setattr(commands, "count_gpus", lambda: gpus)


def world_of(command: list[str]) -> dict:
    [word] = [word for word in command if word.startswith("--world_info=")]
    return json.loads(base64.urlsafe_b64decode(word.partition("=")[2]))


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ([], (None, [])),
        (["--a", "1"], (None, ["--a", "1"])),
        (["--num_accelerators", "3", "--a"], (3, ["--a"])),
        (["--a", "--num_gpus=2"], (2, ["--a"])),
        (["--num-gpus", "1"], (1, [])),
    ],
)
def test_the_number_of_ranks_is_taken_from_the_flags(words, found):
    assert take_num_accelerators(words) == found
    for wrong in (["--num_accelerators"], ["--num_gpus", "0"], ["--num_gpus=two"]):
        with pytest.raises(UserError, match="number of ranks, 1 or more"):
            take_num_accelerators(words + wrong)


def test_several_gpus_are_several_ranks_of_deepspeeds_launcher(machine, capsys):
    machine(4)
    with pytest.raises(Replaced) as replaced:
        start_ranks("sft", SFT)
    [command] = replaced.value.args
    assert command[:4] == [sys.executable, "-u", "-m", "deepspeed.launcher.launch"]
    assert command[-len(SFT) - 3 :] == ["--module", "dschat_ppo", "sft", *SFT]
    assert world_of(command) == {"localhost": [0, 1, 2, 3]}
    assert int(os.environ["OMP_NUM_THREADS"]) >= 1
    assert "DS_ACCELERATOR" not in os.environ
    with pytest.raises(Replaced):
        start_ranks("sft", [*SFT, "--num_accelerators", "4"])
    assert start_ranks("sft", [*SFT, "--num_accelerators", "5"]) == 2
    assert "--num_accelerators 5: this machine has 4 GPUs" in capsys.readouterr().err
    assert start_ranks("sft", [*SFT, "--no_such_flag"]) == 2
    assert "unknown flag or value: --no_such_flag" in capsys.readouterr().err


def test_ranks_on_a_cpu_need_the_flag(machine, monkeypatch):
    machine(0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(Replaced) as replaced:
        start_ranks("sft", ["--num_accelerators", "2", *SFT])
    assert world_of(replaced.value.args[0]) == {"localhost": [0, 1]}
    assert os.environ["DS_ACCELERATOR"] == "cpu"


def test_a_rank_of_a_launcher_starts_no_others(machine, monkeypatch, capsys):
    machine(4)
    monkeypatch.setenv("RANK", "1")
    assert start_ranks("sft", SFT) == 0
    assert commands.ran == [("sft", SFT)]
    assert start_ranks("sft", [*SFT, "--num_gpus", "2"]) == 2
    assert "a launcher has started this rank" in capsys.readouterr().err
    monkeypatch.delenv("RANK")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "8")
    assert start_ranks("ppo", SFT) == 0
    assert commands.ran[1:] == [("ppo", SFT)]


def test_a_dry_run_starts_no_rank_and_knows_their_number(machine):
    machine(4)
    assert start_ranks("sft", [*SFT, "--dry_run"]) == 0
    assert start_ranks("sft", [*SFT, "--dry_run", "--dry_run_ranks", "9"]) == 0
    assert [words[-1] for _, words in commands.ran] == ["4", "9"]
    assert "WORLD_SIZE" not in os.environ


def test_ctrl_c_returns_130_although_the_run_is_saved(machine, monkeypatch):
    machine(0)

    def stopped_run(step, words):
        stop_requests.install()
        os.kill(os.getpid(), signal.SIGINT)
        return 0

    def early(step, words):
        raise KeyboardInterrupt

    for run, code in (
        (stopped_run, 130),
        (early, 130),
        (lambda step, words: stop_requests.reset() or 3, 3),
    ):
        monkeypatch.setattr(commands, "run_training", run)
        assert start_ranks("sft", SFT) == code
        assert start_ranks("sft", [*SFT, "--dry_run"]) == code


def test_the_environment_hides_gpus(machine, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert count_gpus() == 3
    assert visible_devices(2) == [0, 1]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,GPU-5,7")
    assert [visible_devices(ranks) for ranks in (2, 3)] == [["2", "GPU-5"], ["2", "GPU-5", "7"]]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert count_gpus() == 0
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert count_gpus() == 0


SHORT = ["--max_seq_len", "64"]
LENGTHS = ["--max_prompt_seq_len", "32", "--max_answer_seq_len", "32"]


def dry_run(step: str, folder, *words: object) -> int:
    return run_training(step, [*map(str, words), "--output_dir", str(folder / "out"), "--dry_run"])


@pytest.mark.parametrize(
    ("step", "title", "words"),
    [
        (
            "sft",
            "packed rows",
            ["--model_name_or_path", "{a}/lm", "--data_path", "{a}/sft.jsonl", *SHORT, "--packing"],
        ),
        (
            "dpo",
            "DPO: batches",
            ["--model_name_or_path", "{a}/lm", "--data_path", "{a}/pairs.jsonl", *SHORT],
        ),
        (
            "ppo",
            "PPO: batches",
            [
                "--actor_model_name_or_path",
                "{a}/lm",
                "--critic_model_name_or_path",
                "{a}/reward",
                "--data_path",
                "{a}/prompts.jsonl",
                *LENGTHS,
            ],
        ),
    ],
)
def test_a_dry_run_prints_the_batches_and_writes_nothing(
    assets, tmp_path, capsys, monkeypatch, step, title, words
):
    monkeypatch.setattr(loading, "_prepared_loading", None)  # every model is loaded inside it
    assert (
        dry_run(step, tmp_path, *(word.format(a=assets) for word in words), "--dry_run_ranks", 8)
        == 0
    )
    assert "WORLD_SIZE" not in os.environ
    said = capsys.readouterr().out
    assert title in said
    assert "x 8 ranks = 128" in said  # 16 rows on each
    assert "expected peak: " in said
    assert "dry run for 8 ranks" in said
    assert not (tmp_path / "out").exists()
    assert not model_folders.wants_settings_only()


def test_before_a_run_the_plan_fetches_no_weights_and_gpu_memory_is_set_up_for_training(
    monkeypatch,
):
    seen, names = [], ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    for name in names:
        monkeypatch.delenv(name, raising=False)

    def planned(config) -> None:
        seen.append((model_folders.wants_settings_only(), *map(os.environ.get, names)))

    monkeypatch.setattr(session, "join_ranks", lambda config: None)
    monkeypatch.setattr(plan_step, "show_memory_plan", planned)
    monkeypatch.setattr(
        sft, "train_sft", lambda config: seen.append(model_folders.wants_settings_only())
    )
    monkeypatch.setattr(dist, "on_gpu", lambda: True)
    words = ["--model_name_or_path", "m", "--data_path", "d", "--output_dir", "o"]
    for given in ({}, {names[1]: "max_split_size_mb:99"}):
        with patch.dict(os.environ, given):
            assert run_training("sft", words) == 0
    grows = "expandable_segments:True"
    assert seen == [(True, grows, grows), False, (True, None, "max_split_size_mb:99"), False]


@pytest.mark.parametrize(
    ("launch", "on_each"),
    [
        ({}, 8),
        ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, 2),
        ({"WORLD_SIZE": "2", "LOCAL_SIZE": "2"}, 8),
        ({"WORLD_SIZE": "6", "LOCAL_SIZE": "3"}, 8),
    ],
)
def test_a_dry_run_divides_its_ranks_over_the_machines_of_the_launch(monkeypatch, launch, on_each):
    for name in ("WORLD_SIZE", "LOCAL_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in launch.items():
        monkeypatch.setenv(name, value)
    words = [
        "--model_name_or_path",
        "m",
        "--data_path",
        "d",
        "--output_dir",
        "o",
        "--dry_run",
        "--dry_run_ranks",
        "8",
    ]
    before = dict(os.environ)
    with _ranks_of(parse("sft", words).run):
        assert (ranks.world_size(), ranks.local_world_size()) == (8, on_each)
    assert dict(os.environ) == before


def test_other_ranks_of_a_dry_run_end_at_once(assets, tmp_path, monkeypatch):
    monkeypatch.setattr(supervised_run, "begin_run", None)
    launched = {
        "RANK": 1,
        "LOCAL_RANK": 1,
        "WORLD_SIZE": 2,
        "LOCAL_SIZE": 2,
        "MASTER_PORT": 1,
        "MASTER_ADDR": "here",
    }
    for name, value in launched.items():
        monkeypatch.setenv(name, str(value))
    assert dry_run("sft", tmp_path, "--model_name_or_path", "x", "--data_path", "y") == 0
