"""One optimizer step of actor and critic and what each outcome leads to; engines are stand-ins."""

import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch

from dschat_ppo.algorithms.aggregation import Denominators
from dschat_ppo.algorithms.controllers import FixedCoefficient
from dschat_ppo.algorithms.kl import KL_ESTIMATORS
from dschat_ppo.common.phases import PhaseClock
from dschat_ppo.config.cli import parse
from dschat_ppo.data.batches import SFTBatch
from dschat_ppo.engine.optimizer_step import Fault, StepResult
from dschat_ppo.nonfinite.nonfinite_policy import NonFinitePolicy
from dschat_ppo.ppo import update
from dschat_ppo.ppo.mini_dataset import MiniBatch
from dschat_ppo.ppo.update import PPOUpdate, RecordedTokens, UpdateSettings


@dataclasses.dataclass(frozen=True)
class Rows:
    """Stands for a micro-batch."""

    numbers: torch.Tensor
    old_logprobs: torch.Tensor = torch.zeros(1)


FIRST, SECOND = Rows(torch.zeros(1)), Rows(torch.ones(1))
MINIBATCH = MiniBatch([FIRST, SECOND], Denominators(3.0, 2.0, 9.0), 5.0, 0.25)
CONSTANTS = {"over": {"tokens": 3.0, "rows": 2.0, "constant": 9.0}, "value_tokens": 5.0, "share": 0.25}
TEXT = SFTBatch(*[None] * len(dataclasses.fields(SFTBatch)))
GOOD, NOT_APPLIED = StepResult(2.0, applied=True), StepResult(math.inf, applied=False)
OVERFLOW = StepResult(math.inf, applied=False, overflow=True)
STATE = [torch.ones(1)]
BAD = StepResult(math.inf, applied=False, fault=Fault("loss", 0, 0, [[math.nan]], STATE))
WORDS = "--actor_model_name_or_path a --critic_model_name_or_path c --data_path d --output_dir o --on_nonfinite skip "
BOTH = ["actor gradients", "actor applied", "critic gradients", "critic applied"]


class Engines:
    """Stands for `engine.build_engine`: notes what is done and gives prepared results.

    The losses measure log-ratios of 0.2 and -0.2 for the actor; k3 of these is (e^0.2 - 1.2 + e^-0.2 - 0.8) / 2.
    """

    def __init__(self, monkeypatch, log_ratios=(0.2, -0.2), **results: StepResult):
        self.done, self.results, self.losses = [], results, {}
        self.log_ratios = torch.tensor(log_ratios)
        for name in ("accumulate", "apply", "apply_together"):
            monkeypatch.setattr(update, name, getattr(self, name))
        monkeypatch.setattr(
            update, "ActorLoss", lambda *settings: setattr(self, "settings", settings) or self.actor_loss
        )
        monkeypatch.setattr(update, "critic_loss", self.critic_loss)
        monkeypatch.setattr(update, "ptx_loss", self.ptx_loss)

    def actor_loss(self, rows, minibatch, entropy_coef, sums, recorded):
        assert minibatch is MINIBATCH and recorded is None
        sums.add_mean("policy/kl_k3", KL_ESTIMATORS["k3"](torch.zeros_like(self.log_ratios), self.log_ratios))
        sums.add_max("policy/counted_log_ratio_abs_max", self.log_ratios.abs())
        sums.add_mean("actor/seen", torch.tensor([1.0]))
        return ("actor", rows, entropy_coef)

    def critic_loss(self, critic, rows, minibatch, flags, sums, recorded):
        assert minibatch is MINIBATCH and recorded is None
        sums.add_mean("critic/seen", torch.tensor([1.0]))
        return (critic, rows, flags.value_clip_eps)

    def ptx_loss(self, actor, rows, tokens, sums):
        assert rows is TEXT
        sums.add_mean("text/seen", torch.tensor([1.0]))
        return torch.tensor(float(tokens))

    def accumulate(self, engine, batches, loss):
        self.done.append(f"{engine} gradients")
        self.losses[engine] = [loss(batch) for batch in batches]
        return SimpleNamespace(engine=engine, fault=self.results[engine].fault)

    def apply(self, gradients, refused=False):
        self.done.append(f"{gradients.engine} {'refused' if refused else 'applied'}")
        return NOT_APPLIED if refused else self.results[gradients.engine]

    def apply_together(self, parts):
        self.done += [f"together {part.engine}" for part in parts]
        return [self.results[part.engine] for part in parts]


