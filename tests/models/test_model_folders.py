"""What a folder must be to be taken for a model."""

import os
import re

import pytest

from dschat_ppo.errors import UserError
from dschat_ppo.models.model_folders import model_folder


def test_the_output_folder_of_step_3_names_the_models_inside(tmp_path):
    for role in ("critic", "actor", "logs"):
        (tmp_path / role).mkdir()
    for role in ("critic", "actor"):
        (tmp_path / role / "config.json").write_text("{}")
    meant = f"did you mean {tmp_path}/actor or {tmp_path}/critic?"
    with pytest.raises(UserError, match=f"^--model {tmp_path}: the folder has no config.json, .*; {re.escape(meant)}$"):
        model_folder(str(tmp_path), "--model")


@pytest.mark.parametrize(("name", "end"), [
    ("out/stf", "no such folder; did you mean {}/out/sft?"), ("uot/sft", "no such folder; did you mean {}/out/sft?"),
    ("somewhere/else", "no such folder"),
])  # fmt: skip
def test_a_missing_folder_is_answered_with_the_nearest_one(tmp_path, name, end):
    (tmp_path / "out/sft").mkdir(parents=True)
    with pytest.raises(UserError) as problem:
        model_folder(str(tmp_path / name), "--model")
    assert str(problem.value) == f"--model {tmp_path / name}: {end.format(tmp_path)}"


def test_a_missing_folder_that_may_be_a_hub_name_is_answered_too(tmp_path, monkeypatch):
    (tmp_path / "out/sft").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"^--model out/stf: neither a local folder .*; did you mean out/sft\?$"):
        model_folder("out/stf", "--model")


def test_an_empty_folder_suggests_nothing(tmp_path):
    with pytest.raises(UserError, match="not a Hugging Face model$"):
        model_folder(str(tmp_path), "--model")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_pipe_or_a_device_in_a_model_folder_is_refused_before_anything_waits_for_it(tmp_path, name):
    (tmp_path / "config.json").write_text("{}")
    assert model_folder(str(tmp_path), "--model") == str(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(UserError, match=f"^--model {tmp_path}/{name}: is not a regular file"):
        model_folder(str(tmp_path), "--model")
    (tmp_path / name).unlink()
    (tmp_path / name).symlink_to("/dev/zero")
    with pytest.raises(UserError, match="is not a regular file"):
        model_folder(str(tmp_path), "--model")
