"""The command line and the YAML file: values, lists, errors, answers to unknown flags."""

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from typing import Literal

import pytest
import yaml
from command_lines import NEEDED, config_of, read
from transformers import HfArgumentParser

from dschat_ppo.config.cli import parse
from dschat_ppo.config.flag_parser import flag_parser
from dschat_ppo.config.other_trainers import OUR_NAMES, flags_for
from dschat_ppo.config.schema import REQUIRED, flag
from dschat_ppo.config.step_config import flatten
from dschat_ppo.errors import UserError
from dschat_ppo.monitor.writers import write_config

FLAGS = {step: set(read(step)) for step in NEEDED}


@dataclass
class Flags:
    """All kinds."""

    model_path: str = flag(REQUIRED, "needed")
    size: int = flag(3, "a count")
    rate: float | None = flag(None, "a rate", "lr")
    level: Literal["low", 2] = flag(2, "a level")
    quick: bool = flag(False, "a switch")
    with_text: bool = flag(True, "a switch that is on")
    maybe: bool | None = flag(None, "a switch that may be open")
    names: list[str] = flag(["a"], "names")
    counts: list[int] = flag([], "counts")


def values(*words: str) -> dict:
    return vars(flag_parser([Flags]).parse_args(["--model-path", "m", *words]))


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--size", "5", "--rate=0.5", "--level", "low"],
        ["--lr", "1e-3", "--level=2"],
        ["--quick", "--maybe", "--no_with_text"],
        ["--quick", "no", "--maybe", "False", "--with-text", "F"],
        ["--quick", "YES", "--no-with-text", "--names", "b", "c", "--counts", "1", "2"],
        ["--size", "1", "--size", "2"],
    ],
    ids=" ".join,
)
def test_values_are_those_of_the_parser_of_transformers(words):
    if "--maybe" in words and words[words.index("--maybe") + 1].startswith("--"):
        assert values(*words)["maybe"] is True  # there the switch needs a value
        words = [word for word in words if word != "--maybe"]
    theirs = vars(HfArgumentParser(Flags).parse_args(["--model_path", "m", *words]))
    assert values(*words) == theirs
    assert all(type(value) is type(theirs[name]) for name, value in values(*words).items())


@pytest.mark.parametrize(
    ("step", "words", "found"),
    [
        ("ppo", "--actor_lora_module_name q_proj v_proj", "q_proj,v_proj"),
        ("sft", "--lora_module_name q, v", "q,v"),
        ("sft", "--data_split 1 0 0", "1,0,0"),
        ("sft", "--data_path a.jsonl,b.jsonl:0.5", ["a.jsonl", "b.jsonl:0.5"]),
        ("sft", "--data_path with,comma.jsonl@5 b", ["with,comma.jsonl@5", "b"]),
        ("sft", "--data_path a b", ["a", "b"]),
        ("ppo", "--eval_data_path a,b", ["a", "b"]),
        ("sft", "--report_to tensorboard,wandb", ["tensorboard", "wandb"]),
        ("ppo", "--stop_token_ids 3,4 5", [3, 4, 5]),
        ("ppo", "--reward_model_sources a,b", ["a", "b"]),
        ("ppo", "--remote_reward_url http://a/x http://b/x", "http://a/x,http://b/x"),
        ("ppo", "--stop_strings a,b c", ["a,b", "c"]),  # text
        (
            "ppo",
            "--reward_function math,code=exact_match length",
            ["math,code=exact_match", "length"],
        ),  # a route
        ("sft", "--sft_only_data_path", []),
        ("ppo", "--no_whiten_advantages", False),
        ("ppo", "--whiten_advantages False", False),
        ("sft", "--apply_chat_template", True),
        ("sft", "--apply_chat_template false", False),
        ("sft", "--data_format Dahoas/rm-static", "Dahoas/rm-static"),
    ],
)
def test_values_on_the_command_line(tmp_path, monkeypatch, step, words, found):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "with,comma.jsonl").touch()
    first, *others = words.split()
    config = read(step, first, *others)
    assert config[first.removeprefix("--").removeprefix("no_")] == found


def test_the_names_of_openrlhf_for_columns_work_on_the_command_line_and_in_yaml(tmp_path):
    names = {
        "input": "prompt",
        "output": "response",
        "chosen": "chosen",
        "rejected": "rejected",
        "label": "answer",
    }
    for theirs, ours in names.items():
        (tmp_path / "settings.yaml").write_text(f"{theirs}_key: question\n")
        for words in (
            [f"--{theirs}_key", "question"],
            ["--config", str(tmp_path / "settings.yaml")],
        ):
            assert read("sft", *words)[f"{ours}_column"] == "question"


