"""pass@k against an enumeration of all choices of k answers."""

from itertools import combinations

import pytest
import torch

from dschat_ppo.algorithms.pass_at_k import pass_at_k


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_pass_at_k_is_the_share_of_choices_with_a_right_answer(k):
    passed = torch.tensor([[1, 0, 0, 1, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 1]]).bool()
    expected = []
    for row in passed.tolist():
        choices = list(combinations(row, k))
        expected.append(sum(any(choice) for choice in choices) / len(choices))
    assert pass_at_k(passed, k).tolist() == pytest.approx(expected, abs=1e-12)
