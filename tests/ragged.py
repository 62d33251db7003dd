"""Ragged batches for tests of formulas: masks, values for the padding, and generated row
lengths."""

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st

from dschat_ppo.algorithms.advantage_estimators import AdvantageInputs

properties = settings(max_examples=20, deadline=None, derandomize=True, database=None)
fillings = st.sampled_from([float("nan"), float("inf"), 1e30, -3.0])


def ragged_mask(lengths, width=None) -> torch.Tensor:
    """(B, R) bool, right-padded."""
    width = max(lengths) if width is None else width
    return torch.arange(width) < torch.tensor(lengths).unsqueeze(1)


def gapped_mask() -> torch.Tensor:
    """(5, 6) bool with gaps inside rows, one row without a True token and one with a single one."""
    rows = ["110101", "000000", "001000", "111111", "011100"]
    return torch.tensor([[digit == "1" for digit in row] for row in rows])


def normal(seed: int, *shape: int, dtype=torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def inputs_of(mask, rewards=None, groups=None, **changes) -> AdvantageInputs:
    """Inputs of an advantage estimator for rows of this mask."""
    rows = mask.shape[0]
    columns = {
        "rewards": normal(0, *mask.shape) if rewards is None else rewards,
        "values": normal(1, *mask.shape),
        "response_mask": mask,
        "groups": torch.tensor(groups)
        if groups is not None
        else torch.zeros(rows, dtype=torch.int64),
        "baselines": normal(2, rows),
        "gamma": 0.9,
        "lam": 0.8,
        "source_scores": normal(3, rows, 2),
        "source_weights": torch.tensor([0.5, 2.0]).double(),
    }
    return AdvantageInputs(**{**columns, **changes})


def widened(values: torch.Tensor, columns: int, filling) -> torch.Tensor:
    """(B, R) -> (B, R + columns), padded at the right with `filling`."""
    return torch.cat(
        [values, torch.full((values.shape[0], columns), filling, dtype=values.dtype)], dim=1
    )


@st.composite
def row_lengths(draw, largest=5, rows=6) -> list[int]:
    """Lengths of one to `rows` rows, zeros among them; at least one row has a token."""
    lengths = draw(st.lists(st.integers(0, largest), min_size=1, max_size=rows))
    return lengths if any(lengths) else [*lengths, 1]


def returns_by_loop(rewards: np.ndarray, mask: np.ndarray, gamma: float) -> np.ndarray:
    """(B, R) each token's reward plus the discounted rewards of the row's later True tokens."""
    returns = np.zeros(rewards.shape)
    for row in range(rewards.shape[0]):
        columns = [t for t in range(rewards.shape[1]) if mask[row, t]]
        for i, t in enumerate(columns):
            returns[row, t] = sum(gamma**k * rewards[row, s] for k, s in enumerate(columns[i:]))
    return returns
