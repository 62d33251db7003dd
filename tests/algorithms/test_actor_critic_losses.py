"""Losses of actor and critic: single tokens by hand, loops over ragged rows, and gradients by
finite differences."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ragged import fillings, normal, properties, ragged_mask, row_lengths

from dschat_ppo.algorithms.actor_critic_losses import (
    POLICY_LOSSES,
    PolicyLossSettings,
    PolicyTerms,
    value_losses,
)

LENGTHS = (5, 3, 0, 1, 4)
SETTINGS = PolicyLossSettings(
    clip_eps_low=0.15,
    clip_eps_high=0.3,
    dual_clip=1.5,
    sapo_tau_positive=0.8,
    sapo_tau_negative=1.7,
    kl_cov_coef=0.6,
)
NAMES = [
    "ppo",
    "gspo",
    "cispo",
    "reinforce",
    "sapo",
    "gmpo",
    "dppo_tv",
    "dppo_kl",
    "clip_cov",
    "kl_cov",
]


def random_terms(lengths=LENGTHS, width=5, seed=0, spread=0.5) -> PolicyTerms:
    mask = ragged_mask(lengths, width)
    old = normal(seed, *mask.shape) - 2
    logprobs = (old + spread * normal(seed + 1, *mask.shape)).requires_grad_()
    return PolicyTerms(
        logprobs, old, normal(seed + 2, *mask.shape), mask, normal(seed + 3, *mask.shape) > 0
    )


def changed(terms: PolicyTerms, **changes) -> PolicyTerms:
    return PolicyTerms(**{**vars(terms), **changes})


def clip(x, low, high):
    return min(max(x, low), high)


def surrogate(ratio, advantage, s: PolicyLossSettings) -> float:
    loss = max(
        -advantage * ratio, -advantage * clip(ratio, 1 - s.clip_eps_low, 1 + s.clip_eps_high)
    )
    if advantage < 0 and s.dual_clip > 0:
        loss = min(loss, -s.dual_clip * advantage)
    return loss


def within(rho, advantage, divergence, s: PolicyLossSettings) -> float:
    away = divergence > s.clip_eps_high if rho > 1 else divergence > s.clip_eps_low
    return 0.0 if away and (rho - 1) * advantage > 0 else -advantage * rho


def binary_kl(p: float, old: float) -> float:
    return old * math.log(old / p) + (1 - old) * math.log((1 - old) / (1 - p))


def smooth(x: float) -> float:
    return abs(x) - 0.005 if abs(x) > 0.01 else x**2 / 0.02


def row_by_loop(
    name, new, old, advantages, selected, s: PolicyLossSettings, weights=None
) -> list[float]:
    """Losses of the tokens of one row, given as lists without padding. `weights` are stopped
    ratios, for cispo."""
    n = len(new)
    logs = [a - b for a, b in zip(new, old, strict=True)]
    ratios = [math.exp(x) for x in logs]
    mean_advantage = sum(advantages) / n
    if name == "gspo":
        return [surrogate(math.exp(sum(logs) / n), a, s) for a in advantages]
    if name == "gmpo":
        sided = [
            min(x, s.clip_eps_high) if mean_advantage > 0 else max(x, -s.clip_eps_low) for x in logs
        ]
        return [-mean_advantage * math.exp(sum(sided) / n)] * n
    losses = []
    for t in range(n):
        a, rho, tau = (
            advantages[t],
            ratios[t],
            s.sapo_tau_positive if advantages[t] > 0 else s.sapo_tau_negative,
        )
        p, p_old = (min(math.exp(x), 1 - 1e-8) for x in (new[t], old[t]))
        losses.append(
            {
                "ppo": surrogate(rho, a, s),
                "cispo": -clip(
                    weights[t] if weights else rho, 1 - s.clip_eps_low, 1 + s.clip_eps_high
                )
                * a
                * new[t],
                "reinforce": -a * new[t],
                "sapo": -a * 4 / tau / (1 + math.exp(-tau * (rho - 1))),
                "dppo_tv": within(rho, a, abs(math.exp(new[t]) - math.exp(old[t])), s),
                "dppo_kl": within(rho, a, binary_kl(p, p_old), s),
                "clip_cov": 0.0 if selected[t] else surrogate(rho, a, s),
                "kl_cov": -a * rho + (s.kl_cov_coef * smooth(logs[t]) if selected[t] else 0.0),
            }[name]
        )
    return losses


def by_loop(name, terms: PolicyTerms, settings, new=None, weights=None) -> np.ndarray:
    arrays = (
        terms.logprobs if new is None else new,
        terms.old_logprobs,
        terms.advantages,
        terms.selected,
    )
    losses = np.zeros(terms.mask.shape)
    for row, n in enumerate(terms.mask.sum(dim=1).tolist()):
        if n:
            stopped = None if weights is None else weights[row, :n].tolist()
            losses[row, :n] = row_by_loop(
                name, *(x[row, :n].tolist() for x in arrays), settings, stopped
            )
    return losses


def one(name, ratio, advantage, settings=None, selected=None, logprob=-1.0):
    """(loss, gradient, ratio, clipped) of a row of one token."""
    leaf = torch.tensor([[logprob]], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([[logprob - math.log(ratio)]], dtype=torch.float64)
    chosen = None if selected is None else torch.tensor([[selected]])
    terms = PolicyTerms(
        leaf, old, torch.tensor([[advantage]], dtype=torch.float64), torch.tensor([[True]]), chosen
    )
    result = POLICY_LOSSES[name](terms, settings or PolicyLossSettings())
    result.losses.sum().backward()
    return result.losses.item(), leaf.grad.item(), result.ratio.item(), result.clipped.item()


@pytest.mark.parametrize("name", NAMES)
@properties
@given(
    lengths=row_lengths(),
    seed=st.integers(0, 99),
    dual_clip=st.sampled_from([0.0, 1.1, 3.0]),
    filling=fillings,
)
def test_losses_match_a_loop_whatever_the_padding_holds(name, lengths, seed, dual_clip, filling):
    terms = random_terms(lengths, seed=seed)
    outside, settings = (
        ~terms.mask,
        PolicyLossSettings(**{**vars(SETTINGS), "dual_clip": dual_clip}),
    )
    names = ("logprobs", "old_logprobs", "advantages")
    filled = {name: getattr(terms, name).detach().masked_fill(outside, filling) for name in names}
    leaf = filled["logprobs"].requires_grad_()
    result = POLICY_LOSSES[name](
        changed(terms, **filled, selected=terms.selected | outside), settings
    )
    np.testing.assert_allclose(
        result.losses.detach().numpy(), by_loop(name, terms, settings), atol=1e-12
    )
    result.losses.sum().backward()
    assert (
        not leaf.grad[outside].any()
        and result.ratio[outside].eq(1).all()
        and not result.clipped[outside].any()
    )
    assert (
        result.losses.requires_grad
        and not result.ratio.requires_grad
        and not result.clipped.requires_grad
    )


PENALTY = 0.6 * (math.log(2) - 0.005)


@pytest.mark.parametrize(
    (
        "name",
        "ratio",
        "advantage",
        "selected",
        "expected",
    ),  # expected: loss, gradient, ratio, clipped
    [
        ("ppo", 1.5, 2.0, None, (-2.6, 0.0, 1.5, True)),  # the gain stops at 1.3
        ("ppo", 1.4, -2.0, None, (2.8, 2.8, 1.4, False)),  # a loss is not capped at 1.3
        ("gspo", 1.7, -2.0, None, (3.0, 0.0, 1.7, True)),  # but at 1.5 by the dual clip
        ("gspo", 0.5, 2.0, None, (-1.0, -1.0, 0.5, False)),
        ("clip_cov", 0.5, -2.0, False, (1.7, 0.0, 0.5, True)),  # 0.85
        ("ppo", 1.7, 0.0, None, (0.0, 0.0, 1.7, False)),
        ("reinforce", 3.0, 2.0, None, (2.0, -2.0, 3.0, False)),
        # The weight is capped at 1.3 and 0.85, on both signs, and keeps its gradient.
        ("cispo", 1.1, 2.0, None, (2.2, -2.2, 1.1, False)),
        ("cispo", 3.0, 2.0, None, (2.6, -2.6, 3.0, True)),
        ("cispo", 0.1, -2.0, None, (-1.7, 1.7, 0.1, True)),
        ("cispo", 3.0, 0.0, None, (0.0, 0.0, 3.0, False)),
        # At ratio 1 the sigmoid is 1/2 and its slope 1/4: loss -2 A / tau, gradient -A.
        ("sapo", 1.0, 3.0, None, (-6 / 0.8, -3.0, 1.0, False)),
        ("sapo", 1.0, -3.0, None, (6 / 1.7, 3.0, 1.0, False)),
        # Ratio 2, A = 3: -6 and 0.6 (log 2 - 0.005); slope -6 + 0.6. Never clipped.
        ("kl_cov", 2.0, 3.0, True, (-6 + PENALTY, -5.4, 2.0, False)),
        ("kl_cov", 2.0, 3.0, False, (-6.0, -6.0, 2.0, False)),
        ("kl_cov", 0.5, 3.0, True, (-1.5 + PENALTY, -2.1, 0.5, False)),
        # A selected token has no loss; it counts as clipped where it had one.
        ("clip_cov", 1.1, 3.0, True, (0.0, 0.0, 1.1, True)),
        ("clip_cov", 1.1, 0.0, True, (0.0, 0.0, 1.1, False)),
    ],
)
def test_a_token_by_hand(name, ratio, advantage, selected, expected):
    assert one(name, ratio, advantage, SETTINGS, selected) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("name", "old", "new", "advantage", "left_out"),
    [
        ("dppo_tv", 0.40, 0.75, 2.0, True),  # by 0.35, above 0.3
        ("dppo_tv", 0.40, 0.65, 2.0, False),
        ("dppo_tv", 0.40, 0.75, -1.0, False),  # A asks for the way back
        ("dppo_tv", 0.40, 0.20, -1.0, True),  # by 0.2, above 0.15
        ("dppo_tv", 0.40, 0.30, -1.0, False),
        ("dppo_tv", 0.75, 0.40, 2.0, False),
        ("dppo_tv", 0.40, 0.75, 0.0, False),
        ("dppo_tv", 0.001, 0.01, 2.0, False),  # ten times as likely
        ("dppo_kl", 0.50, 0.90, 2.0, True),  # (log(5 / 9) + log 5) / 2 = 0.511
        ("dppo_kl", 0.50, 0.80, 2.0, False),  # (log(5 / 8) + log(5 / 2)) / 2 = 0.223
        ("dppo_kl", 0.50, 0.20, -1.0, True),  # (log(5 / 2) + log(5 / 8)) / 2, above 0.15
        ("dppo_kl", 0.50, 0.30, -1.0, False),  # (log(5 / 3) + log(5 / 7)) / 2 = 0.087
        ("dppo_kl", 0.50, 0.90, -1.0, False),
        ("dppo_kl", 0.50, 0.10, 1.0, False),
    ],
)
def test_dppo_leaves_out_tokens_that_moved_too_far_the_way_of_their_advantage(
    name, old, new, advantage, left_out
):
    found = one(name, new / old, advantage, SETTINGS, logprob=math.log(new))
    kept = -advantage * new / old
    assert found == pytest.approx(
        (0.0, 0.0, new / old, True) if left_out else (kept, kept, new / old, False)
    )


@pytest.mark.parametrize(
    ("old", "new", "left_out"),
    [
        (0.0, 0.0, False),
        (-1e-7, -1e-9, False),
        (-1e-4, -1e-6, False),
        (-100.0, -90.0, False),
        (-0.7, 0.0, True),
        (-0.7, -1e-7, True),
        (-1.2, -100.0, True),
        (0.0, -3.0, True),
    ],
)
def test_the_binary_kl_is_finite_where_a_probability_rounds_to_one_or_zero(old, new, left_out):
    leaf = torch.tensor([[new]], requires_grad=True)  # fp32
    advantage = torch.tensor([[1.0 if new > old else -1.0]])
    terms = PolicyTerms(leaf, torch.tensor([[old]]), advantage, torch.tensor([[True]]))
    result = POLICY_LOSSES["dppo_kl"](terms, SETTINGS)
    result.losses.sum().backward()
    assert result.clipped.item() is left_out
    assert result.losses.isfinite().all() and bool(leaf.grad) is not left_out


@pytest.mark.parametrize("name", NAMES)
def test_rounding_of_the_old_logprobs_does_not_change_a_gradient(name):
    """Two passes of the same weights differ by 2e-6, in either direction."""
    terms, gradients = random_terms(spread=0.0), []
    for noise in (-2e-6, 0.0, 2e-6):
        leaf = terms.logprobs.detach().clone().requires_grad_()
        moved = changed(terms, logprobs=leaf, old_logprobs=terms.old_logprobs + noise)
        POLICY_LOSSES[name](moved, SETTINGS).losses.sum().backward()
        gradients.append(leaf.grad)
    for gradient in (gradients[0], gradients[2]):
        torch.testing.assert_close(gradient, gradients[1], atol=2e-4, rtol=1e-5)


def test_gmpo_by_hand_clips_log_ratios_on_the_side_of_the_gain():
    logs = torch.tensor([[0.9, -0.9, 0.1]] * 3, dtype=torch.float64)
    advantages = torch.tensor([[2.0] * 3, [-2.0] * 3, [0.0] * 3], dtype=torch.float64)
    terms = PolicyTerms(logs, torch.zeros(3, 3), advantages, torch.ones(3, 3).bool())
    result = POLICY_LOSSES["gmpo"](terms, SETTINGS)
    up, down = math.exp((0.3 - 0.9 + 0.1) / 3), math.exp((0.9 - 0.15 + 0.1) / 3)
    assert result.losses[0].tolist() == pytest.approx([-2 * up] * 3)
    assert result.losses[1].tolist() == pytest.approx([2 * down] * 3)
    assert result.ratio[:2, 0].tolist() == pytest.approx([up, down])
    assert result.clipped.tolist() == [[True, False, False], [False, True, False], [False] * 3]


def slopes(total, new: np.ndarray, step=1e-6) -> np.ndarray:
    """Central differences of a function of an array of log-probs."""
    result = np.zeros_like(new)
    for place in np.ndindex(*new.shape):
        up, down = new.copy(), new.copy()
        up[place] += step
        down[place] -= step
        result[place] = (total(up) - total(down)) / (2 * step)
    return result


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", [name for name in NAMES if name != "gspo"])
def test_gradient_matches_finite_differences(name, seed):
    terms = random_terms(seed=10 * seed)
    POLICY_LOSSES[name](terms, SETTINGS).losses.sum().backward()
    start = terms.logprobs.detach().numpy()
    weights = np.exp(start - terms.old_logprobs.numpy())  # cispo's stopped weights

    def total(new):
        return by_loop(
            name, terms, SETTINGS, torch.from_numpy(new), torch.from_numpy(weights)
        ).sum()

    np.testing.assert_allclose(terms.logprobs.grad.numpy(), slopes(total, start), atol=1e-7)
    assert not terms.logprobs.grad[~terms.mask].any()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("log_ratio", [300.0, -300.0])
def test_extreme_log_ratios_stay_finite(name, log_ratio):
    for advantage in (1.0, -1.0):
        leaf = torch.full((1, 2), log_ratio, requires_grad=True)
        terms = PolicyTerms(
            leaf,
            torch.zeros(1, 2),
            torch.full((1, 2), advantage),
            torch.ones(1, 2).bool(),
            torch.ones(1, 2).bool(),
        )
        result = POLICY_LOSSES[name](terms, PolicyLossSettings())
        result.losses.sum().backward()
        assert torch.isfinite(result.losses).all()
        assert torch.isfinite(leaf.grad).all()
        if name != "gmpo":
            assert result.ratio[0, 0].item() == pytest.approx(
                math.exp(math.copysign(20, log_ratio))
            )


# The value loss


def value_by_hand(value, old, target, clip_eps) -> float:
    errors = [(value - target) ** 2]
    if clip_eps > 0:
        errors.append((clip(value, old - clip_eps, old + clip_eps) - target) ** 2)
    return 0.5 * max(errors)


@pytest.mark.parametrize("clip_eps", [0.0, 0.2, 1.0])
def test_values_of_tokens_match_a_loop_and_finite_differences(clip_eps):
    """Padding holds NaN and moves neither a loss nor a gradient."""
    mask, step = ragged_mask((5, 3, 0, 1), 5), 1e-6
    old = normal(0, 4, 5)
    new, old, returns = (
        x.masked_fill(~mask, math.nan) for x in (old + 0.5 * normal(1, 4, 5), old, normal(2, 4, 5))
    )
    new.requires_grad_()
    losses, clipped = value_losses(new, old, returns, mask, clip_eps)
    losses.sum().backward()
    assert not losses[~mask].any() and not clipped[~mask].any() and not new.grad[~mask].any()
    for place in mask.nonzero().tolist():
        value, before, target = (x[tuple(place)].item() for x in (new, old, returns))
        loss = value_by_hand(value, before, target, clip_eps)
        up, down = (value_by_hand(value + move, before, target, clip_eps) for move in (step, -step))
        assert losses[tuple(place)].item() == pytest.approx(loss, abs=1e-12)
        assert new.grad[tuple(place)].item() == pytest.approx((up - down) / (2 * step), abs=1e-7)
        assert clipped[tuple(place)].item() is (loss > 0.5 * (value - target) ** 2 + 1e-12)