def one_step(monkeypatch, words="", train_actor=True, actor=GOOD, critic=GOOD, texts=None, policy=None, **more):
    """(what was done, its outcome, the names that applied updates measured, the policy)"""
    config = parse("ppo", (WORDS + words).split())
    engines = Engines(monkeypatch, actor=actor, critic=critic, **more)
    policy = policy or NonFinitePolicy(config.safety)
    roles = SimpleNamespace(actor="actor", critic="critic", reference="reference")
    updates = PPOUpdate(UpdateSettings.of(config), roles, texts, FixedCoefficient(0.01), policy, PhaseClock())
    objectives = [updates.actor_objective(MINIBATCH)] * train_actor + [updates.critic_objective(MINIBATCH)]
    outcome = updates.minimise(objectives, 3)
    measured = sorted(name for sums in outcome.sums for name in sums.reduce() if name.endswith("/seen"))
    assert set(updates.clock.take()[0]) == {"train"}
    return engines, outcome, measured, policy


def test_each_engine_sees_its_micro_batches_and_constants(monkeypatch):
    """PTX blocks follow the experience in the actor's step; a replay needs the constants."""
    contexts = []

    class Policy:
        def handle(self, *given):
            contexts.append(given)

    words = "--temperature 0.7 --unsup_coef 0.5 --value_clip_eps 0.375"
    texts = SimpleNamespace(take=lambda: ([TEXT], torch.tensor(6)))
    engines, _, measured, _ = one_step(monkeypatch, words, actor=BAD, texts=texts, policy=Policy())
    config = parse("ppo", (WORDS + words).split())
    assert engines.settings == ("actor", "reference", config.algorithm, 0.7, None)
    assert engines.losses["actor"] == [("actor", FIRST, 0.01), ("actor", SECOND, 0.01), 0.5 * 6]
    assert engines.losses["critic"] == [("critic", FIRST, 0.375), ("critic", SECOND, 0.375)]
    of_actor = {**CONSTANTS, "entropy_coef": 0.01, "text_tokens": 6.0}
    assert contexts == [
        ("actor", 3, BAD, "actor", [FIRST, SECOND, TEXT], of_actor),
        ("critic", 3, GOOD, "critic", [FIRST, SECOND], CONSTANTS),
    ]
    assert measured == ["critic/seen"]


def test_metrics_of_experience_and_text_belong_to_the_actor(monkeypatch):
    texts = SimpleNamespace(take=lambda: ([TEXT], torch.tensor(6)))
    _, outcome, measured, _ = one_step(monkeypatch, "--unsup_coef 0.5", texts=texts)
    assert measured == ["actor/seen", "critic/seen", "text/seen"] and len(outcome.sums) == 2


def test_actor_and_critic_in_turn(monkeypatch):
    engines, outcome, measured, _ = one_step(monkeypatch)
    assert (engines.done, outcome.grad_norms, outcome.ends_step) == (BOTH, {"actor": 2.0, "critic": 2.0}, False)
    assert measured == ["actor/seen", "critic/seen"]


@pytest.mark.parametrize("actor", [BAD, OVERFLOW])
def test_an_update_that_is_not_applied_does_not_count(monkeypatch, actor):
    engines, outcome, measured, policy = one_step(monkeypatch, "--target_kl 0.001", actor=actor)
    assert (engines.done, outcome.grad_norms, measured) == (BOTH, {"critic": 2.0}, ["critic/seen"])
    assert not outcome.ends_step, "an update that was not applied has moved nothing"
    assert policy.metrics("actor", "critic") == {
        "optim/nonfinite_skipped": float(actor is BAD), "optim/overflow/actor": float(actor is OVERFLOW),
        "optim/overflow/critic": 0,
    }  # fmt: skip


def test_overflow_is_aligned_in_fp16_alone(monkeypatch):
    words = "--align_overflow --dtype fp16"
    engines, outcome, measured, policy = one_step(monkeypatch, words, actor=OVERFLOW, critic=NOT_APPLIED)
    assert engines.done == ["actor gradients", "critic gradients", "together actor", "together critic"]
    assert (outcome.grad_norms, measured, outcome.ends_step) == ({}, [], False)
    assert policy.metrics("actor", "critic") == {
        "optim/nonfinite_skipped": 0,
        "optim/overflow/actor": 1,
        "optim/overflow/critic": 0,
    }
    _, outcome, measured, _ = one_step(monkeypatch, f"{words} --target_kl 0.01")
    assert outcome.grad_norms == {"actor": 2.0, "critic": 2.0} and outcome.ends_step
    assert measured == ["actor/seen", "critic/seen"]
    assert one_step(monkeypatch, "--align_overflow --dtype bf16")[0].done == BOTH


@pytest.mark.parametrize("words", ["", "--align_overflow --dtype fp16"])
def test_a_forbidden_update_ends_the_ppo_step_before_the_critic(monkeypatch, words):
    engines, outcome, measured, _ = one_step(monkeypatch, f"--max_log_ratio 0.1 {words}")
    assert (engines.done, outcome.grad_norms, measured) == (["actor gradients", "actor refused"], {}, [])
    assert outcome.ends_step
    assert one_step(monkeypatch, f"--max_log_ratio 0.3 {words}")[1].grad_norms == {"actor": 2.0, "critic": 2.0}


