"""From token losses to a scalar: by hand, against loops, and independent of micro-batches and padding."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ragged import fillings, normal, properties, ragged_mask, row_lengths, widened

from dschat_ppo.algorithms.aggregation import Denominators, aggregate

MODES = ["token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "constant"]


def by_loop(losses, mask, mode, denominators) -> float:
    total = 0.0
    for row, keep in zip(losses.tolist(), mask.tolist(), strict=True):
        kept = [loss for loss, inside in zip(row, keep, strict=True) if inside]
        if kept:
            total += sum(kept) / len(kept) if mode == "seq_mean_token_mean" else sum(kept)
    counts = {"token_mean": denominators.tokens, "constant": denominators.constant}
    return total / counts.get(mode, denominators.rows)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token_mean", (1 + 2 + 6 + 5) / 8),
        ("seq_mean_token_sum", (9 + 5) / 4),
        ("seq_mean_token_mean", (3 + 5) / 4),
        ("constant", (9 + 5) / 40),
    ],
)
def test_every_mode_by_hand(mode, expected):
    losses = torch.tensor([[1.0, 2.0, 6.0], [7.0, 7.0, 7.0], [5.0, 7.0, 7.0]])
    denominators = Denominators(tokens=8, rows=4, constant=40)
    assert aggregate(losses, ragged_mask([3, 0, 1]), mode, denominators).item() == pytest.approx(expected)


@pytest.mark.parametrize("mode", MODES)
@properties
@given(lengths=row_lengths(), seed=st.integers(0, 9))
def test_every_mode_matches_a_loop(mode, lengths, seed):
    mask = ragged_mask(lengths, 5)
    losses, denominators = normal(seed, *mask.shape), Denominators(tokens=31, rows=7, constant=60)
    assert aggregate(losses, mask, mode, denominators).item() == pytest.approx(
        by_loop(losses, mask, mode, denominators), abs=1e-12
    )


@pytest.mark.parametrize(
    ("mode", "rows"),
    [
        ("token_mean", [[1 / 8] * 3, [0, 0, 0], [1 / 8, 0, 0]]),
        ("seq_mean_token_sum", [[1 / 4] * 3, [0, 0, 0], [1 / 4, 0, 0]]),
        ("seq_mean_token_mean", [[1 / 12] * 3, [0, 0, 0], [1 / 4, 0, 0]]),
        ("constant", [[1 / 40] * 3, [0, 0, 0], [1 / 40, 0, 0]]),
    ],
)
def test_the_gradient_is_the_weight_of_each_token(mode, rows):
    mask = ragged_mask([3, 0, 1])
    losses = torch.ones(3, 3).masked_fill(~mask, float("nan")).requires_grad_()
    aggregate(losses, mask, mode, Denominators(8, 4, 40)).backward()
    torch.testing.assert_close(losses.grad, torch.tensor(rows))


@pytest.mark.parametrize("mode", MODES)
def test_nan_in_the_padding_does_not_reach_the_gradient_of_earlier_functions(mode):
    mask = ragged_mask([3, 0, 1])
    leaf = normal(0, 3, 3).requires_grad_()
    aggregate(leaf.masked_fill(~mask, float("nan")) ** 2, mask, mode, Denominators(4, 2, 9)).backward()
    assert torch.isfinite(leaf.grad).all()


@pytest.mark.parametrize("mode", MODES)
@properties
@given(lengths=row_lengths(), filling=fillings, columns=st.integers(0, 3), shuffle=st.randoms(use_true_random=False))
def test_the_loss_does_not_depend_on_padding_or_the_order_of_rows(mode, lengths, filling, columns, shuffle):
    mask, denominators = ragged_mask(lengths, 5), Denominators(31, 7, 60)
    losses = normal(1, *mask.shape)
    expected = aggregate(losses, mask, mode, denominators)
    order = shuffle.sample(range(len(lengths)), len(lengths))
    other = widened(losses.masked_fill(~mask, filling), columns, filling)[order]
    torch.testing.assert_close(aggregate(other, widened(mask, columns, False)[order], mode, denominators), expected)


@pytest.mark.parametrize("mode", MODES)
@properties
@given(lengths=row_lengths(), cut=st.integers(0, 6))
def test_micro_batches_add_up_to_the_whole(mode, lengths, cut):
    mask, denominators = ragged_mask(lengths, 5), Denominators(31, 7, 60)
    whole = normal(2, *mask.shape).requires_grad_()
    parts = whole.detach().clone().requires_grad_()
    loss = aggregate(whole, mask, mode, denominators)
    loss.backward()
    total = 0.0
    for rows in (slice(0, cut), slice(cut, None)):
        part = aggregate(parts[rows], mask[rows], mode, denominators)
        part.backward()
        total += part.item()
    assert total == pytest.approx(loss.item(), abs=1e-12)
    torch.testing.assert_close(parts.grad, whole.grad)
