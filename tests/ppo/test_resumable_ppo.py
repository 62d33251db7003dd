"""The state of step 3 in a checkpoint: its keys, other numbers of ranks, flags that change under
`--resume_force`."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from test_advantages import computation
from test_mini_dataset import experience
from tiny_collection import CPU, collection_of

from dschat_ppo.algorithms.controllers import AdaptiveEntropy, FixedCoefficient
from dschat_ppo.checkpoint.manager import RankStates
from dschat_ppo.config.cli import parse
from dschat_ppo.config.health_flags import PPOHealthFlags
from dschat_ppo.data.batches import IndexStream
from dschat_ppo.data.further_data import FurtherData
from dschat_ppo.monitor.early_stop import EarlyStop
from dschat_ppo.monitor.health import HealthWatch
from dschat_ppo.nonfinite import NonFinitePolicy
from dschat_ppo.ppo.evaluation import HIGHEST_SCORE
from dschat_ppo.ppo.followers import Follower
from dschat_ppo.ppo.resumable import ResumablePPO
from dschat_ppo.ppo.state import PPOState
from dschat_ppo.ppo.token_losses import TOKENS_OF_ACTOR, RecordedTokens
from dschat_ppo.ppo.update import Outcome

BEGINS = ": was off when the checkpoint was saved, so it starts from scratch\n"
WORDS = "--actor_model_name_or_path a --critic_model_name_or_path c --data_path d --output_dir o"
ENTROPY = "--entropy_coef 0.01 --entropy_target 2"
GRPO = "--advantage_estimator grpo --n_samples_per_prompt 2"


class Weights:
    """Stands for weights that follow the actor."""

    def __init__(self):
        self.did = []

    def state_dict(self):
        return {"weight": torch.ones(1)}

    def restore(self, ranks):
        found = [part for part in ranks if part]
        self.did.append(f"parts of {len(found)}")
        return bool(found)


def resumable(
    words: str = "", further=False, follows=False, evaluation=False, collection=""
) -> ResumablePPO:
    """Step 3 without engines; `collection`: flags of the experience collection."""
    config = parse("ppo", f"{WORDS} {words}".split())
    algorithm = config.algorithm
    engines = SimpleNamespace(trained={"actor": "A", "critic": "C"})
    entropy_coef = FixedCoefficient(algorithm.entropy_coef)
    if algorithm.entropy_target:
        entropy_coef = AdaptiveEntropy(algorithm.entropy_coef, algorithm.entropy_target, 0.005, 1.0)
    ppo = SimpleNamespace(
        config=config,
        device=CPU,
        engines=engines,
        followers=[Follower("--follow", "following", Weights())] if follows else [],
        entropy_coef=entropy_coef,
        state=PPOState(),
        further_data=[FurtherData("more", "--more", [], "", IndexStream(range(5), 2))] * further,
        nonfinite=NonFinitePolicy(config.safety),
        advantage_computation=computation(),
        collection=collection_of(collection),
    )
    held_out = None
    if evaluation:
        held_out = SimpleNamespace(best=None, early_stop=EarlyStop(metric=HIGHEST_SCORE))
    return ResumablePPO(ppo, held_out, HealthWatch(PPOHealthFlags()))


def resume(before: ResumablePPO, after: ResumablePPO) -> ResumablePPO:
    """`after` in the state of `before`."""
    own = before.rank_state()
    after.load_state(before.shared_state(), RankStates(own, lambda: iter([own])))
    return after


def test_parts_are_restored_and_those_that_are_off_now_are_ignored(capsys):
    """`test_loop.py` compares whole runs."""
    before, after = (
        resumable(ENTROPY, further=True, follows=True, evaluation=True) for _ in range(2)
    )
    before.ppo.state.begin_updates(experience(range(3)), {"a": 1.0})
    before.ppo.state.count_update(Outcome({"actor": 2.0}, []))
    before.ppo.entropy_coef.update(1.0, 1)
    before.ppo.further_data[0].batches.take(2)
    before.ppo.nonfinite.load_state_dict({"in_a_row": {}, "skipped": 3, "overflows": {"actor": 2}})
    before.evaluation.best = (0.5, 3)
    before.evaluation.early_stop.misses = 2
    metrics = {
        "reward/score_std": 0.0,
        "rollout/count": 8,
        "rollout/distinct_share": 1.0,
        "rollout/ended_share": 1.0,
    }
    assert len(before.health.check(4, metrics)) == 1
    resume(before, after)
    assert after.position == (0, 1) and after.ppo.state.sums.reduce() == {
        "optim/grad_norm/actor": 2.0
    }
    assert after.ppo.further_data[0].batches.taken == 2
    assert after.ppo.entropy_coef.value == 0.015 and after.evaluation.best == (0.5, 3)
    assert after.evaluation.early_stop.misses == 2
    assert after.ppo.nonfinite.metrics("actor") == {
        "optim/nonfinite_skipped": 3,
        "optim/overflow/actor": 2,
    }
    assert after.health.check(5, metrics) == [], "a warning is given once"
    assert after.ppo.followers[0].weights.did == ["parts of 1"]
    capsys.readouterr()
    without = resume(before, resumable())
    assert (
        without.ppo.entropy_coef.value == 0.0
        and not without.is_best
        and capsys.readouterr().out == ""
    )


@pytest.mark.parametrize(
    ("ranks", "rank", "mine"), [(1, 0, 6.0), (2, 0, 2.0), (2, 1, 4.0), (3, 0, 6.0), (3, 2, 0.0)]
)
def test_what_the_ranks_measured_is_counted_once_on_any_number_of_ranks(
    monkeypatch, ranks, rank, mine
):
    """Two ranks have saved, with sums 2 and 4."""
    before, saved = resumable(follows=True), []
    for total in (2.0, 4.0):
        before.ppo.state.begin_updates(experience(range(4)), {})
        before.ppo.state.sums.add_sum("a", torch.tensor(total), torch.tensor(1.0))
        saved.append(before.rank_state())
    shared, after = before.shared_state(), resumable(follows=True)
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    monkeypatch.setenv("RANK", str(rank))
    own = saved[rank] if ranks == 2 else None
    after.load_state(shared, RankStates(own, lambda: iter(saved)))
    means = after.ppo.state.sums.state_dict()["means"]
    assert {name: float(part[0]) for name, part in means.items()} == {"a": mine}, (
        "the name is on every rank"
    )
    assert after.ppo.followers[0].weights.did == ["parts of 2"]


def test_what_was_off_starts_from_the_flags(capsys):
    after = resume(resumable(), resumable(ENTROPY, further=True, follows=True, evaluation=True))
    said = capsys.readouterr().out
    assert sorted(said.splitlines(keepends=True)) == [
        f"{flag}{BEGINS}"
        for flag in (
            "--entropy_target",
            "--follow",
            "--more",
        )
    ]
    assert after.ppo.entropy_coef.value == 0.01 and after.ppo.further_data[0].batches.taken == 0
    assert after.ppo.followers[0].weights.did == ["parts of 0"] and after.evaluation.best is None


@pytest.mark.parametrize("grad_norms", [{}, {"actor": 2.0}])
def test_the_tokens_of_an_update_are_kept_if_it_was_applied_and_its_log_probs_always(grad_norms):
    """As after an overflow in fp16, whose step is skipped."""
    rows = replace(experience(range(3)), row_indices=torch.arange(3), old_logprobs=None)
    recorded = RecordedTokens(TOKENS_OF_ACTOR)
    numbers = torch.full(rows.response_mask.shape, 3.0)
    recorded.record(rows, **dict.fromkeys(TOKENS_OF_ACTOR, numbers))
    constants = {"denominators": {"tokens": 5.0}, "value_tokens": 6.0, "entropy_coef": 0.5}
    actor = SimpleNamespace(recorded=recorded, step_loss=SimpleNamespace(constants=constants))
    state = PPOState()
    state.begin_updates(rows, {})
    state.count_update(Outcome(grad_norms, [], objectives={"actor": actor}))
    expected = torch.where(rows.response_mask, 3.0, 0.0)
    assert torch.equal(state.experience.old_logprobs, expected)
    assert len(state.update_tokens) == len(grad_norms)
    for update in state.update_tokens:
        assert torch.equal(update.tokens["losses"], expected)
        assert (update.denominators, update.entropy_coef) == ({"tokens": 5.0}, 0.5)
        assert update.value_tokens == 6.0
