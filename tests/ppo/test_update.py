"""The update of actor and critic: losses of a micro-batch by hand, and what each outcome of a step
leads to."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from pass_count import PassCount
from tiny_experience import record
from tiny_models import new_model

from dschat_ppo.algorithms.aggregation import Denominators
from dschat_ppo.algorithms.controllers import FixedCoefficient
from dschat_ppo.algorithms.kl import KL_ESTIMATORS
from dschat_ppo.common.phases import PhaseClock
from dschat_ppo.config.algorithm_flags import AlgorithmFlags
from dschat_ppo.config.cli import parse
from dschat_ppo.engine.optimizer_step import Fault, StepResult
from dschat_ppo.engine.step_loss import StepTerm
from dschat_ppo.models.pass_observers import observed
from dschat_ppo.models.wrapped_models import PolicyModel, ResponseLogprobs
from dschat_ppo.monitor.metric_sums import MetricSums
from dschat_ppo.nonfinite import NonFinitePolicy
from dschat_ppo.ppo import token_losses, update
from dschat_ppo.ppo.loss_terms import LossTerm, full_kl_term, sampled_kl
from dschat_ppo.ppo.mini_dataset import MiniBatch
from dschat_ppo.ppo.token_losses import ActorLoss, RecordedTokens, critic_loss
from dschat_ppo.ppo.update import PPOUpdate
from dschat_ppo.types import Experience, ForbiddenTokens, RewardedRollout

# Answers of 3 and 2 tokens; the second is cut, so it trains the critic alone.
RESPONSE = torch.tensor([[True, True, True], [True, True, False]])
COUNTED = torch.tensor([[True, True, True], [False, False, False]])
LOG_RATIOS = torch.tensor([[0.0, 0.5, -0.1], [-0.9, 0.3, 9.0]])
ADVANTAGES = torch.tensor([[1.0, 2.0, -1.0], [3.0, -3.0, 9.0]])
WEIGHTS = torch.tensor([[1.0, 0.5, 2.0], [1.0, 1.0, 9.0]])
DIVERGENCE = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 0.0]])
ENTROPIES = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 0.0]])
MINIBATCH = MiniBatch(
    [], Denominators(tokens=6.0, rows=4.0, constant=12.0), value_tokens=10.0, metric_weight=0.25
)
# -min(r A, clip(r, 0.8, 1.2) A), with its weight
TOKEN_LOSSES = [-1.0, -1.2 * 2 * 0.5, math.exp(-0.1) * 2]
POLICY = sum(TOKEN_LOSSES) / 6


def rows_of(**changes) -> Experience:
    old = torch.full((2, 3), -2.0)
    made = {
        "loss_mask": COUNTED,
        "old_logprobs": old,
        "ref_logprobs": old - 0.25,
        "advantages": ADVANTAGES,
    }
    return record(Experience, RESPONSE, **{**made, "loss_weights": WEIGHTS, **changes})


ENDS = ForbiddenTokens((2,), 1)


@pytest.fixture
def loss_of(monkeypatch):
    """(loss, metrics, what the forward pass was asked for) of flags, with log-probs that have these
    log-ratios."""
    asked = []

    def response_logprobs(
        engine,
        rows,
        temperature,
        entropy_grad=False,
        forbidden_tokens=None,
        teachings=(),
        pass_rows=None,
    ):
        assert forbidden_tokens is ENDS
        asked.append((engine, temperature, entropy_grad, *teachings))
        divergences = [DIVERGENCE * number for number in range(1, len(teachings) + 1)]
        return ResponseLogprobs(rows.old_logprobs + LOG_RATIOS, ENTROPIES, divergences)

    def loss_of(rows=None, entropy_coef=0.0, teachers=(), distill_coef=0.0, **flags):
        asked.clear()
        monkeypatch.setattr(token_losses, "response_logprobs", response_logprobs)
        sums, flags = MetricSums(), AlgorithmFlags(**flags)
        terms = []
        if flags.full_kl_loss:
            reference = LossTerm(
                "KL",
                flags.kl_loss_coef,
                "policy/kl_loss",
                lambda rows, actor: actor.divergences[0],
                lambda rows: ["reference"],
            )
            terms.append(reference)
        elif flags.kl_loss_coef > 0:
            terms.append(LossTerm("KL", flags.kl_loss_coef, "policy/kl_loss", sampled_kl(flags)))
        if teachers:
            taught = LossTerm(
                "reverse_kl",
                distill_coef,
                "distill/divergence",
                lambda rows, actor: sum(actor.divergences),
                lambda rows: teachers,
            )
            terms.append(taught)
        has_policy_loss = flags.advantage_estimator != "none"
        loss = ActorLoss("actor", flags, 0.7, ENDS, terms, has_policy_loss)
        return float(loss(rows or rows_of(), MINIBATCH, entropy_coef, sums)), sums, asked

    return loss_of


def test_the_policy_loss_is_a_mean_over_the_counted_tokens_of_the_optimizer_step(loss_of):
    loss, sums, asked = loss_of()
    assert loss == pytest.approx(POLICY) and asked == [("actor", 0.7, False)]
    assert loss_of(loss_aggregation="constant")[0] == pytest.approx(sum(TOKEN_LOSSES) / 12)
    assert loss_of(loss_aggregation="seq_mean_token_sum")[0] == pytest.approx(sum(TOKEN_LOSSES) / 4)
    assert loss_of(rows_of(loss_mask=RESPONSE))[0] != pytest.approx(POLICY)
    # the clips come from their flags: the ratio of the second token is 1.65, that of the third 0.90
    wide = [TOKEN_LOSSES[0], -1.3 * 2 * 0.5, TOKEN_LOSSES[2]]
    assert loss_of(clip_eps_low=0.05, clip_eps_high=0.3)[0] == pytest.approx(
        (wide[0] + wide[1] + 0.95 * 2) / 6
    )
    assert loss_of(clip_eps=0.3)[0] == pytest.approx(sum(wide) / 6)


def test_metrics_count_the_tokens_of_their_mask(loss_of):
    _, sums, _ = loss_of()
    counted = LOG_RATIOS[COUNTED].double()
    k3 = (torch.exp(counted) - 1 - counted).mean()
    found = sums.reduce()
    assert found == pytest.approx(
        {
            "policy/loss": POLICY / 0.25,
            "policy/entropy": 3.0,
            "policy/ratio_mean": float(counted.exp().mean()),
            "policy/ratio_max": math.exp(0.5),
            "policy/clip_fraction": 1 / 3,
            "policy/approx_kl": 0.2 / 5,
            "policy/log_ratio_abs_mean": 1.8 / 5,
            "policy/log_ratio_abs_max": 0.9,
            "policy/kl_k3": float(k3),
            "policy/counted_log_ratio_abs_max": 0.5,
        },
        rel=1e-5,
    )


def test_the_kl_loss_of_sampled_tokens_is_added(loss_of):
    gaps = [0.25 + ratio for ratio in LOG_RATIOS[0].tolist()]  # log p - log reference
    k3 = sum(math.exp(-gap) - 1 + gap for gap in gaps) / 6
    for straight_through in (True, False):
        loss, sums, asked = loss_of(kl_loss_coef=0.5, kl_straight_through=straight_through)
        assert loss == pytest.approx(POLICY + 0.5 * k3, rel=1e-5) and len(asked) == 1
        assert sums.reduce()["policy/kl_loss"] == pytest.approx(k3 / 0.25, rel=1e-5)


@pytest.mark.parametrize(
    ("aggregation", "denominator"),
    [("token_mean", 6), ("seq_mean_token_sum", 4), ("constant", 12)],
)
def test_the_entropy_bonus_is_over_the_counted_tokens(loss_of, aggregation, denominator):
    """The cut answer, which `--mask_truncated_answers` leaves out, has entropies of 4 and 5."""
    loss, _, asked = loss_of(entropy_coef=0.1, loss_aggregation=aggregation)
    policy = sum(TOKEN_LOSSES) / denominator
    assert loss == pytest.approx(policy - 0.1 * (1 + 2 + 3) / denominator)
    assert asked == [("actor", 0.7, True)]


def test_divergences_from_the_reference_and_from_teachers_are_added_over_the_counted_tokens(
    loss_of,
):
    """Of the three counted tokens 1 + 2 + 3 from the reference, twice that from the first teacher,
    and so on."""
    loss, sums, asked = loss_of(kl_loss_coef=0.5, kl_loss_estimator="full")
    assert loss == pytest.approx(POLICY + 0.5 * 6 / 6) and asked == [
        ("actor", 0.7, False, "reference")
    ]
    assert sums.reduce()["policy/kl_loss"] == pytest.approx(6 / 6 / 0.25)
    loss, sums, asked = loss_of(
        kl_loss_coef=0.5, kl_loss_estimator="full", teachers=["first", "second"], distill_coef=2.0
    )
    assert loss == pytest.approx(POLICY + 0.5 * 6 / 6 + 2 * (2 + 3) * 6 / 6)
    assert asked == [("actor", 0.7, False, "reference", "first", "second")]
    assert sums.reduce()["distill/divergence"] == pytest.approx((2 + 3) * 6 / 6 / 0.25)
    loss, sums, _ = loss_of(advantage_estimator="none", teachers=["first"], distill_coef=2.0)
    assert loss == pytest.approx(2 * 6 / 6) and sums.reduce()["policy/loss"] == 0


def test_observers_read_the_passes_of_the_actor_and_not_those_of_the_full_kl():
    rows = rows_of(
        prompt_ids=torch.full((2, 1), 3), response_ids=torch.tensor([[4, 5, 6], [7, 8, 9]])
    )
    actor, reference = PolicyModel(new_model("llama")), PolicyModel(new_model("llama"))
    full_kl = full_kl_term(reference, 0.5, 1.0)
    observer = PassCount()
    with observed(observer):
        ActorLoss(actor, AlgorithmFlags(), 1.0, terms=[full_kl])(rows, MINIBATCH, 0.0, MetricSums())
    assert observer.passes == 1


@pytest.mark.parametrize(
    ("delta", "advantage", "kept"), [(0.25, -1.0, 1), (0.35, -1.0, 2), (0.25, 1.0, 2)]
)
def test_rows_that_are_off_policy_with_negative_advantages_are_left_out(
    loss_of, delta, advantage, kept
):
    """Mean log p_old - log p_new: -0.4 / 3 of the first row, 0.6 / 2 of the second."""
    rows = rows_of(
        loss_mask=RESPONSE, loss_weights=torch.ones(2, 3), advantages=torch.full((2, 3), advantage)
    )
    loss, sums, _ = loss_of(rows, off_policy_delta=delta, policy_loss="reinforce")
    logprobs = (rows.old_logprobs + LOG_RATIOS)[:kept][RESPONSE[:kept]]
    assert loss == pytest.approx(float(-advantage * logprobs.sum()) / 6)
    assert sums.reduce()["policy/off_policy_share"] == 1 - kept / 2
    assert "policy/off_policy_share" not in loss_of(rows)[1].reduce()


def test_the_value_loss_is_a_mean_over_all_response_tokens(monkeypatch):
    now = torch.tensor([[1.0, 2.0, 3.0], [4.0, 0.1, 9.0]])
    monkeypatch.setattr(
        token_losses, "response_values", lambda critic, *_: now if critic == "critic" else None
    )
    rows, sums = rows_of(returns=torch.full((2, 3), 1.0)), MetricSums()
    # old values 0, clip 0.5: max((v - 1)^2, (clipped - 1)^2) / 2, with clipped values 0.5, 0.5,
    # 0.5, 0.5, 0.1
    expected = (max(0, 0.25) + max(1, 0.25) + max(4, 0.25) + max(9, 0.25) + 0.81) / 2
    assert float(
        critic_loss("critic", rows, MINIBATCH, AlgorithmFlags(value_clip_eps=0.5), sums)
    ) == pytest.approx(expected / 10)
    found = sums.reduce()
    assert found["value/loss"] == pytest.approx(expected / 10 / 0.25)
    assert found["value/clip_fraction"] == pytest.approx(1 / 5), (
        "where the clipped error is the larger one"
    )


@pytest.mark.parametrize("policy_loss", ["ppo", "gspo", "cispo", "sapo", "gmpo"])
def test_without_old_log_probs_the_ratio_is_one_and_the_gradient_that_of_the_log_probs(
    monkeypatch, policy_loss
):
    logprobs = torch.tensor([[-1.0, -2.0, -3.0], [-4.0, -5.0, 9.0]], requires_grad=True)
    monkeypatch.setattr(
        token_losses, "response_logprobs", lambda *_, **__: ResponseLogprobs(logprobs, ENTROPIES)
    )
    rows, sums, recorded = (
        rows_of(old_logprobs=None, row_indices=torch.arange(2)),
        MetricSums(),
        RecordedTokens(["logprobs"]),
    )
    # one advantage for each row, with which the losses of sequences agree with those of tokens
    rows = replace(
        rows, advantages=torch.tensor([[2.0] * 3, [-3.0] * 3]), loss_weights=torch.ones(2, 3)
    )
    flags = AlgorithmFlags(
        policy_loss=policy_loss, loss_aggregation="token_mean", off_policy_delta=0.01
    )
    loss = ActorLoss("actor", flags, 1.0)(rows, MINIBATCH, 0.0, sums, recorded)
    loss.backward()
    torch.testing.assert_close(logprobs.grad, torch.where(COUNTED, -2.0 / 6, 0.0))
    found = sums.reduce()
    assert found["policy/ratio_mean"] == found["policy/ratio_max"] == 1.0
    assert (
        found["policy/log_ratio_abs_max"]
        == found["policy/kl_k3"]
        == found["policy/clip_fraction"]
        == 0.0
    )
    assert found["policy/off_policy_share"] == 0.0
    assert torch.equal(
        recorded.gathered("logprobs", rows), torch.where(RESPONSE, logprobs.detach(), 0.0)
    )


@pytest.mark.parametrize("clip_eps", [0.0, 0.2])
def test_without_old_values_the_targets_follow_from_those_of_the_pass(monkeypatch, clip_eps):
    """gamma 0.5, lambda 0.5; rewards 0, 0, 1 and 0, 2. Errors are -A, as returns are A + V with the
    same V."""
    values = torch.tensor([[1.0, 2.0, 4.0], [3.0, 1.0, 99.0]], requires_grad=True)
    monkeypatch.setattr(token_losses, "response_values", lambda *_: values)
    whole = vars(rows_of(rewards=torch.tensor([[0.0, 0.0, 1.0], [0.0, 2.0, 50.0]]), values=None))
    rows = RewardedRollout(
        **{
            name: whole[name]
            for name in RewardedRollout.__dataclass_fields__
            if name != "row_indices"
        },
        row_indices=torch.arange(2),
    )
    flags = AlgorithmFlags(gamma=0.5, gae_lambda=0.5, value_clip_eps=clip_eps)
    sums, recorded = MetricSums(), RecordedTokens(["values"])
    loss = critic_loss("critic", rows, MINIBATCH, flags, sums, recorded)
    # A_t = r_t + 0.5 V_{t+1} - V_t + 0.25 A_{t+1}
    last, middle = 1.0 - 4.0, 0.5 * 4 - 2 + 0.25 * -3.0
    advantages = [0.5 * 2 - 1 + 0.25 * middle, middle, last, 0.5 * 1 - 3 + 0.25 * 1.0, 2.0 - 1.0]
    assert loss.item() == pytest.approx(sum(a * a for a in advantages) / 2 / 10)
    loss.backward()
    assert values.grad[RESPONSE].tolist() == pytest.approx([-a / 10 for a in advantages]), (
        "targets are constants"
    )
    assert values.grad[1, 2] == 0 and sums.reduce()["value/clip_fraction"] == 0.0
    assert torch.equal(
        recorded.gathered("values", rows), torch.where(RESPONSE, values.detach(), 0.0)
    )


# One optimizer step; engines are stand-ins


# stand for micro-batches
ROWS = [SimpleNamespace(old_logprobs=torch.zeros(1), values=torch.zeros(1)) for _ in range(2)]
STEP = MiniBatch(ROWS, Denominators(3.0, 2.0, 9.0), 5.0, 0.25)
CONSTANTS = {
    "denominators": {"tokens": 3.0, "rows": 2.0, "constant": 9.0},
    "value_tokens": 5.0,
    "metric_weight": 0.25,
}
GOOD, NOT_APPLIED = StepResult(2.0, applied=True), StepResult(math.inf, applied=False)
OVERFLOW = StepResult(math.inf, applied=False, overflow=True)
BAD = StepResult(math.inf, applied=False, fault=Fault("loss", 0, 0, [[math.nan]], [torch.ones(1)]))
WORDS = (
    "--actor_model_name_or_path a --critic_model_name_or_path c --data_path d --output_dir o"
    " --on_nonfinite skip "
)
BOTH = ["actor gradients", "actor applied", "critic gradients", "critic applied"]
ALIGNED = ["actor gradients", "critic gradients", "together actor", "together critic"]
FP16 = "--align_overflow --dtype fp16"


class Named(str):
    """Stands for an engine."""

    module = "model"


class Engines:
    """Stands for `engine.optimizer_step` and the losses: notes what is done and gives prepared
    results."""

    def __init__(self, monkeypatch, log_ratios, **results: StepResult):
        self.done, self.results, self.losses = [], results, {}
        self.log_ratios = torch.tensor(log_ratios)
        for name in ("accumulate", "apply", "apply_together", "critic_loss"):
            monkeypatch.setattr(update, name, getattr(self, name))
        monkeypatch.setattr(update, "ActorLoss", lambda **_: self.actor_loss)

    def actor_loss(self, rows, minibatch, entropy_coef, sums, recorded):
        sums.add_mean(
            "policy/kl_k3", KL_ESTIMATORS["k3"](torch.zeros_like(self.log_ratios), self.log_ratios)
        )
        sums.add_max("policy/counted_log_ratio_abs_max", self.log_ratios.abs())
        sums.add_mean("actor/seen", torch.tensor([1.0]))
        return (rows, entropy_coef)

    def critic_loss(self, critic, rows, minibatch, flags, sums, recorded):
        sums.add_mean("critic/seen", torch.tensor([1.0]))
        return rows

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


def one_step(monkeypatch, words="", actor=GOOD, critic=GOOD, policy=None, log_ratios=(0.2, -0.2)):
    """(the engines, the outcome, the names that applied updates measured, the policy)"""
    config = parse("ppo", (WORDS + words).split())
    engines = Engines(monkeypatch, log_ratios, actor=actor, critic=critic)
    policy = policy or NonFinitePolicy(config.safety)
    roles = SimpleNamespace(actor=Named("actor"), critic="critic", frozen=lambda role: role)
    updates = PPOUpdate(config, None, roles, {}, FixedCoefficient(0.01), policy, PhaseClock())
    objectives = [updates.actor_objective(STEP, 3), updates.critic_objective(STEP, 3)]
    outcome = updates.minimise(objectives, 3)
    measured = sorted(
        name for sums in outcome.sums for name in sums.reduce() if name.endswith("/seen")
    )
    return engines, outcome, measured, policy


def with_a_text(step_loss):
    """A term of an optimizer step that adds a micro-batch, "text"."""

    def of_text(batch, sums):
        sums.add_mean("text/seen", torch.tensor([1.0]))
        return 3.0

    return replace(
        step_loss,
        further_batches=["text"],
        of_further_batch={str: of_text},
        constants=step_loss.constants | {"text_tokens": 6.0},
    )


def test_each_engine_sees_its_micro_batches_and_constants(monkeypatch):
    """What a term adds follows the experience in the actor's step; the loss needs the constants."""
    handled = []
    policy = SimpleNamespace(handle=lambda *given: handled.append(given))
    terms = [StepTerm("text", 0.5, with_a_text)]
    monkeypatch.setattr(update, "step_terms", lambda config, engine, further_batches: terms)
    engines, outcome, measured, _ = one_step(monkeypatch, policy=policy)
    assert engines.losses == {"actor": [(ROWS[0], 0.01), (ROWS[1], 0.01), 3.0], "critic": ROWS}
    of_actor = {**CONSTANTS, "entropy_coef": 0.01, "text_tokens": 6.0, "forbidden_tokens": None}
    assert handled == [
        ("actor", 3, GOOD, "actor", [*ROWS, "text"], of_actor),
        ("critic", 3, GOOD, "critic", ROWS, CONSTANTS),
    ]
    assert measured == ["actor/seen", "critic/seen", "text/seen"] and len(outcome.sums) == 2


