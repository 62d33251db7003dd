"""Seeds of random streams, and `--deterministic`: set before the ranks join."""

import os

import pytest
import torch

from dschat_ppo.common.seeding import seed_everything, seed_this_rank, set_deterministic
from dschat_ppo.config.cli import parse
from dschat_ppo.rollout.sampling import NUCLEUS_GUESS, SamplingParameters, row_uniforms, sample
from dschat_ppo.run import session


class RanksJoinError(Exception):
    """Raised where the ranks join: from there on a GPU may be in use."""


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


@pytest.mark.parametrize("words", [["--deterministic"], []])
def test_it_is_set_before_the_ranks_join(words, monkeypatch, tmp_path):
    def join(_folder):
        raise RanksJoinError(torch.are_deterministic_algorithms_enabled(), "CUBLAS_WORKSPACE_CONFIG" in os.environ)

    monkeypatch.setattr(session, "init_process_group", join)
    needed = ["--model_name_or_path", "m", "--data_path", "d", "--output_dir", str(tmp_path / "out")]
    with pytest.raises(RanksJoinError) as found:
        session.begin_run(parse("sft", [*needed, *words]))
    assert found.value.args == (bool(words), bool(words))


@pytest.mark.parametrize("sampling", [SamplingParameters(), SamplingParameters(top_p=0.9)], ids=str)
def test_sums_of_integers_draw_the_same_tokens(sampling):
    """On a GPU PyTorch refuses to cumulate floats."""
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(300, 3 * NUCLEUS_GUESS, generator=generator)
    uniforms = row_uniforms(torch.arange(300), 1)[:, 0]
    expected, logprobs = sample(logits, sampling, uniforms)
    torch.use_deterministic_algorithms(True)
    found, same_logprobs = sample(logits, sampling, uniforms)
    assert (found == expected).float().mean() > 0.99  # a number at the edge of a token falls on either side
    assert torch.equal(same_logprobs[found == expected], logprobs[found == expected])
