"""Shared flags: ranges, and that inside the limits of AdamW's flags every update is bounded."""

import math
import os

import pytest
import torch
from command_lines import NEEDED, read

from dschat_ppo.config.cli import notes, parse
from dschat_ppo.config.run_flags import RunFlags
from dschat_ppo.config.schema import LARGEST_BETA, SMALLEST_EPSILON, SMALLEST_NORM, read_settings
from dschat_ppo.config.supervised_flags import SupervisedFlags
from dschat_ppo.errors import UserError

LARGE, SMALL, LEAST = 1e18, 1e-18, 1e-45  # the least number of fp32
GRADIENTS = {
    "tiny": [LEAST] * 30,
    "least whose square is lost": [3e-23] * 30,
    "a fall": [LARGE] + [SMALL] * 30,
    "falls": [LARGE, *[LEAST] * 10] * 3,
    "a rise": [LEAST] * 30 + [LARGE],
    "nothing, then something": [0.0] * 30 + [LEAST],
}


def largest_update(gradients: list[float], betas: tuple[float, float], epsilon: float) -> float:
    """Largest update of a weight by torch's AdamW, in units of the learning rate."""
    weight, largest = torch.nn.Parameter(torch.zeros(1)), 0.0
    adam = torch.optim.AdamW([weight], lr=1.0, betas=betas, eps=epsilon, weight_decay=0.0, fused=True)
    for gradient in gradients:
        weight.data.zero_()
        weight.grad = torch.tensor([gradient])
        adam.step()
        moved = abs(float(weight.detach()))
        largest = moved if math.isnan(moved) else max(largest, moved)
        if math.isnan(moved):
            break
    return largest


@pytest.mark.parametrize("gradients", GRADIENTS.values(), ids=GRADIENTS)
@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.9, 0.82), (0.0, 1e-6), (0.999, LARGEST_BETA), (0.9, LARGEST_BETA)])
def test_updates_inside_the_limits_are_bounded(gradients, betas):
    RunFlags(output_dir="o", adam_beta1=betas[0], adam_beta2=betas[1], adam_epsilon=SMALLEST_EPSILON)
    beta1, beta2 = betas
    bound = (1 - beta1) / math.sqrt((1 - beta2) * (1 - beta1**2 / beta2)) / (1 - beta1)  # 1 / (1 - b1): its correction
    assert largest_update(gradients, betas, SMALLEST_EPSILON) <= 1.01 * bound


@pytest.mark.parametrize(
    ("betas", "epsilon", "gradients", "too_large"),
    [
        ((0.9, 0.0), 1e-300, [1.0, 1e-30], math.inf),
        ((0.9, 0.0), 1e-8, [1.0, 0.0], 1e6),
        ((0.9, 0.95), 1e-300, [LEAST], math.inf),
        ((0.9, 0.5), SMALLEST_EPSILON, [1.0] + [1e-9] * 60, 1e5),
    ],
)
def test_updates_outside_the_limits_are_not_bounded(betas, epsilon, gradients, too_large):
    assert not largest_update(gradients, betas, epsilon) < too_large
    with pytest.raises(UserError, match=r"^--adam_(epsilon|beta2) must be "):
        RunFlags(output_dir="o", adam_beta1=betas[0], adam_beta2=betas[1], adam_epsilon=epsilon)


def supervised_flags(**changes) -> SupervisedFlags:
    return SupervisedFlags(model_name_or_path="m", **changes)


def test_weight_decay_that_flips_or_grows_weights_is_refused():
    supervised_flags(learning_rate=0.5, weight_decay=1.99)
    for rate, decay in ((0.5, 2.0), (1.0, 1.0), (1e-3, 1e300)):
        with pytest.raises(UserError, match=r"^--learning_rate x --weight_decay must be below 1, got "):
            supervised_flags(learning_rate=rate, weight_decay=decay)


def test_max_grad_norm_below_the_limit_is_refused():
    for norm in (0.0, SMALLEST_NORM, 1e300):
        assert supervised_flags(max_grad_norm=norm).max_grad_norm == norm
    with pytest.raises(UserError, match=r"^--max_grad_norm must be 0 \(off\) or at least 1e-06, got 1e-07"):
        supervised_flags(max_grad_norm=1e-7)


def test_a_learning_rate_above_1_is_refused():
    assert supervised_flags(learning_rate=1.0).learning_rate == 1.0
    with pytest.raises(UserError, match=r"^--learning_rate must be at most 1, got 1e\+30"):
        supervised_flags(learning_rate=1e30)


@pytest.mark.parametrize("step", ["sft", "reward"])
def test_offload_needs_a_zero_stage(step):
    with pytest.raises(UserError, match="--zero_stage"):
        read(step, "--offload")


def test_a_tilde_in_output_dir_is_expanded(monkeypatch):
    monkeypatch.setenv("HOME", "/home/ada")
    config = parse("sft", ["--model_name_or_path", "m", "--data_path", "d", "--output_dir=~/out"])
    assert config.run.folder == "/home/ada/out"


def config(step: str, words: str = ""):
    return parse(step, [*NEEDED[step], *words.split()])


@pytest.mark.parametrize(("words", "trackers"), [
    ("", ()),
    ("--enable_tensorboard", ("tensorboard",)),
    ("--report_to wandb trackio", ("wandb", "trackio")),
    ("--report_to wandb wandb --enable_tensorboard", ("wandb", "tensorboard")),
    ("--report_to tensorboard --enable_tensorboard", ("tensorboard",)),
    ("--report_to none", ()),
    ("--report_to none --enable_tensorboard", ()),
])  # fmt: skip
def test_enable_tensorboard_adds_to_report_to_and_none_turns_all_trackers_off(words, trackers):
    assert config("sft", words).run.trackers == trackers


def test_none_with_another_tracker_is_refused():
    with pytest.raises(UserError, match="^--report_to none wandb: none cannot be combined with other trackers"):
        config("sft", "--report_to none wandb")


@pytest.mark.parametrize("step", ["sft", "reward", "ppo"])
@pytest.mark.parametrize(("words", "without_effect"), [
    ("--report_to wandb --run_name a --project b", set()),
    ("--report_to trackio", set()),
    ("--report_to tensorboard --run_name a", {"run_name"}),
    ("--project b --enable_tensorboard", {"project"}),
    ("--report_to none --enable_tensorboard", {"enable_tensorboard"}),
])  # fmt: skip
def test_flags_of_trackers_without_effect_are_noted(step, words, without_effect):
    found = notes(step, config(step, words))
    assert {line.split()[0].removeprefix("--") for line in found} == without_effect


def test_a_settings_file_that_is_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match=f"^--config {tmp_path}/pipe: is not a regular file$"):
        read_settings("--config", str(tmp_path / "pipe"))