def test_a_number_at_the_end_of_its_range_is_in_it():
    found = read(
        "ppo",
        *"--top_p 1 --gamma 0 --min_p 0 --reward_default -3".split(),
    )
    assert (found["top_p"], found["gamma"], found["min_p"]) == (1, 0, 0)
    with pytest.raises(AttributeError):  # configurations are frozen
        config_of("ppo").ppo.temperature = 0.5


# Errors


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--size x", "--size x: expected a whole number: a count (see --help)"),
        ("--size 1.5", "--size 1.5: expected a whole number: a count (see --help)"),
        ("--lr abc", "--rate abc: expected a number: a rate (see --help)"),
        ("--quick perhaps", "--quick perhaps: expected true or false: a switch (see --help)"),
        ("--no_with_text=x", "--no_with_text takes no value, got x (see --help)"),
        ("--counts 1 x", "--counts x: expected a whole number: counts (see --help)"),
        ("--level", "--level needs a value, one of low, 2 (see --help)"),
        ("--level LOW", "--level LOW: expected one of low, 2; did you mean low? (see --help)"),
        ("--level high", "--level high: expected one of low, 2 (see --help)"),
        ("--counts=--", "--counts needs a value, a whole number: counts (see --help)"),
        (
            "--siz 4",
            "unknown flag or value: --siz 4 (all flags: --help)\n  --siz: did you mean --size?",
        ),
        ("--zz", "unknown flag or value: --zz (all flags: --help)"),
    ],
)
def test_a_wrong_value_is_an_error_of_one_line(words, message):
    with pytest.raises(UserError) as problem:
        values(*words.split())
    assert str(problem.value) == message


HERE = " (all flags: --help all)"


@pytest.mark.parametrize(
    ("step", "given", "answer"),
    [
        # misspelt
        ("sft", "--learning-rat", "did you mean --learning_rate?"),
        ("ppo", "--temp", ""),  # no abbreviations
        ("sft", "--max_seq_length=9", "did you mean --max_seq_len?"),
        ("ppo", "--reward_zero_stage", ""),
        ("ppo", "--no_whiten_advantage", "did you mean --no_whiten_advantages?"),
        ("sft", "--num_train_steps", ""),
        # of another step, or of peft
        ("sft", "--lora_rank", "use --lora_dim"),
        ("reward", "--actor_lora_dim", "use --lora_dim"),
        (
            "ppo",
            "--lora_target_modules=q_proj",
            "use --actor_lora_module_name and --critic_lora_module_name",
        ),
        ("ppo", "--critic_temperature", "use --temperature"),
        ("sft", "--kl-coef=0.1", "is a flag of dschat-ppo"),
        ("sft", "--beta", "is a flag of dschat-reward and dschat-dpo"),
        ("ppo", "--packing", "is a flag of dschat-sft and dschat-reward and dschat-dpo"),
        # of other trainers
        ("sft", "--max-train-steps", "did you mean --max_steps?"),
        (
            "ppo",
            "--max_samples",
            "to try a few steps, use --max_steps, or fewer rows: --data_path DATA@ROWS",
        ),
        ("ppo", "--num-generations=8", "use --n_samples_per_prompt"),
        ("ppo", "--beta", "use --kl_loss_coef and --kl_coef"),
        ("ppo", "--rollout.n_samples_per_prompt", "use --n_samples_per_prompt"),
        ("ppo", "--critic.adam.lr", "use --critic_learning_rate"),
        ("sft", "--max_length", "use --max_seq_len"),
    ],
)
def test_an_unknown_flag_is_answered_with_the_one_that_is_meant_or_not_at_all(step, given, answer):
    with pytest.raises(UserError) as problem:
        read(step, given, "1")
    message, _, hint = str(problem.value).partition("\n  ")
    assert message.startswith(f"unknown flag or value: {given}") and message.endswith(HERE)
    assert hint == (f"{given.split('=')[0]}: {answer}" if answer else "")


TOTAL = "theirs is the total of an optimizer step: divide it by --per_device_{} and by the ranks"
NO_CRITIC = "is for a critic, which only --advantage_estimator gae trains; omit it"


