"""The parts of step 3 as the flags ask for them, and the mini-batches that are left of a PPO step."""

import math
from dataclasses import replace

import pytest
import torch
from plain_ppo import UPDATES, PlainRun

from dschat_ppo.common.seeding import seed_this_rank
from dschat_ppo.ppo.loop import make_experience, update
from dschat_ppo.ppo.state import PPOComponents, PPOData
from dschat_ppo.ppo.update import Outcome


class Never:
    def stop_requested(self):
        return False


@pytest.fixture(scope="module")
def run(assets, tmp_path_factory):
    return PlainRun(assets, tmp_path_factory.mktemp("run"), "--kl_target 0.05 --kl_horizon 8 --entropy_coef 0.01")


def test_an_experience_starts_the_updates_with_its_metrics(run):
    ppo = run.ppo
    experience = make_experience(ppo, 1, Never())
    assert ppo.state.experience is experience and (ppo.state.updates, ppo.state.ended) == (0, False)
    metrics = ppo.state.metrics
    assert metrics["kl/coef"] == 0.1 != ppo.shaping.kl_coef.value, "the coefficient of these rewards"
    penalty = (0.1 * experience.kl * experience.response_mask).sum(dim=1).mean()
    assert metrics["reward/kl_penalty"] == pytest.approx(float(penalty), rel=1e-6)
    assert (metrics["policy/entropy_coef"], metrics["optim/lr/actor"], metrics["optim/lr/critic"]) == (
        0.01,
        0.003,
        0.003,
    )
    assert metrics["reward/score_mean"] == pytest.approx(float(experience.scores.mean()))
    assert metrics["reward/function_faults"] == 0
    bad = replace(experience, scores=experience.scores * math.nan)
    ppo.nonfinite._fail = lambda *given: None
    assert ppo.keep_if_finite(bad, 1) is None
    assert ppo.state.metrics == {"reward/function_faults": 0.0} and ppo.state.experience is None


def test_the_minibatches_left_are_those_that_no_update_has_used(run):
    ppo = run.ppo
    experience = make_experience(ppo, 1, Never())
    whole = list(ppo.mini_dataset.minibatches(experience, 2, 1))
    assert len(whole) == UPDATES
    for done in range(UPDATES + 1):
        ppo.keep_if_finite(experience, 1)
        ppo.state.updates = done
        ppo.engines.eval()
        left = list(ppo.minibatches_left(experience, 1))
        assert ppo.engines.actor.training and ppo.engines.critic.training
        assert len(left) == UPDATES - done
        for one, other in zip(left, whole[done:], strict=True):
            for a, b in zip(one.micro_batches, other.micro_batches, strict=True):
                assert torch.equal(a.response_ids, b.response_ids)
    other_step = [part for batch in ppo.mini_dataset.minibatches(experience, 2, 2) for part in batch.micro_batches]
    assert any(
        not torch.equal(a.scores, b.scores)
        for a, b in zip(other_step, (p for batch in whole for p in batch.micro_batches), strict=True)
    )


def test_an_update_that_ends_the_step_is_the_last_one(run):
    ppo = run.ppo
    experience = make_experience(ppo, 1, Never())
    served = []
    for minibatch in ppo.minibatches_left(experience, 1):
        served.append(minibatch)
        ppo.state.count_update(Outcome({}, [], ends_step=len(served) == 2))
    assert len(served) == 2 and list(ppo.minibatches_left(experience, 1)) == []


def test_without_experience_there_are_no_minibatches_and_no_change_of_mode(run):
    run.ppo.engines.eval()
    assert list(run.ppo.minibatches_left(None, 1)) == [] and not run.ppo.engines.actor.training


def test_update_trains_actor_and_critic_but_the_critic_alone_in_the_warm_up(assets, tmp_path):
    run = PlainRun(assets, tmp_path / "run", "--critic_warmup_rollouts 1 --enable_ema --ema_decay 0")
    ppo = run.ppo
    experience = make_experience(ppo, 1, Never())
    [first, second, *_] = ppo.minibatches_left(experience, 1)
    start = {name: weight.clone() for name, weight in run.weights.items()}
    moved = []
    for step, minibatch in ((1, first), (2, second)):
        update(ppo, minibatch, step)
        changed = {name.split(".")[0] for name, weight in run.weights.items() if not torch.equal(weight, start[name])}
        moved.append(changed)
    assert moved == [{"critic"}, {"actor", "critic", "average"}]
    lm, average = ppo.engines.actor.module.lm.state_dict(), ppo.engines.actor_average.state_dict()
    assert all(torch.equal(average[name], lm[name]) for name in average), "a decay of 0 is the weights themselves"
    assert (ppo.state.updates, ppo.state.applied) == (2, 1)


def test_building_the_parts_leaves_the_random_stream_of_the_rank_as_seeded(run):
    """The self-check of generation draws numbers; dropout must not depend on how many."""
    ppo = run.ppo
    seed_this_rank(ppo.config.run.seed)
    expected = torch.rand(3)
    torch.manual_seed(99)
    scorer = ppo.collection.requests
    PPOComponents(ppo.config, ppo.plan, PPOData(scorer.prompts, scorer.tokenizer), ppo.engines, scorer.mixture)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize(
    ("words", "values"),
    [("--entropy_coef 0.02", (0.02, 0.02)),
     ("--entropy_coef 0.02 --entropy_target 2 --entropy_delta 0.01 --entropy_coef_max 0.025", (0.02, 0.025))],
)  # fmt: skip
def test_the_entropy_coefficient_is_fixed_or_adapts(assets, tmp_path, words, values):
    ppo = PlainRun(assets, tmp_path / "run", words).ppo
    found = [ppo.entropy_coef.value]
    ppo.entropy_coef.update(1.0, 1)
    assert (*found, ppo.entropy_coef.value) == values
    assert ppo.updates.entropy_coef is ppo.entropy_coef
