"""What the limits of AdamW's flags are for: inside them no finite gradient makes a weight that is not finite."""

import math

import pytest
import torch

from dschat_ppo.config.schema import LARGEST_BETA, SMALLEST_EPSILON, SMALLEST_NORM, RunFlags, SupervisedFlags
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
    """Of a weight by torch's own AdamW, in units of the learning rate (a power of two that rounds nothing)."""
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
def test_an_update_is_bounded_inside_the_limits(gradients, betas):
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
def test_beyond_the_limits_it_is_not(betas, epsilon, gradients, too_large):
    assert not largest_update(gradients, betas, epsilon) < too_large
    with pytest.raises(UserError, match=r"^--adam_(epsilon|beta2) must be "):
        RunFlags(output_dir="o", adam_beta1=betas[0], adam_beta2=betas[1], adam_epsilon=epsilon)


def fit(**changes) -> SupervisedFlags:
    return SupervisedFlags(model_name_or_path="m", **changes)


def test_a_decay_shrinks_weights_and_no_more():
    fit(learning_rate=0.5, weight_decay=1.99)
    for rate, decay in ((0.5, 2.0), (1.0, 1.0), (1e-3, 1e300)):
        with pytest.raises(UserError, match=r"^--learning_rate x --weight_decay must be below 1, got "):
            fit(learning_rate=rate, weight_decay=decay)


def test_gradients_are_cut_to_something_or_not_at_all():
    for norm in (0.0, SMALLEST_NORM, 1e300):
        assert fit(max_grad_norm=norm).max_grad_norm == norm
    with pytest.raises(UserError, match=r"^--max_grad_norm must be 0 \(off\) or at least 1e-06, got 1e-07"):
        fit(max_grad_norm=1e-7)


def test_the_largest_learning_rate():
    assert fit(learning_rate=1.0).learning_rate == 1.0
    with pytest.raises(UserError, match=r"^--learning_rate must be at most 1, got 1e\+30"):
        fit(learning_rate=1e30)
