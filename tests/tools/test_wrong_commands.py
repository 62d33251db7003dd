"""Commands of the tools that cannot work: a line says what is wrong before a model is loaded; the
command `report`."""

import sys
from pathlib import Path

import pytest
from report_runs import ppo_lines, write_run

from dschat_ppo.tools import chat, data, evaluate, plan, report, serve_reward
from dschat_ppo.tools.report import main

MAINS = {
    "chat": chat,
    "data": data,
    "evaluate": evaluate,
    "plan": plan,
    "report": report,
    "serve": serve_reward,
}
TWO, ROLES = "--model a b --data_path d", "--actor {lm} --critic {reward}"
REAL = "--model {lm} --data_path {prompts} --max_prompt_seq_len 40"
# tool, its flags, what the line says; {lm}, {reward} and {prompts} are there
WRONG = [
    ("chat", "--model a --top_p 2", "--top_p must be a number from 0.001 to 1, got 2"),
    ("chat", "--model a --dtype int8", "--dtype int8: expected one of "),
    ("chat", "--model a --temprature 1", "unknown flag or value"),
    ("chat", "--model a --chat_template_kwargs [", "--chat_template_kwargs is not JSON"),
    ("chat", "--model ./nothing", "--model ./nothing: no such folder"),
    (
        "chat",
        "--model {lm} --compare {reward}",
        "{reward}: is a reward model or critic, because it has a score head",
    ),
    ("data", "--step 1 --data_path x.jsonl --no_such_flag 1", "--no_such_flag"),
    ("data", "--step 3 --data_path x.jsonl --max_seq_len 9", "--max_prompt_seq_len"),
    ("data", "--step 1 --data_path x.jsonl --rows 0", "--rows must be at least 1"),
    ("data", "--step 1", "required: --data_path"),
    ("data", "--data_path x.jsonl", "required: --step 1, 2, dpo or 3 (all flags: --help)"),
    ("data", "--step 1 --rows many", "--rows many: expected a whole number"),
    ("data", "--step 1 --data_path x.jsonl --streaming --streaming_rows 9", "omit --streaming"),
    (
        "data",
        "--step 1 --tokenizer {lm} --data_path a.jsonl:2 b.jsonl",
        "give each data set a weight",
    ),
    ("evaluate", "", "give --model and --data_path"),
    ("evaluate", "--model a", "give --model and --data_path"),
    ("evaluate", f"{TWO} --streaming", "--streaming: has no effect here"),
    ("evaluate", f"{TWO} --use_reward_model", "--use_reward_model: has no effect here"),
    ("evaluate", f"{TWO} --samples 0", "--samples"),
    ("evaluate", f"{TWO} --show -1", "--show"),
    (
        "evaluate",
        f"{TWO} --samples 2 --decoding greedy",
        "--samples has no effect with --decoding greedy",
    ),
    ("evaluate", "--model a a --data_path d", "--model names a model twice"),
    *(
        (
            "evaluate",
            f"{TWO} --samples 2 --reward_function length --write_prompts f --keep {keep}",
            f"--keep {keep}: expected LOW:HIGH from 0 to 1",
        )
        for keep in ("0.8:0.2", "0.2", "0.2:", "a:b", "0:1.5", "nan:1", "0:0.5:1")
    ),
    ("evaluate", f"{TWO} --write_prompts f", "--keep LOW:HIGH need each other"),
    ("evaluate", f"{TWO} --keep 0:1", "--keep LOW:HIGH need each other"),
    (
        "evaluate",
        f"{TWO} --reward_function length --write_prompts f --keep 0:1",
        "give --samples 2 or more, and a reward",
    ),
    (
        "evaluate",
        f"{TWO} --samples 2 --write_prompts f --keep 0:1",
        "give --samples 2 or more, and a reward",
    ),
    ("evaluate", f"{TWO} --min_p 2", "--min_p must be a number from 0 to 1"),
    ("evaluate", f"{TWO} --actor_learning_rate 1", "unknown flag or value"),
    ("evaluate", f"{REAL} --json /", "name a file"),
    ("evaluate", f"{REAL} --json none/a.json", "folder that exists"),
    ("evaluate", f"{REAL} --model {{reward}}", "reward: is a reward model"),
    ("evaluate", f"{REAL} --reward_model_name_or_path {{lm}}", "lm: has no trained scalar head"),
    ("evaluate", f"{REAL} --max_tokens 10000", "--max_tokens of 10040 tokens goes beyond"),
    ("plan", "--actor {lm}", "the learned reward needs --critic_model_name_or_path"),
    ("plan", "--actor ./no --critic {reward}", "no: no such folder"),
    ("plan", f"{ROLES} --no_such 1", "unknown flag"),
    ("plan", f"{ROLES} --devices 4 --devices_per_node 3", "the second must divide the first"),
    ("plan", "--devices 0", "both must be above 0"),
    ("plan", f"{ROLES} --devices_per_node 0", "--devices_per_node 0: both must be above 0"),
    ("plan", "--device_memory 0GiB", "is not a size such as"),
    ("plan", "--step 1 --model {lm} --lora_dim 4", "LoRA needs the package peft: pip install -e"),
    ("report", "./none", "none: there is no such folder"),
    ("report", "{lm}", "has no metrics.jsonl"),
    ("serve", "--model {reward} --max_batch_tokens 0", "--max_batch_tokens"),
    ("serve", "--model {reward} --port 99999", "--port"),
    ("serve", "--model /no/such --port 0", "--model /no/such"),
    ("serve", "--model {lm} --port 0", "lm: has no trained scalar head"),
]


@pytest.fixture(scope="module")
def places(assets):
    return {
        "lm": assets / "lm",
        "reward": assets / "reward",
        "prompts": assets / "prompts.jsonl",
    }


@pytest.mark.parametrize(("tool", "words", "said"), WRONG)
def test_a_wrong_command_is_refused_in_a_line(places, tool, words, said, monkeypatch, capsys):
    if "peft" in said:
        # an import of it would raise ModuleNotFoundError
        monkeypatch.setitem(sys.modules, "peft", None)
    assert MAINS[tool].main(words.format(**places).split()) == 2
    error = capsys.readouterr().err
    first, *hints = error.splitlines()
    assert first.startswith("error: ") and said.format(**places) in error
    assert all(hint.startswith("  --") for hint in hints), "of a flag that is unknown"


def test_reports_of_one_run_and_of_several(tmp_path, monkeypatch, capsys):
    folders = [str(write_run(tmp_path / name, ppo_lines(2))) for name in ("a", "b")]
    monkeypatch.chdir(tmp_path)
    for words, place in (
        (folders[:1], f"{folders[0]}/report.html"),
        (folders, "report.html"),
        ([*folders, "--out", "both.html"], "both.html"),
    ):
        assert main(words) == 0
        assert capsys.readouterr().out.startswith(f"{place}: {len(folders[: len(words)])} run")
        assert Path(place).read_text().startswith("<!DOCTYPE html>")
