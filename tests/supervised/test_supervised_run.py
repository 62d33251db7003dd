"""The first log lines of steps 1 and 2, and what is refused before data are read."""

import sys

import pytest
from launch import ROOT, run, succeed

from dschat_ppo.config.cli import parse
from dschat_ppo.models.adapters import adapter_settings
from dschat_ppo.supervised import sft, supervised_run, train_preference
from dschat_ppo.supervised.supervised_run import report_learning_rate

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


@pytest.mark.parametrize(("step", "rate", "words", "parameters", "warned"), [
    ("sft", "1.1e-4", "", 10**8, True), ("sft", "1e-4", "", 10**8, False), ("dpo", "1.1e-4", "", 10**9, True),
    ("sft", "1.9e-4", "", 5 * 10**7, False), ("sft", "2.1e-4", "", 5 * 10**7, True), ("sft", "0.9", "", 0, False),
    ("reward", "1e-3", "--lora_dim 8", 10**8, True), ("sft", "1e-3", "--lora_dim 8 --only_optimize_lora", 10**8, False),
    ("sft", "1e-3", "--validate_only", 10**8, False),
])  # fmt: skip
def test_a_rate_too_high_for_the_weights_that_train_gives_a_warning(
    step, rate, words, parameters, warned, said, monkeypatch
):
    shapes = {"embedding": (parameters // 2,), "layers": (1, parameters // 2)}
    monkeypatch.setattr(supervised_run, "checkpoint_shapes", lambda folder: shapes)
    config = parse(step, [*WORDS, "--learning_rate", rate, *words.split()])
    adapter = adapter_settings(config.lora.lora_dim, config.lora.lora_module_name, config.adapters)
    report_learning_rate(config.fit, adapter, "m")
    assert len(said) == warned
    assert all(line.startswith(f"--learning_rate {float(rate):g} trains whole weights") for line in said)


def test_the_dpo_program_has_the_flags_of_step_2_and_dpo_as_its_objective():
    for program, objective in (("step2_dpo", "dpo"), ("step2_reward", "reward")):
        text = succeed(run([sys.executable, str(ROOT / f"training/{program}/main.py"), "--help", "objective"])).stdout
        assert f"(default: {objective})" in " ".join(text.split())
