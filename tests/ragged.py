"""Rows of uneven length for tests of formulas: masks, fillings of the padding, and drawn batches."""

import torch
from hypothesis import settings
from hypothesis import strategies as st

properties = settings(max_examples=40, deadline=None, derandomize=True, database=None)
fillings = st.sampled_from([float("nan"), float("inf"), 1e30, -3.0])


def ragged_mask(lengths, width=None) -> torch.Tensor:
    """(B, R) bool, right-padded."""
    width = max(lengths) if width is None else width
    return torch.arange(width) < torch.tensor(lengths).unsqueeze(1)


def gapped_mask() -> torch.Tensor:
    """Rows of which the True tokens are not in one run, one without any, one with a single one."""
    rows = ["110101", "000000", "001000", "111111", "011100"]
    return torch.tensor([[letter == "1" for letter in row] for row in rows])


def normal(seed: int, *shape: int, dtype=torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def widened(values: torch.Tensor, columns: int, filling) -> torch.Tensor:
    """More columns of padding at the right."""
    return torch.cat([values, torch.full((values.shape[0], columns), filling, dtype=values.dtype)], dim=1)


@st.composite
def row_lengths(draw, largest=5, rows=6) -> list[int]:
    """Lengths of one to `rows` rows, zeros among them; at least one row has a token."""
    lengths = draw(st.lists(st.integers(0, largest), min_size=1, max_size=rows))
    return lengths if any(lengths) else [*lengths, 1]
