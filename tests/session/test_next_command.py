"""Commands that a run prints at its end."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from launch import environment, run, succeed

from dschat_ppo.config.cli import parse
from dschat_ppo.config.data_flags import DataFlags
from dschat_ppo.session import next_command
from dschat_ppo.session.next_command import data_words, new_folder_beside, ppo_words, step_command, tool_command

ROOT = Path(__file__).parents[2]


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """(ranks of a machine, device, GPUs, OMP_NUM_THREADS, machines) -> the environment of a run in the repository."""
    monkeypatch.chdir(ROOT)
    for name in ("python", "deepspeed"):
        (tmp_path / name).touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def set_up(ranks, device="cpu", threads=None, machines=1):
        monkeypatch.setenv("WORLD_SIZE", str(ranks * machines))
        monkeypatch.setenv("LOCAL_SIZE", str(ranks))
        monkeypatch.setattr(next_command.dist, "on_gpu", lambda: device == "cuda")
        for name in ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"):
            monkeypatch.delenv(name, raising=False)
        if threads:
            monkeypatch.setenv("OMP_NUM_THREADS", threads)

    return set_up


@pytest.mark.parametrize(("ranks", "device", "threads", "start"), [
    (1, "cpu", "2", "python"), (2, "cpu", None, "deepspeed --num_accelerators 2"),
    (2, "cpu", "4", "OMP_NUM_THREADS=4 deepspeed --num_accelerators 2"),
    (1, "cuda", "4", "python"), (4, "cuda", "4", "deepspeed --num_accelerators 4"),
])  # fmt: skip
def test_a_step_is_launched_as_this_one_was(machine, ranks, device, threads, start):
    machine(ranks, device, threads)
    command = step_command("step3_ppo", ["--data_path", f"{ROOT}/a b.jsonl", "--output_dir", "PPO"])
    assert command == f"{start} training/step3_ppo/main.py --data_path 'a b.jsonl' --output_dir PPO"


@pytest.mark.parametrize(("gpus", "start"), [("2,3", "deepspeed --include localhost:2,3"),
                                             ("3", "CUDA_VISIBLE_DEVICES=3 python")])  # fmt: skip
def test_the_gpus_are_those_of_this_run(machine, monkeypatch, gpus, start):
    machine(len(gpus.split(",")), "cuda")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    assert step_command("step3_ppo", []) == f"{start} training/step3_ppo/main.py"


@pytest.mark.parametrize("ranks", [1, 4])
def test_the_ranks_are_those_of_one_of_several_machines(machine, ranks):
    machine(ranks, "cuda", machines=2)
    assert step_command("step3_ppo", []) == f"deepspeed --num_accelerators {ranks} training/step3_ppo/main.py"


def test_paths_outside_of_the_working_directory_are_whole(machine, monkeypatch, tmp_path):
    machine(1)
    monkeypatch.chdir(tmp_path)
    assert (
        step_command("step3_ppo", ["--output_dir", "/o"]) == f"python {ROOT}/training/step3_ppo/main.py --output_dir /o"
    )
    assert tool_command("chat", ["--model", f"{tmp_path}/sft"]) == "python -m dschat_ppo.tools.chat --model sft"


def test_programs_that_the_shell_does_not_find_are_paths(machine, monkeypatch, tmp_path):
    machine(2)
    monkeypatch.setenv("PATH", "/nowhere")
    assert tool_command("chat", []) == f"{tmp_path}/python -m dschat_ppo.tools.chat"
    assert step_command("step3_ppo", []).startswith(f"{tmp_path}/deepspeed --num_accelerators 2 ")
    (tmp_path / "deepspeed").unlink()
    assert step_command("step3_ppo", []).startswith("deepspeed --num_accelerators 2 ")


@pytest.mark.parametrize(("started", "ranks", "start"), [
    ("/env/bin/dschat-reward", 1, "dschat-ppo"), ("/env/lib/dschat_ppo/__main__.py", 1, "dschat-ppo"),
    ("/env/bin/dschat-reward", 2, "dschat-ppo --num_accelerators 2"),
    ("/env/lib/pytest/__main__.py", 1, "python training/step3_ppo/main.py"),
])  # fmt: skip
def test_the_next_command_is_one_of_the_same_installation(machine, monkeypatch, tmp_path, started, ranks, start):
    machine(ranks)
    (tmp_path / "dschat-ppo").touch(mode=0o755)
    monkeypatch.setattr(sys, "argv", [started])
    assert step_command("step3_ppo", ["--output_dir", "PPO"]) == f"{start} --output_dir PPO"


def test_the_next_command_has_every_flag_of_the_data_that_differs_from_its_default():
    given = {
        "data_path": ["a.jsonl", "b:0.5"], "data_split": "0,1,1", "apply_chat_template": False,
        "input_template": "-{}\n",
        "truncation": "right", "chosen_column": "better", "streaming": True, "streaming_rows": 8, "system_column": "",
    }  # fmt: skip
    flags = DataFlags(**given)
    models = ["--actor_model_name_or_path", "sft", "--critic_model_name_or_path", "reward"]
    read = parse("ppo", [*models, *data_words(flags), "--output_dir", "ppo"])
    assert read.data == flags
    assert data_words(DataFlags(data_path=["a.jsonl"])) == ["--data_path", "a.jsonl"]


@pytest.mark.parametrize(("split", "theirs"), [
    ("0,1,0", "0,0,1"), ("1,9,0", "0,0,1"), ("2,4,4", None), ("0,1,1", "0,1,1"),
])  # fmt: skip
def test_step_3_after_a_reward_model_has_rows_and_fits_as_step_2_did(tmp_path, split, theirs):
    given = f"--data_path d --data_split {split} --output_dir {tmp_path}/reward --max_seq_len 101 --zero_stage 3 "
    given += "--gradient_checkpointing --dtype fp32 --offload"
    words = ppo_words(parse("reward", ["--model_name_or_path", "m", *given.split()]), "m", f"{tmp_path}/reward")
    config = parse("ppo", words)
    assert config.data.data_split == (theirs or "2,4,4") and ("--data_split" in words) is (theirs is not None)
    assert (config.ppo.max_prompt_seq_len, config.ppo.max_answer_seq_len) == (50, 51)
    assert (config.ppo.actor_zero_stage, config.ppo.critic_zero_stage, config.run.dtype) == (3, 3, "fp32")
    assert config.ppo.actor_gradient_checkpointing and config.ppo.critic_gradient_checkpointing and config.ppo.offload


@pytest.mark.slow
@pytest.mark.parametrize(("step", "flags"), [
    ("sft", "--model_name_or_path {lm} --data_path {pairs} --data_split 1,0,0 --max_seq_len 48"),
    ("reward", "--model_name_or_path {lm} --data_path {pairs} --data_split 0,1,0 --max_seq_len 48"),
    ("dpo", "--model_name_or_path {lm} --data_path {pairs} --data_split 0,1,0 --max_seq_len 48"),
    ("ppo", "--actor_model_name_or_path {lm} --critic_model_name_or_path {reward} --data_path {pairs} --data_split "
     "0,0,1 --max_prompt_seq_len 24 --max_answer_seq_len 8"),
])  # fmt: skip
def test_the_printed_command_of_each_step_runs(assets, tmp_path, step, flags):
    places = {name: assets / name for name in ("lm", "reward")} | {"pairs": assets / "pairs.jsonl"}
    words = [*flags.format(**places).split(), "--max_steps", "1", "--dtype", "fp32", "--output_dir", tmp_path / "out"]
    done = succeed(run([sys.executable, "-m", "dschat_ppo", step, *map(str, words)]))
    [command] = re.findall(r"^ *next +(.*)$", done.stdout, re.MULTILINE)
    result = subprocess.run(command, shell=True, cwd=ROOT, env=environment(), input="Hello\n", text=True,
                            capture_output=True, timeout=300, check=False)  # fmt: skip
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    assert (tmp_path / "ppo/result.json").is_file() is (step == "reward")


def test_the_next_output_folder_is_a_new_one_beside_that_of_this_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert new_folder_beside(Path("reward"), "ppo") == f"{tmp_path}/ppo"
    (tmp_path / "out" / "reward").mkdir(parents=True)
    (tmp_path / "out" / "ppo").mkdir()
    assert new_folder_beside(Path("out/reward"), "ppo") == f"{tmp_path}/out/ppo_2"
    monkeypatch.chdir("out/reward")
    assert new_folder_beside(Path("."), "ppo") == f"{tmp_path}/out/ppo_2"
