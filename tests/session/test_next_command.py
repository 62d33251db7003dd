"""Commands that a run prints at its end."""

import os
import re
import shlex
import sys
from pathlib import Path

import pytest
from launch import forked, run, succeed

from dschat_ppo.config.cli import parse
from dschat_ppo.config.data_flags import DataFlags
from dschat_ppo.session import start_and_end
from dschat_ppo.session.start_and_end import data_words, new_folder_beside, ppo_words, step_command, tool_command

ROOT = Path(__file__).parents[2]


@pytest.fixture
def python(monkeypatch, tmp_path):
    """This environment has a program `python`, which the shell finds; the working directory is the repository."""
    monkeypatch.chdir(ROOT)
    (tmp_path / "python").touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path / "python"


@pytest.mark.parametrize(("ranks", "on_gpu", "count"), [
    (1, False, ""), (2, False, " --num_accelerators 2"), (1, True, " --num_accelerators 1"),
])  # fmt: skip
def test_a_step_has_as_many_ranks_as_this_one(python, monkeypatch, ranks, on_gpu, count):
    monkeypatch.setenv("WORLD_SIZE", str(2 * ranks))
    monkeypatch.setenv("LOCAL_SIZE", str(ranks))
    monkeypatch.setattr(start_and_end.dist, "on_gpu", lambda: on_gpu)
    command = step_command("ppo", ["--data_path", f"{ROOT}/a b.jsonl", "--output_dir", "/o"])
    assert command == f"python -m dschat_ppo ppo{count} --data_path 'a b.jsonl' --output_dir /o"


def test_a_python_that_the_shell_does_not_find_is_a_path(python, monkeypatch):
    assert tool_command("chat", ["--model", f"{ROOT}/sft"]) == "python -m dschat_ppo.tools.chat --model sft"
    monkeypatch.setenv("PATH", "/nowhere")
    assert tool_command("chat", []) == f"{python} -m dschat_ppo.tools.chat"


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
    assert config.data.data_split == (theirs or "2,4,4") and (f"--data_split={theirs}" in words) is (theirs is not None)
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
    done = succeed(forked(1, "tests/workers/run_module.py", "dschat_ppo", step, *words))
    [command] = re.findall(r"^ *next +(.*)$", done.stdout, re.MULTILINE)
    if step == "reward":
        succeed(run(["bash", "-c", command]))
    else:
        (tmp_path / "input").write_text("Hello\n")
        start, module, *flags = shlex.split(command.replace("python -m", "python_m"))
        assert start == "python_m"
        succeed(forked(1, "tests/workers/run_module.py", module, *flags, stdin=tmp_path / "input"))
    assert (tmp_path / "ppo/result.json").is_file() is (step == "reward")


def test_the_next_output_folder_is_a_new_one_beside_that_of_this_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert new_folder_beside(Path("reward"), "ppo") == f"{tmp_path}/ppo"
    (tmp_path / "out" / "reward").mkdir(parents=True)
    (tmp_path / "out" / "ppo").mkdir()
    assert new_folder_beside(Path("out/reward"), "ppo") == f"{tmp_path}/out/ppo_2"
    monkeypatch.chdir("out/reward")
    assert new_folder_beside(Path("."), "ppo") == f"{tmp_path}/out/ppo_2"
