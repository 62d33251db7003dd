"""What a folder must be to be taken for a model."""

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


def test_an_empty_folder_suggests_nothing(tmp_path):
    with pytest.raises(UserError, match="not a Hugging Face model$"):
        model_folder(str(tmp_path), "--model")
