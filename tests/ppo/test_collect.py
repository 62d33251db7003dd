"""When the collection of a PPO step is given up: after generation, and after the rewards."""

from types import SimpleNamespace

import pytest
import torch

from dschat_ppo.data.sampler import IndexStream
from dschat_ppo.errors import RolloutCancelled
from dschat_ppo.ppo import collect as collector_module
from dschat_ppo.ppo.collect import ExperienceCollector
from dschat_ppo.rewards.reward_source import RewardFunctionError, RewardServiceError


class Asked:
    """A boundary that is asked to stop from its question `number` on."""

    def __init__(self, number):
        self.number, self.seen = number, 0

    def save_if_due(self):
        raise AssertionError("inside a rollout nothing is saved")

    def stop_requested(self):
        self.seen += 1
        return self.seen >= self.number


@pytest.fixture(autouse=True)
def _noted_gathering(monkeypatch):
    monkeypatch.setattr(collector_module, "gather_rows", lambda rows: rows.did.append("gather") or rows)


def collector_of(rounds: int) -> tuple[ExperienceCollector, list[str]]:
    """One whose pool wants `rounds` rounds (0: no pool), and what it does."""
    did: list[str] = []
    collector = object.__new__(ExperienceCollector)
    collector.plan = SimpleNamespace(prompts_per_rank=2, samples=1)
    collector.stream, collector.rounds = IndexStream(8, 1), rounds
    collector.rollout = lambda indices, step, number=0: did.append(f"rollout {number}")
    rows = SimpleNamespace(scores=torch.zeros(2), did=did)
    collector.score = lambda rollout, indices, first, step: did.append("score") or rows
    collector.judge = SimpleNamespace(count_failed_rows=lambda: 2)
    collector.pool = None
    if rounds:
        pool = SimpleNamespace(missing=2, kept_share=1.0, add=lambda rows: None, take=lambda: (rows, 0))
        collector.pool = pool
    return collector, did


@pytest.mark.parametrize(
    ("rounds", "asked", "expected"),
    [
        (0, 1, ["rollout 0"]),
        (0, 2, ["rollout 0", "score", "gather"]),
        (2, 2, ["rollout 0", "score", "gather", "rollout 1"]),
        (2, 3, ["rollout 0", "score", "gather", "rollout 1", "score", "gather"]),
    ],
)
def test_it_is_given_up_before_and_after_scoring(rounds, asked, expected):
    collector, did = collector_of(rounds)
    with pytest.raises(RolloutCancelled):
        collector.collect(1, Asked(asked))
    assert did == expected


@pytest.mark.parametrize(("asked", "raised"), [(2, RolloutCancelled), (99, RewardServiceError)])
def test_a_service_that_ends_with_the_run_does_not_keep_it_from_being_saved(asked, raised):
    collector, did = collector_of(0)

    def score(*_):
        raise RewardServiceError("no answer")

    collector.score = score
    with pytest.raises(raised):
        collector.collect(1, Asked(asked))
    assert did == ["rollout 0"]


@pytest.mark.parametrize(("asked", "raised"), [(2, RolloutCancelled), (99, RewardFunctionError)])
@pytest.mark.parametrize("rounds", [0, 2])
def test_a_function_that_fails_on_all_of_the_first_round_ends_the_run_unless_it_is_to_stop(rounds, asked, raised):
    collector, did = collector_of(rounds)

    def count_failed_rows():
        raise RewardFunctionError("failed on every one")

    collector.judge.count_failed_rows = count_failed_rows
    with pytest.raises(raised):
        collector.collect(1, Asked(asked))
    assert did == ["rollout 0", "score", "gather"]


@pytest.mark.parametrize("rounds", [0, 2])
def test_without_a_request_the_rows_are_handed_over_with_the_faults_of_all_rounds(rounds):
    collector, did = collector_of(rounds)
    rows, metrics = collector.collect(1, Asked(99))
    assert rows.scores.tolist() == [0, 0] and metrics["reward/function_faults"] == 2 * max(1, rounds)
    assert did[:3] == ["rollout 0", "score", "gather"] and len(did) == 3 * max(1, rounds)
