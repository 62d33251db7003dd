"""The line that a run prints about a step."""

import pytest

from dschat_ppo.common.progress import Progress
from dschat_ppo.config.run_flags import ConsoleFlags
from dschat_ppo.monitor.step_line import PPO_COLUMNS, show_step, step_line, supervised_columns

METRICS = {
    "reward/score_mean": 0.41239,
    "kl/ref_k1": 0.01234,
    "policy/entropy": 1.98049,
    "value/explained_variance": -0.4512,
    "rollout/length_mean": 31.25,
    "policy/loss": 9.0,
}


def progress_at(done: int, total: int, seconds: float, tokens: float = 0.0) -> Progress:
    """After `done` steps, of which the last took `seconds`."""
    bar = Progress("PPO", total, done)
    bar._ends.extend([(0.0, 0.0), (seconds, tokens)])
    return bar


def test_the_line_of_step_3_has_short_names_in_columns():
    line = step_line(PPO_COLUMNS, METRICS, progress_at(7, 24, 2.5))
    assert (
        line
        == "step  7/24  score   0.412  KL  0.0123  entropy  1.980  explained -0.45  length   31.2  "
        "  2.50 s  0:42 left"
    )  # 17 steps of 2.5 s


def test_the_line_of_steps_1_and_2_has_the_rates_that_there_are_and_the_time_left():
    metrics = {
        "loss": 0.66871,
        "accuracy": 0.59375,
        "margin": 0.0534,
        "lr": 3e-4,
        "lora_lr": 2e-3,
        "grad_norm": 2.172,
    }
    line = step_line(
        supervised_columns(("margin",)), metrics, progress_at(10, 250, 0.5, tokens=1000)
    )
    rates = "lr 3.00e-04  LoRA lr 2.00e-03  grad norm   2.17    2,000 tokens/s  2:00 left"
    assert line == f"step  10/250  margin   0.053  {rates}"


@pytest.mark.parametrize(
    ("every", "printed"), [(1, [1, 2, 3, 4, 5]), (2, [1, 2, 4, 5]), (10, [1, 5])]
)
def test_lines_come_every_so_many_steps_and_at_both_ends(every, printed, said):
    with Progress("PPO", 5) as bar:
        for _ in range(5):
            bar.advance()
            show_step(PPO_COLUMNS, METRICS, bar, ConsoleFlags(logging_steps=every))
    assert [int(line.split("/")[0].removeprefix("step ")) for line in said] == printed
    assert ["left" in line for line in said] == [True] * (len(printed) - 1) + [False]