@pytest.mark.parametrize(
    ("step", "words", "hint"),
    [
        # a total is no number of micro-batches
        ("ppo", "--train.batch_size 8", TOTAL.format("training_batch_size")),
        ("sft", "--train_batch_size 8", TOTAL.format("train_batch_size")),
        ("ppo", "--rollout.batch_size 8", "the product of these two and of the ranks"),
        ("ppo", "--steps_per_generation 8", "theirs count responses of all ranks"),
        ("ppo", "--total_episodes 8", "use --max_steps (PPO steps, not episodes)"),
        # without a critic, no flag of a critic
        ("ppo", "--advantage_estimator grpo --critic.adam.lr 1", f"critic.adam.lr: {NO_CRITIC}"),
        ("ppo", "--advantage-estimator=rloo --lam 1", f"lam: {NO_CRITIC}"),
        ("ppo", "--algo.advantage.estimator group_norm --value_clip 1", NO_CRITIC),
        (
            "ppo",
            "--advantage_estimator grpo --reward_model_path R",
            "reward_model_path: use --reward_model_name_or_path",
        ),
        ("ppo", "--advantage_estimator gae --lam 1", "lam: use --gae_lambda"),
        ("ppo", "--critic.lr 1", "critic.lr: use --critic_learning_rate"),
        ("ppo", "--vf_coef 0.1", "learning_rate (the critic has an optimizer of its own"),
        ("ppo", "--advantage_estimator grpo --value_loss_coef 1", NO_CRITIC),
        # importance correction
        ("ppo", "--is_correction_enable", "use --importance_correction"),
        ("ppo", "--icepop", "--importance_correction token --importance_mode mask"),
        ("ppo", "--algo.advantage.is_correction_threshold 0.5 5", "importance_floor and"),
        ("ppo", "--importance_mode icepop", "did you mean mask?"),
        ("ppo", "--importance_mode tis", "did you mean truncate?"),
        ("sft", "--attn_implementation flash_attention_2", "auto computes packed rows"),
    ],
)
def test_the_answer_to_a_flag_of_another_trainer_holds_for_the_run(step, words, hint):
    with pytest.raises(UserError) as problem:
        read(step, *words.split())
    assert hint in str(problem.value).splitlines()[-1]


def test_all_wrong_values_and_unknown_flags_are_answered_at_once():
    words = (
        "--dtype bfloat16 --num_generations 8 9 --zz --num_generations=7 --ppo_epochs x --beta 0"
    )
    with pytest.raises(UserError) as problem:
        read("ppo", *words.split())
    lines = str(problem.value).splitlines()
    assert re.fullmatch(r"--dtype bfloat16: .* did you mean bf16\? \(see --help dtype\)", lines[0])
    assert lines[1].startswith("--ppo_epochs x: expected a whole number")
    assert lines[2:] == [
        "unknown flags or values (all flags: --help all):",
        "  --num_generations 8 9: use --n_samples_per_prompt",
        "  --zz",
        "  --beta 0: use --kl_loss_coef and --kl_coef",
    ]


def test_the_unknown_flags_of_a_yaml_file_have_a_line_each_without_their_values(tmp_path):
    path = yaml_file(tmp_path, "num_generations: 8\nbeta: SECRET\nclip_epss: 4\n")
    with pytest.raises(UserError) as problem:
        read("ppo", "--config", path)
    assert str(problem.value).splitlines() == [
        f"--config {path}: unknown flags or values (all flags: --help all):",
        "  --num_generations: use --n_samples_per_prompt",
        "  --beta: use --kl_loss_coef and --kl_coef",
        "  --clip_epss: did you mean --clip_eps?",
    ]


def test_each_name_of_other_trainers_leads_to_flags_of_a_step():
    everywhere = set().union(*FLAGS.values())
    for theirs, ours in OUR_NAMES.items():
        assert any(flags_for(theirs, flags) for flags in FLAGS.values()), theirs
        assert all({name, f"actor_{name}"} & everywhere for name in ours.split()), ours


@pytest.mark.parametrize(
    ("words", "printed"),
    [
        (["--help"], "needed:"),
        (["--no_such_flag", "-h"], "needed:"),
        (["--help", "all"], "All "),
        (
            ["--help=truncation"],
            "Data sets, how their rows are read, and tokenisation:\n  --truncation ",
        ),
    ],
)
def test_help_prints_what_is_asked_for_and_ends(words, printed, capsys):
    with pytest.raises(SystemExit) as leaving:
        parse("sft", words)
    assert leaving.value.code == 0
    assert f"\n{printed}" in f"\n{capsys.readouterr().out}"


# YAML


