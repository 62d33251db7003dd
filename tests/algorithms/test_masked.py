"""Sums and whitening over masked tokens, against numpy."""

import numpy as np
import torch

from dschat_ppo.algorithms.aggregation import masked_sum, masked_whiten, row_means, zero_outside


def uneven_mask() -> torch.Tensor:
    return torch.arange(5) < torch.tensor([5, 3, 0, 1]).unsqueeze(1)


def test_sum_takes_masked_tokens_only():
    values = torch.tensor([[1.0, 2.0, 100.0], [4.0, 100.0, 100.0]])
    mask = torch.tensor([[True, True, False], [True, False, False]])
    assert masked_sum(values, mask).item() == 7.0


def test_sum_ignores_nan_and_infinity_outside_the_mask():
    values = torch.tensor([[1.0, float("nan")], [float("inf"), 2.0]])
    mask = torch.tensor([[True, False], [False, True]])
    assert masked_sum(values, mask).item() == 3.0


def test_whitening_by_hand():
    # Tokens 1, 2, 3, 6: mean 3, population variance (4 + 1 + 0 + 9) / 4 = 3.5.
    values = torch.tensor([[1.0, 2.0, 9.0], [3.0, 6.0, 9.0]])
    mask = torch.tensor([[True, True, False], [True, True, False]])
    expected = torch.tensor([[-2.0, -1.0, 0.0], [0.0, 3.0, 0.0]]) / 3.5**0.5
    torch.testing.assert_close(masked_whiten(values, mask), expected)


def test_whitening_matches_numpy_over_an_uneven_mask():
    values = torch.randn(4, 5, generator=torch.Generator().manual_seed(0)) * 3 + 7
    mask = uneven_mask()
    kept = values.numpy().astype(np.float64)[mask.numpy()]
    white = masked_whiten(values, mask)
    np.testing.assert_allclose(white.numpy()[mask.numpy()], (kept - kept.mean()) / kept.std(), rtol=1e-4, atol=1e-5)
    assert white[~mask].abs().max().item() == 0.0


def test_whitening_of_small_differences_of_large_values_matches_numpy():
    # Advantages around a million, 1/16 apart: a mean in fp32 is off by more than their spread.
    steps = torch.randint(-8, 9, (200, 50), generator=torch.Generator().manual_seed(0))
    values, mask = 1e6 + steps / 16, torch.ones(200, 50, dtype=torch.bool)
    wide = values.numpy().astype(np.float64)
    white = masked_whiten(values, mask)
    assert white.dtype == torch.float32
    np.testing.assert_allclose(white.numpy(), (wide - wide.mean()) / np.sqrt(wide.var() + 1e-8), rtol=1e-6, atol=1e-6)
    assert abs(float(white.double().mean())) < 1e-6


def test_whitening_equal_tokens_or_none_gives_zeros():
    assert masked_whiten(torch.full((2, 3), 4.0), torch.ones(2, 3, dtype=torch.bool)).abs().max().item() == 0.0
    assert masked_whiten(torch.randn(2, 3), torch.zeros(2, 3, dtype=torch.bool)).abs().max().item() == 0.0


def test_zero_outside_cuts_values_and_gradient():
    values = torch.tensor([[1.0, float("nan")], [float("inf"), 2.0]], requires_grad=True)
    kept = zero_outside(values, torch.tensor([[True, False], [False, True]]))
    (kept**2).sum().backward()
    assert kept.tolist() == [[1.0, 0.0], [0.0, 2.0]]
    assert values.grad.tolist() == [[2.0, 0.0], [0.0, 4.0]]


def test_row_means_by_hand():
    values = torch.tensor([[1.0, 2.0, float("nan")], [5.0, 5.0, 5.0], [4.0, float("inf"), 9.0]])
    mask = torch.tensor([[True, True, False], [False, False, False], [True, False, True]])
    assert row_means(values, mask).tolist() == [1.5, 0.0, 6.5]
