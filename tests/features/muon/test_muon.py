"""Muon's updates, in numpy; which parameters it trains; and that ranks change no update."""

import math
import sys

import numpy as np
import pytest
import torch
from command_lines import NEEDED
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad
from launch import forked, succeed
from one_rank import one_rank  # noqa: F401
from tiny_models import new_model

from dschat_ppo.common import dist
from dschat_ppo.config.cli import parse
from dschat_ppo.engine.build_engine import optimizer_settings, train_engine
from dschat_ppo.engine.ds_config import train_config
from dschat_ppo.engine.optimizer_step import accumulate, apply, learning_rates
from dschat_ppo.features.muon.optimizers import is_layer_matrix
from dschat_ppo.models.loading import DTYPES


def test_matrices_that_multiply_no_states_are_left_to_adamw():
    assert not is_layer_matrix("backbone.layers.0.mixer.A_log", (8, 4)), "of Mamba"
    assert is_layer_matrix("model.layers.0.mlp.up_proj.weight", (8, 4))


def orthogonal(matrix: np.ndarray) -> np.ndarray:
    """Five steps of the Newton-Schulz iteration of https://kellerjordan.github.io/posts/muon/."""
    if matrix.shape[0] > matrix.shape[1]:
        return orthogonal(matrix.T).T
    x = matrix / np.linalg.norm(matrix)
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x


@pytest.mark.parametrize(
    ("stage", "dtype", "kind", "muon"),
    [
        (0, "fp32", "gpt2", 0.2),
        (1, "bf16", "llama", 0.2),
        (0, "fp32", "llama", None),
    ],
)
@pytest.mark.usefixtures("one_rank")
def test_muon_trains_the_matrices_of_the_layers_and_adamw_the_rest(
    stage, dtype, kind, muon, monkeypatch
):
    """Momentum, iteration, scale and decay in numpy; gradients are clipped, and a skipped step
    changes nothing."""
    words = "--learning_rate 0.1 --weight_decay 0.1 --adam_epsilon 1e-6 --lr_scheduler_type linear"
    words += f" --optimizer muon --muon_learning_rate {muon}" if muon else ""
    settings = optimizer_settings(parse("sft", [*NEEDED["sft"], *words.split()]), 4)
    engine = train_engine(
        new_model(kind).to(DTYPES[dtype]), train_config(stage, dtype, False, 1, 0.05), settings
    )
    module = sys.modules["deepspeed.runtime.zero.muon.original_muon"]
    # in place of bf16
    monkeypatch.setattr(module, "ns_compute_dtype", {"standard": torch.float32}.__getitem__)

    def numbers(of) -> dict[str, np.ndarray]:
        return {
            name: of(weight).double().cpu().numpy().copy()
            for name, weight in engine.module.named_parameters()
        }

    master = safe_get_full_fp32_param if stage else torch.detach
    ids, momenta = (
        torch.arange(24, device=dist.device()).view(2, 12),
        dict.fromkeys(numbers(torch.detach), 0.0),
    )
    for factor, bad in ((1, 0.0), (0.75, math.inf), (0.75, 0.0)):
        before = numbers(master)
        rates = {"lr": 0.1 * factor} | ({"muon_lr": muon * factor} if muon else {})
        assert learning_rates(engine) == pytest.approx(rates)
        rows = accumulate(
            engine,
            [ids],
            lambda rows, bad=bad: engine(rows).logits.float().logsumexp(-1).mean() + bad,
        )
        gradients, result = numbers(safe_get_full_grad), apply(rows)
        for name, after in numbers(master).items():
            old, gradient = before[name], gradients[name] * min(1, 0.05 / result.grad_norm)
            if bad:
                expected = old
            elif (
                muon and gradient.ndim > 1 and (".0." in name or ".1." in name)
            ):  # a matrix of one of the two layers
                momenta[name] = 0.95 * momenta[name] + 0.05 * gradient
                update = orthogonal(0.05 * gradient + 0.95 * momenta[name])
                update *= max(1, gradient.shape[0] / gradient.shape[1]) ** 0.5
                expected = old - muon * factor * (update + 0.1 * old)
            elif factor == 1:  # the first step of Adam
                expected = old - 0.1 * (
                    gradient / (abs(gradient) + 1e-6) + 0.1 * old * (gradient.ndim > 1)
                )
            else:
                continue
            np.testing.assert_allclose(after, expected, atol=2e-4, err_msg=name)


@pytest.mark.ranks
def test_below_zero_2_the_number_of_ranks_changes_no_update(tmp_path):
    """Though one matrix lies on both ranks."""
    for ranks in (1, 2):
        out = tmp_path / f"{ranks}.pt"
        words = ("summed_gradients", out, "muon")
        succeed(forked(ranks, "tests/workers/two_ranks.py", *words, timeout=100))
    (_, moved), (_, others) = (torch.load(tmp_path / f"{ranks}.pt") for ranks in (1, 2))
    assert len(moved) == 2 and all(0.1 < part.norm() < 3 for part in moved)  # AdamW: 30
    for part, other in zip(moved, others, strict=True):
        torch.testing.assert_close(part, other, rtol=0, atol=1e-5)