def yaml_file(tmp_path, text: str) -> str:
    path = tmp_path / "settings.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_flags_override_yaml_values(tmp_path):
    path = yaml_file(
        tmp_path,
        "actor_model_name_or_path: actor\ncritic_model_name_or_path: critic\noutput_dir:"
        " out\nactor_learning_rate: 1e-5\nppo_epochs: 4\nwhiten_advantages:"
        " false\nenable_tensorboard: true\ndata_path: [one.jsonl, two.jsonl]\nactor_dropout:"
        " null\n",
    )
    for place in (0, 4):  # of --config
        words = ["--ppo_epochs", "2", "--output_dir=elsewhere", "--verbose"]
        words[place:place] = ["--config", path]
        found = flatten(parse("ppo", words))
        assert (found["actor_model_name_or_path"], found["actor_learning_rate"]) == ("actor", 1e-5)
        assert found["whiten_advantages"] is False and found["enable_tensorboard"] is True
        assert found["data_path"] == ["one.jsonl", "two.jsonl"] and found["actor_dropout"] is None
        assert (found["ppo_epochs"], found["output_dir"]) == (2, "elsewhere")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("no_such_setting: 1\n", "no_such_setting"),
        ("seed: [1\n", "is not valid YAML"),
        ("- seed\n", "must be a mapping"),
        ("", "must be a mapping"),
        ("seed: {a: 1}\n", "'seed' must be a value"),
        ("seed: many\n", "--seed"),
        ("lora_dim: -8\n", "settings.yaml: --lora_dim must be"),
        ("config: b.yaml\n", "'config' cannot name another file"),
        ("dtype: bfloat16\n", "--dtype bfloat16: expected one of .*; did you mean bf16"),
    ],
)
def test_the_fault_of_a_bad_yaml_file_is_named(tmp_path, text, named):
    with pytest.raises(UserError, match=named):
        read("sft", "--config", yaml_file(tmp_path, text))


def test_a_yaml_file_that_is_missing_or_not_text_or_a_pipe_is_refused(tmp_path):
    settings = yaml_file(tmp_path, "seed: 5\n")
    with pytest.raises(
        UserError, match=f"No such file or directory\\); did you mean {re.escape(settings)}\\?$"
    ):
        read("sft", "--config", settings.replace(".yaml", ".yml"))
    (tmp_path / "binary.yaml").write_bytes(b"seed: \xff\xfe\n")
    with pytest.raises(UserError, match=r"--config .*binary\.yaml: is not UTF-8"):
        read("sft", "--config", str(tmp_path / "binary.yaml"))
    os.mkfifo(tmp_path / "pipe")  # which each rank would wait for
    with pytest.raises(UserError, match=f"^--config {tmp_path}/pipe: is not a regular file$"):
        read("sft", "--config", str(tmp_path / "pipe"))


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (
            "sft",
            [
                "--data_path",
                "a.jsonl",
                "b.jsonl",
                "--learning_rate",
                "3e-7",
                "--input_template",
                "Q: {}\nA:",
                "--system_column",
                "",
            ],
        ),
        (
            "sft",
            [
                "--sft_only_data_path",
                "c.jsonl",
                "--data_split",
                "10,0,0",
                "--eot_token",
                "<|end|>",
                "--deepspeed",
            ],
        ),
        (
            "reward",
            ["--dropout", "0.1", "--eval_fraction", "0", "--dtype", "fp32", "--zero_stage", "3"],
        ),
        (
            "ppo",
            [
                "--no_whiten_advantages",
                "--top_p",
                "0.9",
                "--enable_test_mode",
                "--test_stop_step",
                "3",
            ],
        ),
    ],
)
def test_a_saved_configuration_is_plain_yaml_and_parses_to_equal_values(tmp_path, step, words):
    expected = read(step, *words, "--local_rank", "1")
    path = write_config(expected, tmp_path)
    assert yaml.safe_load(path.read_text(encoding="utf-8"))["seed"] == 1234
    again = flatten(parse(step, ["--config", str(path)]))
    of_one_start = {name: expected[name] for name in ("local_rank", "config")}
    assert again | of_one_start == expected


@pytest.mark.parametrize(
    "words", [["--deepspeed", "FILE"], ["--deepspeed=FILE"], ["--config", "YAML"]]
)
def test_the_file_of_deepspeed_is_its_configuration(tmp_path, words):
    file = tmp_path / "ds.json"
    path = yaml_file(tmp_path, f"deepspeed: {file}\n")
    found = read("sft", *[word.replace("FILE", str(file)).replace("YAML", path) for word in words])
    assert (found["deepspeed_config"], found["deepspeed"]) == (str(file), False)
    assert read("sft", "--deepspeed")["deepspeed"] is True


def test_the_config_package_imports_no_torch():
    code = (
        "import sys, dschat_ppo.config.cli as cli, dschat_ppo.config.batch_plan;"
        "cli.parse('sft', ['--model_name_or_path', 'm', '--data_path', 'd', '--output_dir', 'o']);"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
