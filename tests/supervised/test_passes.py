"""Micro-batches of steps 1 and 2 in passes of few tokens: which rows a pass has, and that an
optimizer step is the same up to rounding."""

import numpy as np
import pytest
import torch
from datasets import Dataset
from one_rank import one_rank  # noqa: F401
from test_packed_training import config_for, trainer_of

from dschat_ppo.common import dist
from dschat_ppo.config.batch_plan import CPU_TOKENS
from dschat_ppo.supervised import passes as module
from dschat_ppo.supervised.passes import Passes, filled_up, passes_for

pytestmark = pytest.mark.usefixtures("one_rank")
ROWS = Dataset.from_dict({"prompt_ids": [[1] * 3] * 4, "answers": [[[1] * n] for n in range(1, 5)]})


@pytest.mark.parametrize(
    ("micro_batches", "budget", "expected"),
    [
        ([[0, 1, 2, 3]], 22, [[0, 1, 2, 3]]),  # 4 + 5 + 6 + 7 tokens: as it is, in its order
        ([[0, 1, 2, 3]], 21, [[3, 2, 1], [0]]),  # 3 x 7, then 4
        ([[0, 3], [2, 1]], 11, [[0, 3], [2, 1]]),
        ([[0, 3], [2, 1]], 10, [[3], [0], [2], [1]]),
        ([[0, 1]], 3, [[1], [0]]),  # a longer row is a pass by itself
        ([[3, -1]], 7, [[3], [-1]]),  # a padding row is as long as row 0
        ([[-1]], 7, [[-1]]),
    ],
)
def test_a_micro_batch_above_the_budget_is_divided_by_length(micro_batches, budget, expected):
    tokens = np.array([4, 5, 6, 7])
    assert Passes(tokens, budget).divide(micro_batches) == expected


def test_a_cpu_divides_by_the_tokens_of_step_3_and_a_gpu_not_at_all(monkeypatch):
    found = passes_for(ROWS, 100)
    assert found.tokens.tolist() == [4, 5, 6, 7] and found.budget == CPU_TOKENS
    assert passes_for(ROWS, 5000).budget == 5000, "one row of the most tokens is always possible"
    pairs = ROWS.map(lambda row: {"answers": row["answers"] * 2})
    assert passes_for(pairs, 5000).budget == 10000
    monkeypatch.setattr(dist, "world_size", lambda: 4)
    assert passes_for(ROWS, 100).budget == 2 * CPU_TOKENS, "ranks exchange gradients in each pass"
    monkeypatch.setattr(dist, "on_gpu", lambda: True)
    assert passes_for(ROWS, 100) is None


def test_a_rank_with_fewer_passes_runs_padding_rows(monkeypatch):
    monkeypatch.setattr(module.dist, "all_reduce", lambda value, op: torch.tensor(3))
    found = filled_up([[5, 4]], ["batch"], lambda indices: f"rows {indices}")
    assert found == ([[5, 4], [-1], [-1]], ["batch", "rows [-1]", "rows [-1]"])


def test_a_step_in_passes_is_that_of_whole_micro_batches(tmp_path):
    words = ("--per_device_train_batch_size", "6", "--learning_rate", "1e-3", "--dtype", "fp32")
    divided, whole = (trainer_of(config_for(tmp_path, *words)) for _ in range(2))
    divided.passes = Passes(divided.passes.tokens, 12)
    in_passes, together = next(divided.steps_left()), next(whole.steps_left())
    assert len(in_passes) > len(together) == 2
    assert sorted(sum(in_passes, [])) == sorted(sum(together, []))
    found, expected = divided.train_step(in_passes), whole.train_step(together)
    for name in ("loss", "grad_norm", "tokens", "samples", "counted"):
        assert found[name] == pytest.approx(expected[name], rel=1e-5), name
