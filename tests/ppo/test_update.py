"""The order of one optimizer step of actor and critic, and what each outcome leads to; engines are stand-ins."""

import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch
from dschat_ppo.ppo.update_limits import UpdateLimits

from dschat_ppo.algorithms.aggregation import Denominators
from dschat_ppo.config.cli import parse
from dschat_ppo.data.collators import SFTBatch
from dschat_ppo.engine.skip_update import Fault, StepResult
from dschat_ppo.monitor.metric_sums import MetricSums
from dschat_ppo.nonfinite.nonfinite_policy import NonFinitePolicy
from dschat_ppo.ppo import update
from dschat_ppo.ppo.mini_dataset import Update
from dschat_ppo.ppo.update import Updater

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
            monkeypatch.setattr(update, name, getattr(self, name))

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


def once(monkeypatch, words: str = "", train_actor: bool = True, actor=GOOD, critic=GOOD, has_critic: bool = True):
    flags = (
        "--actor_model_name_or_path a --critic_model_name_or_path c --data_path d --output_dir o --on_nonfinite skip"
    )
    config = parse("ppo", [*flags.split(), *words.split()])
    steps, guard, sums = Steps(monkeypatch, actor=actor, critic=critic), NonFinitePolicy(config.safety), MetricSums()
    sums.add_mean("policy/kl_k3", torch.full((9,), 5.0))  # of updates before this one
    sums.add_max("policy/counted_log_ratio_abs_max", torch.tensor([5.0]))
    engines = SimpleNamespace(actor="actor", critic="critic" if has_critic else None, reference=None)
    outcome = Updater(config, engines, None, guard).once(PART, sums, 0.0, train_actor, 3)
    return steps.done, outcome, sorted(name for name in sums.reduce() if name.endswith("/seen")), guard


IN_TURN = ["actor gradients", "actor applied", "critic gradients", "critic applied"]


def test_what_each_engine_sees_and_by_which_constants(monkeypatch):
    """PTX blocks follow the experience in the actor's step; what a replay needs is noted with the fault."""
    flags = (
        "--actor_model_name_or_path a --critic_model_name_or_path c --data_path d --output_dir o --on_nonfinite skip"
    )
    flags += " --temperature 0.7 --unsup_coef 0.5 --value_clip_eps 0.375 --clip_eps 0.125"
    config, losses, scenes = parse("ppo", flags.split()), [], []
    text = SFTBatch(*[None] * len(dataclasses.fields(SFTBatch)))
    part = Update(["first", "second"], Denominators(3.0, 2.0, 9.0), 5.0, 0.25)
    state = [torch.ones(1)]

    class Loss:
        def __init__(self, *settings):
            losses.append(settings)

        def __call__(self, rows, update, entropy_coef, sums):
            return ("actor", rows, update.share, entropy_coef)

    monkeypatch.setattr(update, "ActorLoss", Loss)
    monkeypatch.setattr(update, "ptx_loss", lambda actor, rows, tokens, sums: torch.tensor(float(tokens)))
    monkeypatch.setattr(
        update, "critic_loss", lambda critic, rows, update, eps, sums: ("critic", critic, rows, update.share, eps)
    )
    results = iter([StepResult(2.0, False, fault=Fault("loss", 0, 0, [], state)), GOOD])
    monkeypatch.setattr(update, "accumulate", lambda engine, batches, loss_of: SimpleNamespace(
        fault=None, losses=losses.append([loss_of(batch) for batch in batches])))  # fmt: skip
    monkeypatch.setattr(update, "apply", lambda gradients: next(results))
    guard = SimpleNamespace(handle=lambda role, step, result, scene: scenes.append((role, step, scene())))
    engines = SimpleNamespace(actor="A", critic="C", reference="R")
    texts = SimpleNamespace(take=lambda: ([text], torch.tensor(6)))
    Updater(config, engines, texts, guard).once(part, MetricSums(), 0.01, True, 3)
    settings, of_actor, of_critic = losses
    assert settings == ("A", "R", config.algorithm, 0.7)
    assert of_actor == [("actor", "first", 0.25, 0.01), ("actor", "second", 0.25, 0.01), 0.5 * 6]
    assert of_critic == [("critic", "C", rows, 0.25, 0.375) for rows in ("first", "second")]
    (role, step, actor), (other_role, _, critic) = scenes
    assert (role, step, other_role) == ("actor", 3, "critic")
    counts = {"over": {"tokens": 3.0, "rows": 2.0, "constant": 9.0}, "value_tokens": 5.0, "share": 0.25}
    assert actor.constants == counts | {"entropy_coef": 0.01, "text_tokens": 6.0} and critic.constants == counts
    assert actor.records == ["first", "second", text] and critic.records == ["first", "second"]
    assert (actor.engine, critic.engine, actor.random_state, critic.random_state) == ("A", "C", state, [])


def test_without_a_critic_the_actor_alone(monkeypatch):
    done, outcome, _, _ = once(monkeypatch, "--advantage_estimator reinforce_plus_plus", has_critic=False)
    assert (done, outcome.norms) == (IN_TURN[:2], {"actor": 2.0})


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