# flags, results of actor and critic -> what is done, roles that are updated, whether the PPO step
# ends
OUTCOMES = {
    "in turn": ("", GOOD, GOOD, BOTH, "actor critic", False),
    "bad": ("--target_kl 0.001 --max_log_ratio 0.1", BAD, GOOD, BOTH, "critic", False),
    "overflow": ("--target_kl 0.001", OVERFLOW, GOOD, BOTH, "critic", False),
    "aligned": (f"{FP16} --target_kl 0.01", GOOD, GOOD, ALIGNED, "actor critic", True),
    "aligned overflow": (FP16, OVERFLOW, NOT_APPLIED, ALIGNED, "", False),
    "no overflow in bf16": (
        "--align_overflow --dtype bf16",
        GOOD,
        GOOD,
        BOTH,
        "actor critic",
        False,
    ),
    "forbidden": (
        "--max_log_ratio 0.1",
        GOOD,
        GOOD,
        ["actor gradients", "actor refused"],
        "",
        True,
    ),
    "forbidden, aligned": (
        f"{FP16} --max_log_ratio 0.1",
        GOOD,
        GOOD,
        ["actor gradients", "actor refused"],
        "",
        True,
    ),
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
    assert measured == [f"{role}/seen" for role in updated.split()], (
        "metrics of applied updates alone"
    )
    assert policy.metrics("actor", "critic") == {
        "optim/nonfinite_skipped": float(actor is BAD),
        "optim/overflow/actor": float(actor is OVERFLOW),
        "optim/overflow/critic": 0,
    }


def test_gradients_of_the_critic_that_wait_are_dropped_with_a_forbidden_aligned_update(monkeypatch):
    """Else they would be added to those of the next step."""
    config = parse("ppo", f"{WORDS} {FP16} --max_log_ratio 0.1".split())
    engines = Engines(monkeypatch, (0.2, -0.2), actor=GOOD, critic=GOOD)
    roles = SimpleNamespace(actor=Named("actor"), critic="critic", frozen=lambda role: role)
    updates = PPOUpdate(
        config,
        None,
        roles,
        {},
        FixedCoefficient(0.01),
        NonFinitePolicy(config.safety),
        PhaseClock(),
    )
    critic = replace(
        updates.critic_objective(STEP, 3), gradients=SimpleNamespace(engine="critic", fault=None)
    )
    assert updates.minimise([updates.actor_objective(STEP, 3), critic], 3).ends_step
    assert engines.done == ["actor gradients", "actor refused", "critic refused"]


@pytest.mark.parametrize(
    ("log_ratios", "forbidden"),
    [
        ((0.25, 0.0), False),
        ((-0.25, 0.0), False),
        ((0.0, 0.2500001), True),
        ((0.0, -0.2500001), True),
    ],
)
def test_a_limit_is_the_last_number_that_is_allowed(monkeypatch, log_ratios, forbidden):
    outcome = one_step(monkeypatch, "--max_log_ratio 0.25", log_ratios=log_ratios)[1]
    assert outcome.ends_step is forbidden and ("actor" not in outcome.grad_norms) is forbidden
