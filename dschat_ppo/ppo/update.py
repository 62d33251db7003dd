"""One optimizer step of actor and critic: the losses of a micro-batch, and the reasons to skip the
update.

The loss of a micro-batch is its part of the loss of the whole optimizer step, so the parts add up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dschat_ppo.algorithms.actor_critic_losses import (
    POLICY_LOSSES,
    PolicyLossSettings,
    PolicyTerms,
    value_losses,
)
from dschat_ppo.algorithms.advantage_estimators import AdvantageInputs, gae
from dschat_ppo.algorithms.aggregation import aggregate
from dschat_ppo.algorithms.controllers import AdaptiveEntropy, FixedCoefficient
from dschat_ppo.algorithms.correction import off_policy_rows
from dschat_ppo.algorithms.kl import kl_k3, kl_loss
from dschat_ppo.common import dist
from dschat_ppo.common.logging import logger
from dschat_ppo.common.own_functions import function_named
from dschat_ppo.common.phases import PhaseClock, block
from dschat_ppo.config.algorithm_flags import AlgorithmFlags
from dschat_ppo.config.ppo_config import PPOConfig
from dschat_ppo.data.batches import SFTBatch
from dschat_ppo.engine.optimizer_step import (
    Gradients,
    StepResult,
    accumulate,
    apply,
    apply_together,
)
from dschat_ppo.engine.rlhf_engine import RLHFEngine
from dschat_ppo.engine.router_term import router_settings, with_router_term
from dschat_ppo.models.wrapped_models import response_logprobs, response_values
from dschat_ppo.monitor.metric_sums import MetricSums
from dschat_ppo.nonfinite import NonFinitePolicy
from dschat_ppo.ppo.mini_dataset import MiniBatch, TextBatches
from dschat_ppo.ppo.teaching import Teachers, full_kl_reference, teachers_of
from dschat_ppo.types import Engine, Experience, MinimumLength, Model, RewardedRollout, Rollout


class RecordedTokens:
    """One number for each response token, from the micro-batches of one optimizer step."""

    def __init__(self) -> None:
        self._parts: dict[int, tuple[RewardedRollout, Tensor]] = {}

    def record(self, rows: RewardedRollout, numbers: Tensor) -> None:
        """Keep the numbers of a micro-batch, (b, R) fp32. A second pass over the same one replaces
        them."""
        self._parts[id(rows)] = (rows, numbers.detach())

    def gathered(self, rows: Rollout) -> Tensor:
        """The numbers of all ranks, (N, R) fp32 on the device of `rows`, 0 outside their mask.
        `rows` are the N rows that the micro-batches of all ranks were taken from. Collective."""
        device = next(iter(self._parts.values()))[1].device
        found = torch.zeros(rows.response_mask.shape, device=device)
        for part, numbers in self._parts.values():
            assert part.numbers is not None
            columns = slice(numbers.shape[1])
            # a micro-batch that fills up this rank's share repeats a row, with no token in its mask
            found[part.numbers, columns] = torch.where(
                part.response_mask, numbers, found[part.numbers, columns]
            )
        if dist.sequence_rank() > 0:  # another rank has recorded the same rows
            found.zero_()
        return dist.all_reduce(found).to(rows.response_mask.device)


# Metrics that compare the policy in training with the one at scoring, over the tokens that the
# policy loss counts.
KL_OF_UPDATE = "policy/kl_k3"
LARGEST_LOG_RATIO = "policy/counted_log_ratio_abs_max"


@dataclass(eq=False)
class ActorLoss:
    """Policy loss, entropy bonus, KL to the reference, and divergence from teachers."""

    actor: Model
    reference: Teachers | None  # the reference, which only the full KL as a loss needs
    flags: AlgorithmFlags
    temperature: float
    minimum_length: MinimumLength | None = None
    teachers: Teachers | None = None
    distill_coef: float = 0.0  # weight of the divergence from the teachers

    def __post_init__(self) -> None:
        flags = self.flags
        # without an estimator the loss of the teachers is the only one, unless they are in the
        # advantages
        self.has_policy_loss = flags.advantage_estimator != "none" or self.teachers is None
        self.policy_loss = function_named("--policy_loss", flags.policy_loss, POLICY_LOSSES)
        self.settings = PolicyLossSettings(
            clip_eps_low=flags.clip_eps if flags.clip_eps_low is None else flags.clip_eps_low,
            clip_eps_high=flags.clip_eps if flags.clip_eps_high is None else flags.clip_eps_high,
            dual_clip=flags.dual_clip,
            sapo_tau_positive=flags.sapo_tau_positive,
            sapo_tau_negative=flags.sapo_tau_negative,
        )

    def __call__(
        self,
        rows: Experience,
        minibatch: MiniBatch,
        entropy_coef: float,
        sums: MetricSums,
        recorded: RecordedTokens | None = None,
    ) -> Tensor:
        """The loss of one micro-batch (b, R), a scalar with gradient. Without `rows.old_logprobs`,
        the log-probs of this pass are the old ones: the ratio is exactly 1, and its gradient is
        that of the log-probs. `minibatch` holds the denominators."""
        flags, mask = self.flags, rows.loss_mask
        aggregation, denominators = flags.aggregation, minibatch.denominators
        own_prompts = replace(
            rows, teachers=None, teacher_prompt_ids=None, teacher_prompt_mask=None
        )
        of_reference = [] if self.reference is None else self.reference.teachings(own_prompts)
        of_teachers = [] if self.teachers is None else self.teachers.teachings(rows)
        current = response_logprobs(
            self.actor,
            rows,
            self.temperature,
            entropy_coef > 0,
            self.minimum_length,
            teachings=of_reference + of_teachers,
        )
        old_logprobs = current.logprobs.detach() if rows.old_logprobs is None else rows.old_logprobs
        if recorded is not None:
            recorded.record(rows, current.logprobs)
        terms = PolicyTerms(current.logprobs, old_logprobs, rows.advantages, mask, rows.selected)
        policy = self.policy_loss(terms, self.settings)  # losses (b, R)
        weights = rows.loss_weights  # (b, R)
        if flags.off_policy_delta is not None:
            keep = off_policy_rows(
                current.logprobs, old_logprobs, rows.advantages, mask, flags.off_policy_delta
            )
            sums.add_mean("policy/off_policy_share", 1 - keep.float(), mask.any(dim=1))
            weights = weights * keep.unsqueeze(1)
        loss = aggregate(policy.losses * weights, mask, aggregation, denominators)
        loss = loss if self.has_policy_loss else loss.new_zeros(())
        weight = loss.new_full((), minibatch.metric_weight)
        sums.add_sum("policy/loss", loss, weight)
        log_ratio = (current.logprobs - old_logprobs).detach()  # (b, R)
        sums.add_mean("policy/entropy", current.entropy.detach(), rows.response_mask)
        sums.add_mean("policy/ratio_mean", policy.ratio, mask)
        sums.add_max("policy/ratio_max", policy.ratio, mask)
        sums.add_mean("policy/clip_fraction", policy.clipped.float(), mask)
        sums.add_mean("policy/approx_kl", -log_ratio, rows.response_mask)
        sums.add_mean("policy/log_ratio_abs_mean", log_ratio.abs(), rows.response_mask)
        sums.add_max("policy/log_ratio_abs_max", log_ratio.abs(), rows.response_mask)
        sums.add_mean(KL_OF_UPDATE, kl_k3(old_logprobs, current.logprobs.detach()), mask)
        sums.add_max(LARGEST_LOG_RATIO, log_ratio.abs(), mask)
        if entropy_coef > 0:
            loss = loss - entropy_coef * aggregate(current.entropy, mask, aggregation, denominators)
        if flags.kl_loss_coef > 0:
            if flags.full_kl_loss:
                kl = current.divergences[0]  # (b, R)
            else:
                assert rows.ref_logprobs is not None
                estimator, straight = flags.kl_loss_estimator, flags.kl_straight_through
                kl = kl_loss(current.logprobs, rows.ref_logprobs, estimator, straight)
            kl = aggregate(kl, mask, aggregation, denominators)
            sums.add_sum("policy/kl_loss", kl, weight)
            loss = loss + flags.kl_loss_coef * kl
        if of_teachers:
            # (b, R)
            divergence = torch.stack([*current.divergences[len(of_reference) :]]).sum(dim=0)
            divergence = aggregate(divergence, mask, aggregation, denominators)
            sums.add_sum("distill/divergence", divergence, weight)
            loss = loss + self.distill_coef * divergence
        return loss


def critic_loss(
    critic: Model,
    rows: RewardedRollout,
    minibatch: MiniBatch,
    flags: AlgorithmFlags,
    sums: MetricSums,
    recorded: RecordedTokens | None = None,
) -> Tensor:
    """Clipped or plain value loss, averaged over the response tokens of the optimizer step; scalar
    with gradient.

    If the micro-batch `rows` (b, R) is no `Experience`, the values of this pass are the old ones,
    and the targets are computed from them: generalised advantage estimation needs no other rows.
    `minibatch` holds the denominator.
    """
    mask, values = rows.response_mask, response_values(critic, rows)
    if recorded is not None:
        recorded.record(rows, values)
    if isinstance(rows, Experience):
        assert rows.values is not None
        old_values, returns = rows.values, rows.returns
    else:
        old_values = values.detach()
        inputs = AdvantageInputs(
            rows.rewards, old_values, mask, rows.groups, None, flags.gamma, flags.gae_lambda
        )
        _, returns = gae(inputs)
    losses, clipped = value_losses(values, old_values, returns, mask, flags.value_clip_eps)
    loss = losses.sum() / minibatch.value_tokens
    sums.add_sum("value/loss", loss, loss.new_full((), minibatch.metric_weight))
    sums.add_mean("value/clip_fraction", clipped.float(), mask)
    return loss


def ptx_loss(actor: Model, batch: SFTBatch, num_tokens: Tensor, sums: MetricSums) -> Tensor:
    """Sum of `-log p(token)` of plain text, divided by `num_tokens` of the optimizer step; scalar
    with gradient."""
    logprobs = actor(batch.input_ids, batch.loss_mask)[0]
    sums.add_mean("policy/ptx_loss", -logprobs.detach())
    return -logprobs.sum() / num_tokens


@dataclass(frozen=True)
class Objective:
    """What one engine minimises in an optimizer step."""

    role: str  # "actor" or "critic"
    engine: Engine
    batches: list[Any]  # micro-batches of this rank
    loss: Callable[[Any], Tensor]  # a micro-batch's part of the loss
    sums: MetricSums  # metrics that the loss records, of this optimizer step alone
    constants: dict[str, Any]  # what a replay needs besides the micro-batches
    # log-probs or values of the pass, where scoring has computed none
    recorded: RecordedTokens | None = None
    gradients: Gradients[Any] | None = None  # of a pass that is already made


@dataclass(frozen=True)
class Outcome:
    """The result of an optimizer step."""

    grad_norms: dict[str, float]  # by role, of the updates that were applied
    sums: list[MetricSums]  # metrics of the updates that were applied
    ends_step: bool = False  # a limit ends the updates of this PPO step
    # of the actor's pass, where scoring has computed none and all are finite
    logprobs: RecordedTokens | None = None


@dataclass(eq=False)
class PPOUpdate:
    """Builds the objectives of actor and critic, and makes optimizer steps."""

    config: PPOConfig
    minimum_length: MinimumLength | None  # of sampling
    engines: RLHFEngine
    texts: TextBatches | None  # blocks for the PTX loss
    entropy_coef: AdaptiveEntropy | FixedCoefficient
    nonfinite: NonFinitePolicy
    clock: PhaseClock

    def __post_init__(self) -> None:
        flags, temperature, actor = (
            self.config.algorithm,
            self.config.ppo.temperature,
            self.engines.actor,
        )
        coef = flags.router_loss_coef
        self.router = router_settings(coef, actor.module) if coef > 0 else None
        reference, teachers = self.engines.reference, None
        if self.config.distill_loss_coef > 0:
            teachers = teachers_of(
                self.config, self.engines.teachers, reference, self.minimum_length
            )
        self.actor_loss = ActorLoss(
            actor,
            full_kl_reference(self.config, reference, self.minimum_length),
            flags,
            temperature,
            self.minimum_length,
            teachers,
            self.config.distill_loss_coef,
        )

    def actor_objective(self, minibatch: MiniBatch[Experience]) -> Objective:
        """The policy loss of the experience and, with PTX, the loss of plain text in the same
        optimizer step. Collective with `--router_loss_coef`, whose term is over the experience."""
        texts, text_tokens = self.texts.take() if self.texts else ([], torch.ones(()))
        actor, ptx_coef, entropy_coef = (
            self.engines.actor,
            self.config.ppo.unsup_coef,
            self.entropy_coef.value,
        )
        sums = MetricSums()
        recorded = RecordedTokens() if minibatch.micro_batches[0].old_logprobs is None else None

        def policy_loss(rows: Experience, sums: MetricSums) -> Tensor:
            return self.actor_loss(rows, minibatch, entropy_coef, sums, recorded)

        with_router = None
        if self.router is not None:
            with self.clock.phase("train"):
                with_router = with_router_term(
                    self.router,
                    "policy/router_loss",
                    minibatch.micro_batches,
                    policy_loss,
                    lambda rows: rows.response_mask.any(dim=1),
                    sums,
                )

        def loss(rows: Experience | SFTBatch) -> Tensor:
            if isinstance(rows, SFTBatch):
                return ptx_coef * ptx_loss(actor, rows, text_tokens, sums)
            return policy_loss(rows, sums) if with_router is None else with_router(rows)

        constants = {**_constants(minibatch), "entropy_coef": entropy_coef}
        constants["text_tokens"] = text_tokens
        constants["minimum_length"] = self.minimum_length and (
            self.minimum_length.ids,
            self.minimum_length.minimum,
        )
        return Objective(
            "actor", actor, [*minibatch.micro_batches, *texts], loss, sums, constants, recorded
        )

    def critic_objective(
        self,
        minibatch: MiniBatch[RewardedRollout] | MiniBatch[Experience],
        recorded: RecordedTokens | None = None,
    ) -> Objective:
        """The value loss of the experience. `recorded` receives the values, of rows that have
        none."""
        critic, flags, sums = self.engines.critic, self.config.algorithm, MetricSums()
        assert critic is not None

        def loss(rows: RewardedRollout) -> Tensor:
            return critic_loss(critic, rows, minibatch, flags, sums, recorded)

        return Objective(
            "critic", critic, minibatch.micro_batches, loss, sums, _constants(minibatch), recorded
        )

    def minimise(self, objectives: Sequence[Objective], step: int) -> Outcome:
        """Forward, backward and one update of each engine; the actor's objective, if there is one,
        is the first. `NonFiniteError` if a loss or gradient is not finite, and the run is to stop.
        Collective.

        An actor's update that `--max_log_ratio` forbids skips the critic's as well; `--target_kl`
        makes an update the PPO step's last one. Both compare the policy in this forward pass with
        the one that scored the answers, over the tokens of all ranks, so every rank decides alike.
        With `--align_overflow`, the gradients of both engines are computed before either update;
        otherwise those that wait are applied first, so that one engine's are in memory.
        """
        outcome, flags = Outcome({}, []), self.config.algorithm
        logprobs: RecordedTokens | None = None
        waiting: list[tuple[Objective, Gradients[Any]]] = []  # for --align_overflow
        with self.clock.phase("train"):
            for objective in sorted(objectives, key=lambda objective: objective.gradients is None):
                with block(f"train {objective.role}"), self.clock.part(objective.role):
                    gradients = objective.gradients or accumulate(
                        objective.engine, objective.batches, objective.loss
                    )
                if objective.role == "actor" and gradients.fault is None:
                    logprobs, refused = (
                        objective.recorded,
                        "--max_log_ratio: the update is not applied",
                    )
                    if _is_above(flags.max_log_ratio, LARGEST_LOG_RATIO, objective.sums, refused):
                        for unused in (gradients, *(waits for _, waits in waiting)):
                            apply(unused, refused=True)
                        return Outcome({}, [], ends_step=True)
                if self.config.aligns_overflow:
                    waiting.append((objective, gradients))
                else:
                    with block(f"update {objective.role}"), self.clock.part(objective.role):
                        result = apply(gradients)
                    self._record_result(objective, result, step, outcome)
            with block("update actor and critic") if waiting else nullcontext():
                results = apply_together([gradients for _, gradients in waiting])
            for (objective, _), result in zip(waiting, results, strict=True):
                self._record_result(objective, result, step, outcome)
            ends = "actor" in outcome.grad_norms and _is_above(
                flags.target_kl,
                KL_OF_UPDATE,
                objectives[0].sums,
                "--target_kl: it was the PPO step's last update",
            )
        return Outcome(outcome.grad_norms, outcome.sums, ends, logprobs)

    def _record_result(
        self, objective: Objective, result: StepResult, step: int, outcome: Outcome
    ) -> None:
        """Record an update that was applied; handle a number that is not finite."""
        self.nonfinite.handle(
            objective.role, step, result, objective.engine, objective.batches, objective.constants
        )
        if result.applied:
            outcome.grad_norms[objective.role] = result.grad_norm
            outcome.sums.append(objective.sums)


def _is_above(limit: float | None, name: str, sums: MetricSums, consequence: str) -> bool:
    """Whether the metric `name` is above a limit, if one is set; logs it. Collective with a
    limit."""
    if limit is None:
        return False
    measured = sums.reduce()[name]
    if measured > limit:
        logger().info(f"{name} of {measured:.4g} is above {consequence}")
    return measured > limit


def _constants(minibatch: MiniBatch) -> dict[str, Any]:
    """The numbers of a mini-batch that belong to the whole optimizer step, under their names in
    repro bundles."""
    return {
        "over": asdict(minibatch.denominators),
        "value_tokens": minibatch.value_tokens,
        "share": minibatch.metric_weight,
    }
