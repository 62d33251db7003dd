"""The order of one optimizer step of actor and critic, and what each outcome leads to; engines are stand-ins."""

import math
from types import SimpleNamespace

import pytest
import torch

from dschat_ppo.algorithms.aggregation import Denominators
from dschat_ppo.config.cli import parse
from dschat_ppo.engine.guard import Fault, StepResult
from dschat_ppo.experience.mini_dataset import Update
from dschat_ppo.monitor.metrics import MetricSums
from dschat_ppo.trainers import updater
from dschat_ppo.trainers.limits import UpdateLimits
from dschat_ppo.trainers.nonfinite import NonFiniteGuard
from dschat_ppo.trainers.updater import Updater

PART = Update([], Denominators(1.0, 1.0, 1.0), 1.0, 1.0)
GOOD, LEFT_OUT = StepResult(2.0, applied=True), StepResult(math.inf, applied=False)
OVERFLOW = StepResult(math.inf, applied=False, overflow=True)
FAULT = Fault("loss", 0, 0, [[math.nan]], [])
BAD = StepResult(math.inf, applied=False, fault=FAULT)


class Steps:
    """Stands for `engine.build`: notes what is done and gives prepared results; every forward measures a KL of 0.02
    and a log-ratio of 0.2."""

    def __init__(self, monkeypatch, **results: StepResult):
        self.done, self.results = [], results
        for name in ("accumulate", "apply", "apply_together"):
            monkeypatch.setattr(updater, name, getattr(self, name))

    def accumulate(self, engine, batches, loss_of):
        self.done.append(f"{engine} gradients")
        sums = next(cell.cell_contents for cell in loss_of.__closure__ if isinstance(cell.cell_contents, MetricSums))
        sums.add_mean("policy/kl_k3", torch.tensor([0.02]))
        sums.add_max("policy/counted_log_ratio_abs_max", torch.tensor([0.2]))
        sums.add_mean(f"{engine}/seen", torch.tensor([1.0]))
        return SimpleNamespace(engine=engine, fault=self.results[engine].fault)

    def apply(self, gradients, refused=False):
        self.done.append(f"{gradients.engine} {'refused' if refused else 'applied'}")
        return LEFT_OUT if refused else self.results[gradients.engine]

    def apply_together(self, parts):
        self.done += [f"together {part.engine}" for part in parts]
        return [self.results[part.engine] for part in parts]


def once(monkeypatch, words: str = "", train_actor: bool = True, actor=GOOD, critic=GOOD):
    flags = "--actor_model_name_or_path a --critic_model_name_or_path c --output_dir o --on_nonfinite skip"
    config = parse("ppo", [*flags.split(), *words.split()])
    steps, guard, sums = Steps(monkeypatch, actor=actor, critic=critic), NonFiniteGuard(config.safety), MetricSums()
    engines = SimpleNamespace(actor="actor", critic="critic", reference=None)
    outcome = Updater(config, engines, None, guard).once(PART, sums, 0.0, train_actor, 3)
    return steps.done, outcome, sorted(name for name in sums.reduce() if name.endswith("/seen")), guard


IN_TURN = ["actor gradients", "actor applied", "critic gradients", "critic applied"]


def test_actor_and_critic_in_turn(monkeypatch):
    done, outcome, counted, _ = once(monkeypatch)
    assert (done, outcome.norms, outcome.ends) == (IN_TURN, {"actor": 2.0, "critic": 2.0}, False)
    assert counted == ["actor/seen", "critic/seen"]


def test_the_critic_alone_in_its_warm_up(monkeypatch):
    done, outcome, _, _ = once(monkeypatch, "--target_kl 0.001 --max_log_ratio 0.001", train_actor=False)
    assert (done, outcome.norms, outcome.ends) == (IN_TURN[2:], {"critic": 2.0}, False)


@pytest.mark.parametrize("actor", [BAD, OVERFLOW])
def test_what_is_not_applied_does_not_count(monkeypatch, actor):
    done, outcome, seen, guard = once(monkeypatch, "--target_kl 0.001", actor=actor)
    assert (done, outcome.norms, seen) == (IN_TURN, {"critic": 2.0}, ["critic/seen"])
    assert not outcome.ends, "an update that was not applied has moved nothing"
    metrics = guard.metrics("actor", "critic")
    assert metrics == {
        "nonfinite/skipped": float(actor is BAD), "overflow/actor": float(actor is OVERFLOW), "overflow/critic": 0,
    }  # fmt: skip


def test_overflow_is_aligned_in_fp16_alone(monkeypatch):
    done, outcome, seen, guard = once(monkeypatch, "--align_overflow --dtype fp16", actor=OVERFLOW, critic=LEFT_OUT)
    assert done == ["actor gradients", "critic gradients", "together actor", "together critic"]
    assert (outcome.norms, seen) == ({}, [])
    assert guard.metrics("actor", "critic") == {"nonfinite/skipped": 0, "overflow/actor": 1, "overflow/critic": 0}
    assert once(monkeypatch, "--align_overflow --dtype bf16")[0] == IN_TURN


@pytest.mark.parametrize("words", ["", "--align_overflow --dtype fp16"])
def test_a_forbidden_update_ends_the_ppo_step_before_the_critic(monkeypatch, words):
    done, outcome, counted, _ = once(monkeypatch, f"--max_log_ratio 0.1 {words}")
    assert (done, outcome.norms, outcome.ends, counted) == (["actor gradients", "actor refused"], {}, True, [])
    assert once(monkeypatch, f"--max_log_ratio 0.3 {words}")[1].norms == {"actor": 2.0, "critic": 2.0}


def test_a_bad_number_goes_before_the_limit(monkeypatch):
    done, outcome, _, guard = once(monkeypatch, "--max_log_ratio 0.1", actor=BAD)
    assert (done, outcome.ends) == (IN_TURN, False)
    assert guard.metrics()["nonfinite/skipped"] == 1


def test_the_update_beyond_the_target_is_the_last_one(monkeypatch):
    done, outcome, _, _ = once(monkeypatch, "--target_kl 0.01")
    assert (done, outcome.ends) == (IN_TURN, True)
    assert not once(monkeypatch, "--target_kl 0.03")[1].ends


@pytest.mark.parametrize(("measured", "beyond"), [(0.25, False), (0.2500001, True), (0.0, False)])
def test_a_limit_is_the_last_number_that_is_allowed(measured, beyond):
    flags = SimpleNamespace(target_kl=0.25, max_log_ratio=0.25)
    sums = MetricSums()
    sums.add_mean("policy/kl_k3", torch.tensor([measured], dtype=torch.float64))
    sums.add_max("policy/counted_log_ratio_abs_max", torch.tensor([measured], dtype=torch.float64))
    assert UpdateLimits(flags).end(sums) is beyond and UpdateLimits(flags).forbid(sums) is beyond
