"""Flags of process rewards: their values, combinations that are refused, and notes of the
tools."""

import json
import re
import shutil

import pytest

from dschat_ppo.config.cli import parse
from dschat_ppo.errors import UserError
from dschat_ppo.features.process_rewards import refusals
from dschat_ppo.features.process_rewards.flags import ProcessRewardFlags, StepFlags
from dschat_ppo.tools import evaluate, serve_reward
from dschat_ppo.tools.data import main as show_data

STEP_2 = "--model_name_or_path m --data_path d --output_dir o"
STEP_3 = "--actor_model_name_or_path a --critic_model_name_or_path c --data_path d --output_dir o"
FUNCTION = "--use_reward_model False --reward_function length"
TWO = "--model a b --data_path d"


@pytest.mark.parametrize(("given", "text"), [("\\n\\n", "\n\n"), ("\n", "\n"), ("ки\\t", "ки\t")])
def test_backslashes_in_the_separator_stand_for_line_breaks_and_tabs(given, text):
    words = [*STEP_2.split(), "--objective", "process", "--step_separator", given]
    config = parse("reward", words)
    assert config.of(StepFlags).separator == text
    assert (config.step_data.use, config.step_data.use_settings) == ("steps", text)


@pytest.mark.parametrize(
    ("step", "words", "said"),
    [
        ("reward", "--step_separator |", "--step_separator | has no effect: it is for --objective"),
        (
            "reward",
            "--objective process --step_separator=",
            "--step_separator must not be",
        ),
        (
            "ppo",
            f"--process_reward min {FUNCTION}",
            "--process_reward min has no effect: it is for --use_reward_model",
        ),
        ("ppo", "--process_reward max", "--process_reward max: expected one of min, mean"),
        (
            "ppo",
            "--process_reward last --normalize_rewards model",
            "_rewards running",
        ),
    ],
)
def test_flags_that_do_not_go_together_are_refused(step, words, said):
    needed = {"reward": STEP_2, "ppo": STEP_3}[step]
    with pytest.raises(UserError, match=re.escape(said)):
        parse(step, [*needed.split(), *words.split()])


def test_the_best_model_may_be_that_of_a_metric_of_steps():
    words = f"{STEP_2} --objective process --metric_for_best accuracy_bad:max"
    assert parse("reward", words.split()).best.best_metric.name == "eval_accuracy_bad"


def test_running_moments_normalise_process_rewards():
    words = f"{STEP_3} --process_reward min --normalize_rewards running"
    assert parse("ppo", words.split()).of(ProcessRewardFlags).process_reward == "min"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--process_reward min --reward_function length", "--process_reward min has no effect"),
        ("--process_reward min", "it is for --reward_model_name_or_path"),
    ],
)
def test_an_evaluation_that_cannot_use_it_is_refused(words, said, capsys):
    assert evaluate.main([*TWO.split(), *words.split()]) == 2
    assert said in capsys.readouterr().err


def test_episodes_have_no_process_reward(monkeypatch, capsys):
    monkeypatch.setattr(refusals, "features_observe", lambda flags: True)
    words = [*STEP_3.split(), "--process_reward", "min"]
    with pytest.raises(UserError, match="scores the steps of one answer, not of episodes; omit"):
        parse("ppo", words)
    words = f"{TWO} --process_reward min --reward_model_name_or_path r"
    assert evaluate.main(words.split()) == 2
    assert "not of episodes" in capsys.readouterr().err


def test_the_server_of_rewards_refuses_the_model(assets, tmp_path, capsys):
    prm = shutil.copytree(assets / "reward", tmp_path / "prm")
    config = json.loads((prm / "config.json").read_text())
    (prm / "config.json").write_text(json.dumps({**config, "step_separator": "\n"}))
    assert serve_reward.main(["--model", str(prm), "--port", "0"]) == 2
    assert f"{prm}: is a process reward model" in capsys.readouterr().err


def test_the_preview_marks_what_is_trained_and_shows_the_labels(assets, tmp_path, capsys):
    rows = [
        {"prompt": f"Q{n}:", "completions": [" a", " b"], "labels": [True, False]} for n in range(4)
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    words = f"--step 2 --objective process --step_separator | --data_path {path} --samples 1"
    words += f" --data_split 0,1,0 --eval_fraction 0 --tokenizer {assets / 'lm'}"
    assert show_data([*words.split(), "--data_output_path", str(tmp_path / "cache")]) == 0
    shown = capsys.readouterr().out.replace("answers in ⟦ ⟧", "")
    assert re.search(r"Q\d:⟦ a\| b<\|end\|>⟧\n  labels: \[1.0, 0.0\]\n", shown), shown
