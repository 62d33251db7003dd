"""The position of step 3 and its step in flight: counting, metrics, saving."""

import pytest
import torch
from test_mini_dataset import experience

from dschat_ppo.common import dist
from dschat_ppo.monitor.metric_sums import MetricSums
from dschat_ppo.ppo.state import PPOState
from dschat_ppo.ppo.update import Outcome

CPU = torch.device("cpu")


def measured(**means: float) -> MetricSums:
    sums = MetricSums()
    for name, value in means.items():
        sums.add_mean(name, torch.tensor([value]))
    return sums


def first_update(log_ratio: float) -> MetricSums:
    sums = MetricSums()
    sums.add_mean("policy/log_ratio_abs_mean", torch.tensor([log_ratio]))
    sums.add_max("policy/log_ratio_abs_max", torch.tensor([10 * log_ratio]))
    return sums


def test_updates_are_counted_with_their_metrics():
    state = PPOState()
    state.begin_updates(experience(range(3)), {"kl/coef": 0.5})
    state.count_update(Outcome({"actor": 2.0, "critic": 8.0}, [first_update(1.0), measured(loss=3.0)]))
    assert (state.updates, state.applied, state.ended) == (1, 1, False)
    assert state.metrics == {
        "kl/coef": 0.5, "policy/first_log_ratio_abs_mean": 1.0, "policy/first_log_ratio_abs_max": 10.0,
    }  # fmt: skip
    state.count_update(Outcome({"actor": 4.0}, [first_update(2.0)]))
    state.count_update(Outcome({"critic": 2.0}, [measured(loss=6.0)], ends_step=True))
    assert (state.updates, state.applied, state.ended) == (3, 2, True)
    assert state.metrics["policy/first_log_ratio_abs_mean"] == 1.0, "of the first update alone"
    assert state.sums.reduce() == {
        "optim/grad_norm/actor": 3.0, "optim/grad_norm/critic": 5.0, "loss": 4.5, "policy/log_ratio_abs_mean": 1.5,
        "policy/log_ratio_abs_max": 20.0,
    }  # fmt: skip


def test_a_first_update_that_is_skipped_measures_nothing():
    state = PPOState()
    state.begin_updates(experience(range(3)), {})
    state.count_update(Outcome({}, []))
    state.count_update(Outcome({"actor": 2.0}, [first_update(1.0)]))
    assert (state.updates, state.applied, state.metrics) == (2, 1, {})


def test_gradient_norms_are_counted_once_over_all_ranks(monkeypatch):
    """Every rank knows them. So a run that resumes on another number of ranks has the same mean."""
    ranks = []
    for rank in (0, 1):
        monkeypatch.setattr(dist, "is_main", lambda rank=rank: rank == 0)
        state = PPOState()
        state.begin_updates(experience(range(3)), {})
        state.count_update(Outcome({"actor": 2.0}, [measured(loss=1.0 + rank)]))
        ranks.append(state.sums.state_dict())
    means = [{name: part.tolist() for name, part in state["means"].items()} for state in ranks]
    assert means == [
        {"loss": [1, 1], "optim/grad_norm/actor": [2, 1]},
        {"loss": [2, 1], "optim/grad_norm/actor": [0, 0]},
    ]


@pytest.mark.parametrize("rows", [range(3), None])
def test_a_step_in_flight_is_restored(rows):
    state = PPOState(steps=4, evaluated={"eval/score": 1.0}, first={"a": 1.0}, last={"a": 2.0})
    state.begin_updates(None if rows is None else experience(rows), {"kl/coef": 0.5})
    state.count_update(Outcome({"actor": 1.0}, [measured(loss=3.0)]))
    state.count_update(Outcome({}, [], ends_step=True))
    saved = state.state_dict()
    # Keys of the saved format.
    assert set(saved) == {
        "steps", "updates", "applied", "ended", "experience", "metrics", "evaluated", "first", "last",
    }  # fmt: skip
    other = PPOState()
    other.load_state_dict(saved, MetricSums.restored([state.sums.state_dict()], CPU), CPU)
    for name in ("steps", "updates", "applied", "ended", "metrics", "evaluated", "first", "last"):
        assert getattr(other, name) == getattr(state, name), name
    assert (other.updates, other.applied, other.ended) == (2, 1, True)
    assert other.sums.reduce() == {"loss": 3.0, "optim/grad_norm/actor": 1.0}
    assert (other.experience is None) is (rows is None)
    if rows is not None:
        assert other.experience.selected is None
        for name, value in saved["experience"].items():
            assert torch.equal(getattr(other.experience, name), value), name
    state.finish_step({"a": 3.0})
    assert (state.steps, state.updates, state.experience, state.ended) == (5, 0, None, False)
    assert (state.first, state.last) == ({"a": 1.0}, {"a": 3.0})
    assert state.applied == 0 and state.metrics == state.sums.reduce() == {}
    other.load_state_dict(state.state_dict(), MetricSums(), CPU)
    assert other.experience is None


def test_what_is_saved_does_not_change_with_the_state():
    state = PPOState()
    state.begin_updates(experience(range(3)), {})
    saved = state.state_dict()
    state.count_update(Outcome({"actor": 2.0}, [first_update(1.0)]))
    assert saved["metrics"] == {} and saved["updates"] == 0
