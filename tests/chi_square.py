"""Counts against probabilities."""

import numpy as np


def check_chi_square(counts: np.ndarray, probabilities: np.ndarray) -> None:
    """Fails a right sampler less than once in a million seeds: mean + 6 deviations, and nothing impossible."""
    assert counts[probabilities == 0].sum() == 0
    expected = probabilities * counts.sum()
    common = expected >= 5  # rarer ones are one class
    observed = np.append(counts[common], counts[~common].sum())
    expected = np.append(expected[common], expected[~common].sum())
    observed, expected = observed[expected > 0], expected[expected > 0]
    freedom = max(1, len(observed) - 1)
    statistic = ((observed - expected) ** 2 / expected).sum()
    assert statistic < freedom + 6 * np.sqrt(2 * freedom) + 10
