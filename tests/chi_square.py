"""Chi-square test of counts against probabilities."""

import numpy as np


def check_chi_square(counts: np.ndarray, probabilities: np.ndarray) -> None:
    """Fail if counts do not fit: mean + 6 deviations, which a correct sampler exceeds less than once in 10^6 seeds."""
    assert counts[probabilities == 0].sum() == 0
    expected = probabilities * counts.sum()
    common = expected >= 5  # rarer outcomes form one class
    observed = np.append(counts[common], counts[~common].sum())
    expected = np.append(expected[common], expected[~common].sum())
    observed, expected = observed[expected > 0], expected[expected > 0]
    freedom = max(1, len(observed) - 1)
    statistic = ((observed - expected) ** 2 / expected).sum()
    assert statistic < freedom + 6 * np.sqrt(2 * freedom) + 10
