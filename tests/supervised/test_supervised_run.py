"""The first log lines of steps 1 and 2, and what is refused before data are read."""

import sys

import pytest
import torch
from launch import ROOT, run, succeed

from dschat_ppo.config.cli import parse
from dschat_ppo.errors import UserError
from dschat_ppo.supervised import sft, supervised_run, train_preference

WORDS = ["--model_name_or_path", "m", "--data_path", "d", "--output_dir", "o"]


class NothingIsRead(Exception):  # noqa: N818
    """Raised in place of looking for the model's folder."""


@pytest.fixture
def first_lines(monkeypatch, said):
    """(step, further words) -> the lines that the run logs first."""

    def refuse(*arguments):
        raise NothingIsRead

    monkeypatch.setattr(supervised_run, "begin_run", lambda *arguments: (None, None))
    monkeypatch.setattr(supervised_run, "model_folder", refuse)

    def lines_of(step, *words):
        train = sft.train_sft if step == "sft" else train_preference.train_preferences
        with pytest.raises(NothingIsRead):
            train(parse(step, [*WORDS, *words]))
        return said

    return lines_of


@pytest.mark.parametrize(("step", "words", "line"), [
    ("sft", (), "step 1: supervised fine-tuning"),
    ("reward", (), "step 2: --objective reward trains a reward model (for DPO: training/step2_dpo/main.py"),
    ("reward", ("--objective", "ipo"), "step 2: --objective ipo trains the policy itself"),
    ("dpo", (), "step 2: --objective dpo trains the policy itself"),
])  # fmt: skip
def test_the_first_line_names_what_is_trained(step, words, line, first_lines):
    [found] = first_lines(step, *words)
    assert found.startswith(line)


@pytest.mark.parametrize("step", ["sft", "reward", "dpo"])
@pytest.mark.parametrize(("rate", "warned"), [("1e-3", True), ("1.1e-4", True), ("1e-4", False), ("2e-5", False)])
def test_a_learning_rate_too_high_for_a_pretrained_model_gives_a_warning(step, rate, warned, first_lines):
    lines = first_lines(step, "--learning_rate", rate)
    assert any(f"--learning_rate {float(rate):g}" in line and "1e-5 to 2e-5" in line for line in lines) is warned


@pytest.mark.parametrize(("words", "warned"), [(("--only_optimize_lora",), False), ((), True)])
def test_the_warning_is_about_weights_that_train(words, warned, first_lines):
    lines = first_lines("sft", "--learning_rate", "1e-3", "--lora_dim", "8", *words)
    assert any("1e-5 to 2e-5" in line for line in lines) is warned


@pytest.mark.parametrize("step", ["sft", "reward", "dpo"])
@pytest.mark.parametrize("choice", ["flash_attention_2", "flex_attention"])
def test_attention_that_needs_a_gpu_is_refused_before_data_are_read(monkeypatch, assets, tmp_path, step, choice):
    monkeypatch.setattr(supervised_run, "begin_run", lambda *arguments: (torch.device("cpu"), tmp_path))
    words = ["--model_name_or_path", str(assets / "lm"), "--data_path", "d", "--output_dir", "o"]
    train = sft.train_sft if step == "sft" else train_preference.train_preferences
    with pytest.raises(UserError, match=rf"^--attn_implementation {choice} needs a GPU, because .* use sdpa$"):
        train(parse(step, [*words, "--attn_implementation", choice]))


@pytest.mark.parametrize(("step", "words", "dropout"), [
    ("sft", (), None), ("reward", (), None), ("dpo", (), 0.0), ("dpo", ("--dropout", "0.2"), 0.2),
    ("sft", ("--dropout", "0"), 0.0),
])  # fmt: skip
def test_the_dropout_that_attention_is_checked_for(monkeypatch, assets, tmp_path, step, words, dropout):
    def check(memory, flag, folder, scalar, found):
        assert (found, scalar) == (dropout, step == "reward")
        raise NothingIsRead

    monkeypatch.setattr(supervised_run, "begin_run", lambda *arguments: (torch.device("cpu"), tmp_path))
    monkeypatch.setattr(supervised_run, "check_long_sequences", check)
    given = ["--model_name_or_path", str(assets / "lm"), "--data_path", "d", "--output_dir", "o", *words]
    train = sft.train_sft if step == "sft" else train_preference.train_preferences
    with pytest.raises(NothingIsRead):
        train(parse(step, given))


def test_the_dpo_program_has_the_flags_of_step_2_and_dpo_as_its_objective():
    for program, objective in (("step2_dpo", "dpo"), ("step2_reward", "reward")):
        text = succeed(run([sys.executable, str(ROOT / f"training/{program}/main.py"), "--help", "objective"])).stdout
        assert f"(default: {objective})" in " ".join(text.split())
