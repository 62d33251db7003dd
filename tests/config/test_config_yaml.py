"""YAML files: values, errors, and the saved configuration; the package imports no torch."""

import re
import subprocess
import sys

import pytest
import yaml
from command_lines import NEEDED, read

from dschat_ppo.config.cli import flatten, parse
from dschat_ppo.errors import UserError
from dschat_ppo.monitor.writers import write_config


def yaml_file(tmp_path, text: str) -> str:
    path = tmp_path / "settings.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_flags_override_yaml_values(tmp_path):
    path = yaml_file(
        tmp_path,
        "actor_model_name_or_path: actor\ncritic_model_name_or_path: critic\noutput_dir: out\n"
        "actor_learning_rate: 1e-5\nppo_epochs: 4\nwhiten_advantages: false\nenable_tensorboard: true\n"
        "data_path: [one.jsonl, two.jsonl]\nactor_dropout: null\n",
    )
    values = flatten(parse("ppo", ["--config", path, "--ppo_epochs", "2", "--output_dir=elsewhere"]))
    assert values["actor_model_name_or_path"] == "actor"
    assert values["actor_learning_rate"] == 1e-5
    assert values["whiten_advantages"] is False
    assert values["enable_tensorboard"] is True
    assert values["data_path"] == ["one.jsonl", "two.jsonl"]
    assert values["actor_dropout"] is None
    assert (values["ppo_epochs"], values["output_dir"]) == (2, "elsewhere")


@pytest.mark.parametrize("place", [0, 2])
def test_flags_override_yaml_at_every_position_of_config(tmp_path, place):
    words = ["--seed", "3"]
    words[place:place] = ["--config", yaml_file(tmp_path, "seed: 5\nmax_seq_len: 99\n")]
    values = read("sft", *words)
    assert (values["seed"], values["max_seq_len"]) == (3, 99)
    assert read("sft", f"--config={words[place + 1]}")["seed"] == 5


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("no_such_setting: 1\n", "no_such_setting"),
        ("seed: [1\n", "is not valid YAML"),
        ("- seed\n", "must be a mapping"),
        ("", "must be a mapping"),
        ("seed: {a: 1}\n", "'seed' must be a value"),
        ("seed: many\n", "--seed"),
        ("max_seq_len: 0\n", "--max_seq_len"),
        ("lora_dim: -8\n", "settings.yaml: --lora_dim must be"),
        ("config: other.yaml\n", "'config' cannot name another file"),
    ],
)
def test_the_fault_of_a_bad_yaml_file_is_named(tmp_path, text, named):
    with pytest.raises(UserError, match=named):
        read("sft", "--config", yaml_file(tmp_path, text))


def test_a_yaml_file_that_is_missing_or_not_text_is_refused(tmp_path):
    missing = tmp_path / "nowhere.yaml"
    with pytest.raises(UserError, match=r"--config .*nowhere\.yaml"):
        read("sft", "--config", str(missing))
    with pytest.raises(UserError, match="--config"):
        read("sft", "--config")
    settings = yaml_file(tmp_path, "seed: 5\n")
    for misspelt in (settings[:-1], settings.replace(".yaml", ".yml")):
        with pytest.raises(UserError, match=f"No such file or directory\\); did you mean {re.escape(settings)}\\?$"):
            read("sft", "--config", misspelt)
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"seed: \xff\xfe\n")
    with pytest.raises(UserError, match=r"--config .*binary\.yaml"):
        read("sft", "--config", str(binary))


@pytest.mark.parametrize(
    ("step", "words"),
    [
        ("sft", ["--data_path", "a.jsonl", "b.jsonl", "--learning_rate", "3e-7", "--train_on_prompt"]),
        ("sft", ["--sft_only_data_path", "c.jsonl", "--data_split", "10,0,0", "--eot_token", "<|end|>", "--deepspeed"]),
        ("reward", ["--dropout", "0.1", "--eval_fraction", "0", "--dtype", "fp32", "--zero_stage", "3"]),
        ("ppo", ["--no_whiten_advantages", "--top_p", "0.9", "--truncation", "left", "--enable_tensorboard"]),
        ("ppo", ["--enable_test_mode", "--test_stop_step", "3", "--kl_coef", "0", "--actor_dropout", "0.0"]),
    ],
)  # fmt: skip
def test_a_saved_configuration_parses_to_equal_values(tmp_path, step, words):
    config = parse(step, [*NEEDED[step], *words, "--local_rank", "1"])
    path = write_config(flatten(config), tmp_path)
    again = parse(step, ["--config", str(path)])
    read_back, expected = flatten(again), flatten(config)
    for values in (read_back, expected):
        del values["local_rank"], values["config"]
    assert read_back == expected


def test_a_saved_configuration_is_plain_yaml(tmp_path):
    path = write_config(flatten(parse("sft", NEEDED["sft"])), tmp_path)
    values = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert (values["model_name_or_path"], values["seed"], values["dropout"]) == ("m", 1234, None)


def test_the_config_package_imports_no_torch():
    code = (
        "import sys, dschat_ppo.config.cli as cli, dschat_ppo.config.batch_plan;"
        "cli.parse('sft', ['--model_name_or_path', 'm', '--data_path', 'd', '--output_dir', 'o']);"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
