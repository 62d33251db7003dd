"""The warning about the learning rate of steps 1 and 2, and the program of DPO."""

import sys

import pytest
from launch import ROOT, run, succeed

from dschat_ppo.config.cli import parse
from dschat_ppo.models.adapters import adapter_settings
from dschat_ppo.supervised import supervised_run
from dschat_ppo.supervised.supervised_run import report_learning_rate

WORDS = ["--model_name_or_path", "m", "--data_path", "d", "--output_dir", "o"]


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
    adapter = adapter_settings(config.lora, config.adapters)
    report_learning_rate(config.fit, adapter, "m")
    assert len(said) == warned
    assert all(line.startswith(f"--learning_rate {float(rate):g} trains whole weights") for line in said)


def test_the_dpo_program_has_the_flags_of_step_2_and_dpo_as_its_objective():
    for program, objective in (("step2_dpo", "dpo"), ("step2_reward", "reward")):
        text = succeed(run([sys.executable, str(ROOT / f"training/{program}/main.py"), "--help", "objective"])).stdout
        assert f"(default: {objective})" in " ".join(text.split())
