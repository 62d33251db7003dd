"""Metrics of earlier versions under the names of today, and the sections of metrics in trackers."""

import pytest

from dschat_ppo.monitor.metric_names import present_name, tracked_name


@pytest.mark.parametrize(("name", "expected"), [
    ("answers/length_mean/web", "rollout/length_mean/web"),
    ("seconds/train", "time/train"),
    ("peak_memory_gib/train", "memory/train_peak_gib"),
    ("tokens_per_second/rollout", "time/rollout_tokens_per_s"),
    ("coef/kl", "kl/coef"),
    ("coef/entropy", "policy/entropy_coef"),
    ("dynamic_sampling/rounds", "rollout/dynamic_sampling_rounds"),
    ("advantage/std", "policy/advantage_std"),
    ("return/mean", "value/return_mean"),
    ("value/mean", "value/mean"),
    ("lr/critic", "optim/lr/critic"),
    ("lr", "lr"),
    ("overflow/model", "optim/overflow/model"),
    ("optim/lr/critic", "optim/lr/critic"),
    ("nonfinite/skipped", "optim/nonfinite_skipped"),
    ("ptx/loss", "policy/ptx_loss"),
    ("reference/moved", "kl/reference_moved"),
    ("seconds/describe", "time/score_statistics"),
    ("memory/describe_peak_gib", "memory/score_statistics_peak_gib"),
    ("grad_norm/actor", "optim/grad_norm/actor"),
    ("grad_norm", "grad_norm"),
    ("rollout/answers/x", "rollout/answers/x"),
])  # fmt: skip
def test_a_name_of_an_earlier_version_is_mapped(name, expected):
    assert present_name(name) == expected


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
