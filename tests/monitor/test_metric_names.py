"""Metrics of earlier versions under the names of today."""

import pytest

from dschat_ppo.monitor.metric_names import present_name


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
    ("grad_norm/actor", "optim/grad_norm/actor"),
    ("grad_norm", "grad_norm"),
    ("rollout/answers/x", "rollout/answers/x"),
])  # fmt: skip
def test_a_name_of_an_earlier_version_is_mapped(name, expected):
    assert present_name(name) == expected
