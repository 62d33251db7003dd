"""The sections of metrics in trackers."""

import pytest

from dschat_ppo.monitor.writers import tracked_name


@pytest.mark.parametrize(("name", "expected"), [
    ("loss", "train/loss"),
    ("loss/web", "train/loss/web"),
    ("accuracy", "train/accuracy"),
    ("epoch", "train/epoch"),
    ("eval_loss", "eval/loss"),
    ("eval_loss/web", "eval/loss/web"),
    ("lr", "optim/lr"),
    ("lora_lr", "optim/lora_lr"),
    ("grad_norm", "optim/grad_norm"),
    ("optim/overflow/model", "optim/overflow/model"),
    ("time/train", "time/train"),
    ("reward/score_mean/web", "reward/score_mean/web"),
    ("eval/pass@1", "eval/pass@1"),
])  # fmt: skip
def test_a_metric_has_a_section_in_trackers(name, expected):
    assert tracked_name(name) == expected
