"""Shared flags: output folder, trackers, settings files."""

import os

import pytest
from command_lines import NEEDED, read

from dschat_ppo.config.cli import notes, parse
from dschat_ppo.config.schema import read_settings
from dschat_ppo.errors import UserError


@pytest.mark.parametrize("step", ["sft", "reward"])
def test_offload_needs_a_zero_stage(step):
    with pytest.raises(UserError, match="--zero_stage"):
        read(step, "--offload")


def test_a_tilde_in_output_dir_is_expanded(monkeypatch):
    monkeypatch.setenv("HOME", "/home/ada")
    config = parse("sft", ["--model_name_or_path", "m", "--data_path", "d", "--output_dir=~/out"])
    assert config.run.folder == "/home/ada/out"


def config(step: str, words: str = ""):
    return parse(step, [*NEEDED[step], *words.split()])


@pytest.mark.parametrize(("words", "trackers"), [
    ("", ()),
    ("--enable_tensorboard", ("tensorboard",)),
    ("--report_to wandb trackio", ("wandb", "trackio")),
    ("--report_to wandb wandb --enable_tensorboard", ("wandb", "tensorboard")),
    ("--report_to tensorboard --enable_tensorboard", ("tensorboard",)),
    ("--report_to none", ()),
    ("--report_to none --enable_tensorboard", ()),
])  # fmt: skip
def test_enable_tensorboard_adds_to_report_to_and_none_turns_all_trackers_off(words, trackers):
    assert config("sft", words).run.trackers == trackers


@pytest.mark.parametrize("step", ["sft", "reward", "ppo"])
@pytest.mark.parametrize(("words", "without_effect"), [
    ("--report_to wandb --run_name a --project b", set()),
    ("--report_to trackio", set()),
    ("--report_to tensorboard --run_name a", {"run_name"}),
    ("--project b --enable_tensorboard", {"project"}),
    ("--report_to none --enable_tensorboard", {"enable_tensorboard"}),
])  # fmt: skip
def test_flags_of_trackers_without_effect_are_noted(step, words, without_effect):
    found = notes(step, config(step, words))
    assert {line.split()[0].removeprefix("--") for line in found} == without_effect


def test_a_settings_file_that_is_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match=f"^--config {tmp_path}/pipe: is not a regular file$"):
        read_settings("--config", str(tmp_path / "pipe"))


def test_an_unknown_setting_is_named_without_its_value_which_may_be_secret(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("wandb_key: SECRET\nconfig: null\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"--wandb_key") as problem:
        read("sft", "--config", str(file))
    assert "SECRET" not in str(problem.value)


@pytest.mark.parametrize("flag", ["--reward_model_sources", "--health", "--eval_data_path"])
def test_an_empty_word_is_no_list(flag):
    with pytest.raises(UserError, match=f"^{flag} needs a value"):
        read("ppo", flag, "")
