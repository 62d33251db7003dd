"""Importance weights and masks of rows and tokens: by hand and against loops."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ragged import fillings, normal, properties, ragged_mask, row_lengths, widened

from dschat_ppo.algorithms.correction import (
    clip_cov_tokens,
    high_entropy_tokens,
    importance_weights,
    kl_cov_tokens,
    off_policy_rows,
    token_covariances,
)

MASK = ragged_mask([3, 0, 1, 2])
NONE = torch.zeros(2, 3, dtype=torch.bool)


def seeded(seed=0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def log_weights(*rows) -> tuple[torch.Tensor, torch.Tensor]:
    """(old, rollout) log-probs with the given ratios; -1 for the generator."""
    rollout = torch.full((len(rows), len(rows[0])), -1.0)
    return rollout + torch.tensor(rows).log(), rollout


@pytest.mark.parametrize(
    ("level", "how", "expected"),
    [
        ("token", "truncate", [[0.1, 0.5, 2.0, 2.0], [1.0, 1.9, 0.0, 0.0]]),
        ("token", "mask", [[0.0, 0.5, 2.0, 0.0], [1.0, 1.9, 0.0, 0.0]]),
        ("sequence", "truncate", [[0.3] * 4, [1.9, 1.9, 0.0, 0.0]]),  # 0.1 * 0.5 * 2 * 3
        ("sequence", "mask", [[0.0] * 4, [1.9, 1.9, 0.0, 0.0]]),  # both bounds apply
    ],
)
def test_importance_weights_by_hand(level, how, expected):
    old, rollout = log_weights([0.1, 0.5, 1.9999, 3.0], [1.0, 1.9, 7.0, 0.01])
    weights = importance_weights(old, rollout, ragged_mask([4, 2]), level, how, cap=2.0)
    torch.testing.assert_close(weights, torch.tensor(expected), rtol=1e-3, atol=0)


@pytest.mark.parametrize(
    ("how", "floor", "expected"),
    [
        ("truncate", 0.3, [0.3, 0.4, 0.6, 2.0]),
        ("truncate", 0.0, [0.1, 0.4, 0.6, 2.0]),
        ("mask", 0.3, [0.0, 0.4, 0.6, 0.0]),
        ("mask", 0.0, [0.1, 0.4, 0.6, 0.0]),
        ("mask", None, [0.0, 0.0, 0.6, 0.0]),
    ],
)
def test_the_floor_of_importance_weights_by_hand(how, floor, expected):
    old, rollout = log_weights([0.1, 0.4, 0.6, 3.0, 0.1])
    weights = importance_weights(old, rollout, ragged_mask([4], 5), "token", how, 2.0, floor)
    torch.testing.assert_close(weights, torch.tensor([[*expected, 0.0]]))


@pytest.mark.parametrize("how", ["truncate", "mask"])
@pytest.mark.parametrize("level", ["token", "sequence"])
@properties
@given(lengths=row_lengths(), seed=st.integers(0, 50), filling=fillings, columns=st.integers(0, 3))
def test_importance_weights_match_a_loop_and_ignore_padding(
    level, how, lengths, seed, filling, columns
):
    mask = ragged_mask(lengths, 5)
    old, rollout = normal(seed, *mask.shape), normal(seed + 1, *mask.shape)
    expected = np.zeros(mask.shape)
    for row, n in enumerate(lengths):
        gaps = (old[row, :n] - rollout[row, :n]).tolist()
        for t in range(n):
            w = math.exp(gaps[t] if level == "token" else sum(gaps))
            expected[row, t] = (
                min(w, 1.7) if how == "truncate" else (w if 1 / 1.7 <= w <= 1.7 else 0.0)
            )
    old, rollout = (
        widened(x.masked_fill(~mask, filling), columns, filling) for x in (old, rollout)
    )
    weights = importance_weights(old, rollout, widened(mask, columns, False), level, how, 1.7)
    np.testing.assert_allclose(weights.numpy(), np.pad(expected, ((0, 0), (0, columns))), rtol=1e-9)


def test_far_off_policy_rows_with_a_negative_advantage_are_dropped():
    # The policy moved away by 0.3 nats a token: (0.2 + 0.4) / 2. Delta 0.25.
    mask = ragged_mask([2, 2, 2, 2, 0, 2], 3)
    moved = torch.tensor([[0.2, 0.4], [0.2, 0.4], [0.1, 0.3], [-0.2, -0.4], [0.2, 0.4], [0.2, 0.4]])
    advantages = torch.tensor(
        [[-1.0, -1.0], [1.0, 1.0], [-1.0, -1.0], [-1.0, -1.0], [-1.0, -1.0], [-2.0, 3.0]]
    )
    old = torch.full((6, 3), -2.0)
    new, advantages = old - widened(moved, 1, float("nan")), widened(advantages, 1, float("nan"))
    keep = off_policy_rows(new.requires_grad_(), old, advantages, mask, delta=0.25)
    assert keep.tolist() == [False, True, True, True, True, True]
    # the mean of a row's advantages decides, and one of 0 keeps it
    advantages[5] = torch.tensor([2.0, -3.0, 0.0])
    assert off_policy_rows(new, old, advantages, mask, 0.25).tolist()[5] is False
    advantages[5] = torch.tensor([3.0, -3.0, 0.0])
    assert off_policy_rows(new, old, advantages, mask, 0.25).tolist()[5] is True


@properties
@given(
    lengths=row_lengths(largest=9),
    share=st.sampled_from([0.01, 0.1, 0.2, 0.25, 0.3, 0.5, 0.7, 0.8, 0.9, 0.99, 1.0]),
    seed=st.integers(0, 50),
    filling=fillings,
)
def test_high_entropy_tokens_match_numpys_quantile(lengths, share, seed, filling):
    mask = ragged_mask(lengths, 9)
    entropies = normal(seed, *mask.shape)
    # a little below, because numpy's own rank may be off by rounding
    threshold = np.quantile(entropies[mask].numpy(), 1 - share) - 1e-12
    chosen = high_entropy_tokens(entropies.masked_fill(~mask, filling), mask, share)
    np.testing.assert_array_equal(chosen.numpy(), mask.numpy() & (entropies.numpy() >= threshold))


@pytest.mark.parametrize(("share", "count"), [(0.3, 3), (0.7, 7), (0.1, 1), (0.9, 9)])
def test_entropy_share_of_eleven_tokens_is_not_lost_to_rounding(share, count):
    # The rank (1 - share) * 10 is whole, so that very token is in.
    assert (
        int(
            high_entropy_tokens(
                torch.arange(11.0).unsqueeze(0), torch.ones(1, 11).bool(), share
            ).sum()
        )
        == count + 1
    )


def test_covariances_by_hand():
    # Over the mask: A = 1, 2, 6 with mean 3; lp = -1, -2, -3 with mean -2.
    advantages = torch.tensor([[1.0, 2.0, math.nan], [6.0, math.inf, 1e30]], requires_grad=True)
    logprobs = torch.tensor([[-1.0, -2.0, math.nan], [-3.0, 1e30, -math.inf]], requires_grad=True)
    covariances = token_covariances(advantages, logprobs, ragged_mask([2, 1], 3))
    assert covariances.tolist() == [[-2.0, 0.0, 0.0], [-3.0, 0.0, 0.0]]
    assert not covariances.requires_grad
    assert not token_covariances(torch.ones(2, 3), torch.ones(2, 3), NONE).any()


def test_clip_cov_samples_a_share_of_all_tokens_among_those_in_range():
    mask = ragged_mask([40, 0, 60])
    covariances = normal(2, 3, 60)
    in_range = mask & (covariances > 0.2) & (covariances < 1.0)
    assert 15 < int(in_range.sum()) < 40
    chosen = clip_cov_tokens(covariances, mask, 0.15, 0.2, 1.0, seeded())
    assert int(chosen.sum()) == 15
    assert not (chosen & ~in_range).any()
    # never more than there are, and at least one
    assert torch.equal(clip_cov_tokens(covariances, mask, 0.9, 0.2, 1.0, seeded()), in_range)
    assert int(clip_cov_tokens(covariances, mask, 1e-6, 0.2, 1.0, seeded()).sum()) == 1
    # the bounds are exclusive
    covariances = torch.tensor([[1.0, 1.5, 5.0, -torch.inf, 6.0, 0.5]])
    chosen = clip_cov_tokens(covariances, torch.ones(1, 6).bool(), 1.0, 1.0, 5.0, seeded())
    assert chosen.tolist() == [[False, True, False, False, False, False]]


def test_clip_cov_samples_uniformly_and_repeats_with_its_seed():
    covariances, mask = torch.full((2, 3), 2.0), ragged_mask([3, 2])
    generator, counts = seeded(), torch.zeros(2, 3)
    for _ in range(500):
        counts += clip_cov_tokens(covariances, mask, 0.4, 1.0, 5.0, generator)
    # two of five tokens each time: 200 +- 11 each
    assert counts[~mask].sum().item() == 0.0
    assert ((counts[mask] - 200).abs() < 60).all()
    first, again = (clip_cov_tokens(covariances, mask, 0.4, 1.0, 5.0, seeded(3)) for _ in range(2))
    assert torch.equal(first, again)


def test_kl_cov_selects_the_highest_covariances():
    covariances = torch.tensor(
        [[0.5, 3.0, -1.0], [9.0, 9.0, 9.0], [2.0, 9.0, math.nan], [1.0, 4.0, math.nan]]
    )
    # the mask holds 0.5, 3, -1, 2, 1, 4
    assert kl_cov_tokens(covariances, MASK, 0.5).nonzero().tolist() == [[0, 1], [2, 0], [3, 1]]
    assert kl_cov_tokens(covariances, MASK, 1e-9).nonzero().tolist() == [[3, 1]]
    assert torch.equal(kl_cov_tokens(covariances, MASK, 1.0), MASK)


def test_a_share_of_tokens_is_rounded_down_without_binary_rounding_errors():
    # 0.29 * 100 is 28.999999999999996 in binary; 0.155 * 100 = 15.5.
    mask = torch.ones(1, 100).bool()
    for share, count in ((0.29, 29), (0.155, 15)):
        assert int(kl_cov_tokens(torch.arange(100.0).unsqueeze(0), mask, share).sum()) == count
        assert int(clip_cov_tokens(torch.ones(1, 100), mask, share, 0, 2, seeded()).sum()) == count


def test_an_empty_mask_selects_nothing():
    values = torch.ones(2, 3)
    assert not high_entropy_tokens(values, NONE, 0.5).any()
    assert not kl_cov_tokens(values, NONE, 0.5).any()
    assert not clip_cov_tokens(values, NONE, 0.5, 0.0, 5.0, seeded()).any()
    assert not importance_weights(values, values, NONE, "sequence", "truncate", 2.0).any()
    assert off_policy_rows(values, values, values, NONE, 0.1).tolist() == [True, True]
