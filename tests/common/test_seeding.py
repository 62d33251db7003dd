"""Ranks and collectives, without a process group; seeds of random streams, and
`--deterministic`."""

import os

import pytest
import torch

from dschat_ppo.common import dist, heartbeat
from dschat_ppo.common.seeding import seed_everything, seed_this_rank, set_deterministic
from dschat_ppo.rollout.sampling import NUCLEUS_GUESS, SamplingParameters, row_uniforms, sample


@pytest.fixture(autouse=True)
def as_before(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    yield
    torch.use_deterministic_algorithms(False)


def put():
    """An operation without a deterministic algorithm, even on a CPU."""
    return torch.zeros(3).put_(torch.tensor([1]), torch.tensor([2.0]))


def test_an_operation_without_a_deterministic_algorithm_raises():
    set_deterministic(True)
    with pytest.raises(RuntimeError, match="deterministic"):
        put()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert not torch.backends.cudnn.benchmark
    set_deterministic(False)
    assert put().tolist() == [0.0, 2.0, 0.0]


def test_dropout_differs_on_each_rank_and_weights_agree(monkeypatch):
    found = []
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        seed_everything(7)
        found.append(torch.rand(3).tolist())
        seed_this_rank(7)
        found.append(torch.rand(3).tolist())
    assert found[0] == found[2] and found[1] != found[3]


@pytest.mark.parametrize("sampling", [SamplingParameters(), SamplingParameters(top_p=0.9)], ids=str)
def test_sums_of_integers_draw_the_same_tokens(sampling):
    """On a GPU PyTorch refuses to cumulate floats."""
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(300, 3 * NUCLEUS_GUESS, generator=generator)
    uniforms = row_uniforms(torch.arange(300), 1)[:, 0]
    expected, logprobs = sample(logits, sampling, uniforms)
    torch.use_deterministic_algorithms(True)
    found, same_logprobs = sample(logits, sampling, uniforms)
    # a number at the edge of a token falls on either side
    assert (found == expected).float().mean() > 0.99
    assert torch.equal(same_logprobs[found == expected], logprobs[found == expected])


def test_ranks_that_share_rows_have_one_number_of_data(monkeypatch):
    monkeypatch.setenv("RANK", "6")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert (dist.ranks_of_row(), dist.rank_in_row(), dist.data_ranks(), dist.data_rank()) == (
        1,
        0,
        8,
        6,
    )
    made = []
    timeouts = set()

    def new_group(ranks, timeout):
        timeouts.add(timeout)
        made.append(list(ranks))
        return str(list(ranks))

    monkeypatch.setattr(dist.torch_dist, "new_group", new_group)
    try:
        dist.share_rows(2)
        assert (
            dist.ranks_of_row(),
            dist.rank_in_row(),
            dist.data_ranks(),
            dist.data_rank(),
        ) == (2, 0, 4, 3)
        assert made == [[0, 1], [2, 3], [4, 5], [6, 7]]
        assert dist.row_group() == "[6, 7]"
        monkeypatch.setattr(dist, "gather_cat", lambda value: torch.arange(16))
        assert dist.gather_data_cat(torch.empty(2)).tolist() == [0, 1, 4, 5, 8, 9, 12, 13]
        dist.share_rows(1)
        dist.share_rows(2)
        assert len(made) == 4, "groups are made once"
        assert timeouts == {dist.TIMEOUT}
    finally:
        dist.shutdown()
    assert dist.data_ranks() == 8


def test_tensors_of_any_dtype_are_gathered_in_one_collective(monkeypatch):
    """Rank r has the values of rank 0 plus r; odd sizes put each tensor at an odd byte."""

    def all_gather(parts, packed, group):
        calls.append(packed.dtype)
        for rank, part in enumerate(parts):
            part.copy_(
                torch.cat(
                    [value.contiguous().view(-1).view(torch.uint8) for value in of_rank(rank)]
                )
            )

    def of_rank(rank: int) -> list[torch.Tensor]:
        mask = torch.tensor([[True, False, rank == 1]])
        return [
            mask,
            torch.tensor([[2**40 + rank]]),
            torch.full((1, 3), 0.5 + rank),
            torch.tensor([-1 - rank]).char(),
            torch.full((1, 2, 2), 1.5 + rank).bfloat16().transpose(1, 2),
            torch.tensor([1e-300 + rank]).double(),
            torch.empty(1, 0),
        ]

    calls = []
    monkeypatch.setattr(dist.torch_dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist.torch_dist, "get_world_size", lambda group: 3)
    monkeypatch.setattr(dist, "world_size", lambda: 3)
    monkeypatch.setattr(dist.torch_dist, "all_gather", all_gather)
    found = dist.gather_together(of_rank(0))
    expected = [torch.cat(parts) for parts in zip(*map(of_rank, range(3)), strict=True)]
    assert calls == [torch.uint8]
    for value, same in zip(found, expected, strict=True):
        assert value.dtype == same.dtype and value.shape == same.shape and torch.equal(value, same)


@pytest.mark.parametrize(
    ("rank", "order"), [("0", ["block", "barrier"]), ("1", ["barrier", "block"])]
)
def test_the_first_rank_of_a_node_runs_before_the_others(monkeypatch, rank, order):
    """Also if the block of the first one fails: else the others would wait for ever."""
    seen = []
    monkeypatch.setenv("LOCAL_RANK", rank)
    monkeypatch.setattr(dist, "barrier", lambda: seen.append("barrier"))
    with pytest.raises(ZeroDivisionError), dist.main_rank_of_node_first():
        assert heartbeat.watchdog_is_paused()
        seen.append("block")
        raise ZeroDivisionError
    assert seen == order
