"""Flags of the data: the names that OpenRLHF uses, switches, and values that are refused before any data is read."""

import dataclasses

import pytest
import yaml
from command_lines import read

from dschat_ppo.config.data_flags import COLUMN_FLAGS, DataFlags

ALIASES = {
    "input_key": "prompt_column", "output_key": "response_column", "chosen_key": "chosen_column",
    "rejected_key": "rejected_column", "label_key": "answer_column",
}  # fmt: skip


@pytest.mark.parametrize("alias", ALIASES)
def test_the_names_of_openrlhf_work_on_the_command_line_and_in_yaml(tmp_path, alias):
    assert read("sft", f"--{alias}", "question")[ALIASES[alias]] == "question"
    (tmp_path / "settings.yaml").write_text(f"{alias}: question\n")
    assert read("sft", "--config", str(tmp_path / "settings.yaml"))[ALIASES[alias]] == "question"
    words = ["--config", str(tmp_path / "settings.yaml"), f"--{ALIASES[alias]}", "other"]
    assert read("sft", *words)[ALIASES[alias]] == "other"


@pytest.mark.parametrize(("words", "value"), [([], None), ([""], True), (["True"], True), (["false"], False)])
def test_apply_chat_template_is_a_switch_that_may_be_left_open(words, value):
    given = ["--apply_chat_template", *filter(None, words)] if words else []
    assert read("sft", *given)["apply_chat_template"] is value


def test_an_empty_system_column_means_none_and_line_breaks_are_kept():
    values = read("sft", "--system_column", "", "--input_template", "Q: {}\nA:")
    assert (values["system_column"], values["input_template"]) == ("", "Q: {}\nA:")


def test_the_columns_of_the_flags_by_role():
    assert DataFlags(data_path=["d"]).columns == {}
    flags = DataFlags(data_path=["d"], **{name: name.upper() for name in COLUMN_FLAGS})
    assert flags.columns == {name.removesuffix("_column"): name.upper() for name in COLUMN_FLAGS}


@pytest.mark.parametrize("step", ["sft", "reward", "ppo"])
def test_the_name_of_a_deepspeed_chat_data_set_is_a_format(step):
    assert read(step, "--data_format", "Dahoas/rm-static")["data_format"] == "Dahoas/rm-static"


def test_a_saved_configuration_can_be_read_again(tmp_path):
    values = read("sft", "--input_key", "q", "--apply_chat_template", "--input_template", "Q: {}\nA:")
    data = {field.name: values[field.name] for field in dataclasses.fields(DataFlags)}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(data))
    again = read("sft", "--config", str(tmp_path / "config.yaml"))
    assert {name: again[name] for name in data} == data
