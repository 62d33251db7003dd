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
from dschat_ppo.ppo.update import PPOUpdate

ROWS = [SimpleNamespace(old_logprobs=torch.zeros(1)) for _ in range(2)]  # stand for micro-batches
MINIBATCH = MiniBatch(ROWS, Denominators(3.0, 2.0, 9.0), 5.0, 0.25)
CONSTANTS = {"over": {"tokens": 3.0, "rows": 2.0, "constant": 9.0}, "value_tokens": 5.0, "share": 0.25}
TEXT = SFTBatch(*[None] * len(dataclasses.fields(SFTBatch)))
GOOD, NOT_APPLIED = StepResult(2.0, applied=True), StepResult(math.inf, applied=False)
OVERFLOW = StepResult(math.inf, applied=False, overflow=True)
BAD = StepResult(math.inf, applied=False, fault=Fault("loss", 0, 0, [[math.nan]], [torch.ones(1)]))
WORDS = "--actor_model_name_or_path a --critic_model_name_or_path c --data_path d --output_dir o --on_nonfinite skip "
BOTH = ["actor gradients", "actor applied", "critic gradients", "critic applied"]
ALIGNED = ["actor gradients", "critic gradients", "together actor", "together critic"]
FP16 = "--align_overflow --dtype fp16"


class Engines:
    """Stands for `engine.optimizer_step` and the losses: notes what is done and gives prepared results."""

    def __init__(self, monkeypatch, log_ratios, **results: StepResult):
        self.done, self.results, self.losses = [], results, {}
        self.log_ratios = torch.tensor(log_ratios)
        for name in ("accumulate", "apply", "apply_together", "critic_loss", "ptx_loss"):
            monkeypatch.setattr(update, name, getattr(self, name))
        monkeypatch.setattr(update, "ActorLoss", lambda *_: self.actor_loss)

    def actor_loss(self, rows, minibatch, entropy_coef, sums, recorded):
        sums.add_mean("policy/kl_k3", KL_ESTIMATORS["k3"](torch.zeros_like(self.log_ratios), self.log_ratios))
        sums.add_max("policy/counted_log_ratio_abs_max", self.log_ratios.abs())
        sums.add_mean("actor/seen", torch.tensor([1.0]))
        return (rows, entropy_coef)

    def critic_loss(self, critic, rows, minibatch, flags, sums, recorded):
        sums.add_mean("critic/seen", torch.tensor([1.0]))
        return rows

    def ptx_loss(self, actor, rows, tokens, sums):
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


def one_step(monkeypatch, words="", actor=GOOD, critic=GOOD, texts=None, policy=None, log_ratios=(0.2, -0.2)):
    """(the engines, the outcome, the names that applied updates measured, the policy)"""
    config = parse("ppo", (WORDS + words).split())
    engines = Engines(monkeypatch, log_ratios, actor=actor, critic=critic)
    policy = policy or NonFinitePolicy(config.safety)
    roles = SimpleNamespace(actor="actor", critic="critic", reference="reference")
    updates = PPOUpdate(config, None, roles, texts, FixedCoefficient(0.01), policy, PhaseClock())
    outcome = updates.minimise([updates.actor_objective(MINIBATCH), updates.critic_objective(MINIBATCH)], 3)
    measured = sorted(name for sums in outcome.sums for name in sums.reduce() if name.endswith("/seen"))
    return engines, outcome, measured, policy


def test_each_engine_sees_its_micro_batches_and_constants(monkeypatch):
    """PTX blocks follow the experience in the actor's step; a replay needs the constants."""
    handled = []
    policy = SimpleNamespace(handle=lambda *given: handled.append(given))
    texts = SimpleNamespace(take=lambda: ([TEXT], torch.tensor(6)))
    engines, outcome, measured, _ = one_step(monkeypatch, "--unsup_coef 0.5", texts=texts, policy=policy)
    assert engines.losses == {"actor": [(ROWS[0], 0.01), (ROWS[1], 0.01), 0.5 * 6], "critic": ROWS}
    of_actor = {**CONSTANTS, "entropy_coef": 0.01, "text_tokens": 6.0}
    assert handled == [
        ("actor", 3, GOOD, "actor", [*ROWS, TEXT], of_actor), ("critic", 3, GOOD, "critic", ROWS, CONSTANTS)
    ]  # fmt: skip
    assert measured == ["actor/seen", "critic/seen", "text/seen"] and len(outcome.sums) == 2


OUTCOMES = {  # flags, results of actor and critic -> what is done, roles that are updated, whether the PPO step ends
    "in turn": ("", GOOD, GOOD, BOTH, "actor critic", False),
    "bad": ("--target_kl 0.001 --max_log_ratio 0.1", BAD, GOOD, BOTH, "critic", False),
    "overflow": ("--target_kl 0.001", OVERFLOW, GOOD, BOTH, "critic", False),
    "aligned": (f"{FP16} --target_kl 0.01", GOOD, GOOD, ALIGNED, "actor critic", True),
    "aligned overflow": (FP16, OVERFLOW, NOT_APPLIED, ALIGNED, "", False),
    "no overflow in bf16": ("--align_overflow --dtype bf16", GOOD, GOOD, BOTH, "actor critic", False),
    "forbidden": ("--max_log_ratio 0.1", GOOD, GOOD, ["actor gradients", "actor refused"], "", True),
    "forbidden, aligned": (f"{FP16} --max_log_ratio 0.1", GOOD, GOOD, ["actor gradients", "actor refused"], "", True),
    # k3 of log-ratios 0.2 and -0.2: (e^0.2 - 1.2 + e^-0.2 - 0.8) / 2 = 0.02007
    "above the target": ("--target_kl 0.02", GOOD, GOOD, BOTH, "actor critic", True),
    "below the target": ("--target_kl 0.0201", GOOD, GOOD, BOTH, "actor critic", False),
}


@pytest.mark.parametrize("case", OUTCOMES)
def test_outcomes_of_a_step(monkeypatch, case):
    words, actor, critic, done, updated, ends = OUTCOMES[case]
    engines, outcome, measured, policy = one_step(monkeypatch, words, actor, critic)
    assert (engines.done, outcome.ends_step) == (done, ends)
    assert outcome.grad_norms == dict.fromkeys(updated.split(), 2.0)
    assert measured == [f"{role}/seen" for role in updated.split()], "metrics of applied updates alone"
    assert policy.metrics("actor", "critic") == {
        "optim/nonfinite_skipped": float(actor is BAD), "optim/overflow/actor": float(actor is OVERFLOW),
        "optim/overflow/critic": 0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("log_ratios", "forbidden"),
    [((0.25, 0.0), False), ((-0.25, 0.0), False), ((0.0, 0.2500001), True), ((0.0, -0.2500001), True)],
)
def test_a_limit_is_the_last_number_that_is_allowed(monkeypatch, log_ratios, forbidden):
    outcome = one_step(monkeypatch, "--max_log_ratio 0.25", log_ratios=log_ratios)[1]
    assert outcome.ends_step is forbidden and ("actor" not in outcome.grad_norms) is forbidden