def test_a_bad_number_goes_before_the_limit(monkeypatch):
    engines, outcome, _, policy = one_step(monkeypatch, "--max_log_ratio 0.1", actor=BAD)
    assert (engines.done, outcome.ends_step) == (BOTH, False)
    assert policy.metrics()["optim/nonfinite_skipped"] == 1


def test_the_update_above_the_target_is_the_last_one(monkeypatch, said):
    engines, outcome, _, _ = one_step(monkeypatch, "--target_kl 0.01")
    assert (engines.done, outcome.ends_step) == (BOTH, True)
    assert said[-1] == "policy/kl_k3 of 0.02007 is above --target_kl: it was the PPO step's last update"
    assert not one_step(monkeypatch, "--target_kl 0.03")[1].ends_step


@pytest.mark.parametrize(("target", "ends"), [(0.36, True), (0.3621, False)])
def test_target_kl_by_hand(monkeypatch, target, ends):
    """k3 of log-ratios 1, -1, 0: (e - 2 + 1 / e + 0) / 3 = 0.3620."""
    outcome = one_step(monkeypatch, f"--target_kl {target}", log_ratios=(1.0, -1.0, 0.0))[1]
    assert outcome.ends_step is ends and "actor" in outcome.grad_norms


@pytest.mark.parametrize(
    ("log_ratios", "forbidden"),
    [((0.25, 0.0), False), ((-0.25, 0.0), False), ((0.0, 0.2500001), True), ((0.0, -0.2500001), True)],
)
def test_a_limit_is_the_last_number_that_is_allowed(monkeypatch, log_ratios, forbidden):
    outcome = one_step(monkeypatch, "--max_log_ratio 0.25", log_ratios=log_ratios)[1]
    assert outcome.ends_step is forbidden and ("actor" not in outcome.grad_norms) is forbidden


def critic_first(monkeypatch, words="", **results: StepResult):
    """(engines, updates, the critic's pass): its values are recorded, its gradients wait."""
    config = parse("ppo", (WORDS + words).split())
    engines = Engines(monkeypatch, **{"actor": GOOD, "critic": GOOD, **results})
    monkeypatch.setattr(
        update, "critic_loss", lambda *given: given[-1] and given[-1].record(given[1], given[1].numbers)
    )
    roles = SimpleNamespace(actor="actor", critic="critic", reference="reference")
    policy = NonFinitePolicy(config.safety)
    updates = PPOUpdate(UpdateSettings.of(config), roles, None, FixedCoefficient(0.01), policy, PhaseClock())
    made = updates.critic_objective(MINIBATCH, RecordedTokens())
    gradients = engines.accumulate("critic", MINIBATCH.micro_batches, made.loss)
    return engines, updates, dataclasses.replace(made, gradients=gradients)


def objectives_of(updates, made=None) -> list:
    return [updates.actor_objective(MINIBATCH), made or updates.critic_objective(MINIBATCH)]


def test_gradients_that_wait_are_applied_before_others_are_computed(monkeypatch):
    engines, updates, made = critic_first(monkeypatch)
    assert engines.done == ["critic gradients"] and len(made.recorded._parts) == 2
    outcome = updates.minimise(objectives_of(updates, made), 3)
    assert engines.done == ["critic gradients", "critic applied", "actor gradients", "actor applied"]
    assert outcome.grad_norms == {"actor": 2.0, "critic": 2.0} and outcome.logprobs is None


@pytest.mark.parametrize(("result", "kept"), [(GOOD, True), (OVERFLOW, True), (BAD, False)])
def test_log_probs_are_kept_if_every_loss_is_finite(monkeypatch, result, kept):
    recorded = []
    engines = Engines(monkeypatch, actor=result, critic=GOOD)
    monkeypatch.setattr(update, "ActorLoss", lambda *_: lambda *given: recorded.append(given[-1]))
    config = parse("ppo", WORDS.split())
    roles = SimpleNamespace(actor="actor", critic="critic", reference="reference")
    updates = PPOUpdate(
        UpdateSettings.of(config), roles, None, FixedCoefficient(0.01), NonFinitePolicy(config.safety), PhaseClock()
    )
    unscored = dataclasses.replace(MINIBATCH, micro_batches=[dataclasses.replace(FIRST, old_logprobs=None)])
    outcome = updates.minimise([updates.actor_objective(unscored)], 3)
    [seen] = recorded
    assert seen is not None and outcome.logprobs is (seen if kept else None) and engines.done[0] == "actor gradients"
