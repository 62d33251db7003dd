"""One optimizer step of actor and critic: what each of them minimises, and the reasons to skip the
update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from dschat_ppo.algorithms.controllers import AdaptiveEntropy, FixedCoefficient
from dschat_ppo.common.logging import logger
from dschat_ppo.common.phases import PhaseClock, block
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
from dschat_ppo.monitor.metric_sums import MetricSums
from dschat_ppo.nonfinite import NonFinitePolicy
from dschat_ppo.ppo.mini_dataset import MiniBatch, TextBatches
from dschat_ppo.ppo.teaching import full_kl_reference, teachers_of
from dschat_ppo.ppo.token_losses import (
    KL_OF_UPDATE,
    LARGEST_LOG_RATIO,
    ActorLoss,
    RecordedTokens,
    critic_loss,
    ptx_loss,
)
from dschat_ppo.types import Engine, Experience, MinimumLength, RewardedRollout


@dataclass(frozen=True)
class EngineObjective:
    """What one engine minimises in an optimizer step."""

    role: str  # "actor" or "critic"
    engine: Engine
    batches: list[Any]  # micro-batches of this rank
    loss: Callable[[Any], Tensor]  # a micro-batch's share of the loss
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
        """Build the loss of the actor."""
        flags = self.config.algorithm
        actor = self.engines.actor
        coef = flags.router_loss_coef
        self.router = None
        if coef > 0:
            self.router = router_settings(coef, actor.module)
        reference = self.engines.reference
        teachers = None
        if self.config.distill_loss_coef > 0:
            teachers = teachers_of(
                self.config, self.engines.teachers, reference, self.minimum_length
            )
        self.actor_loss = ActorLoss(
            actor=actor,
            reference=full_kl_reference(self.config, reference, self.minimum_length),
            flags=flags,
            temperature=self.config.ppo.temperature,
            minimum_length=self.minimum_length,
            teachers=teachers,
            distill_coef=self.config.distill_loss_coef,
        )

    def actor_objective(self, minibatch: MiniBatch[Experience]) -> EngineObjective:
        """The policy loss of the `minibatch` and, with PTX, the loss of plain text in the same
        optimizer step, for which this takes the next texts. Nothing is computed yet, but with
        `--router_loss_coef` the load of the experts, by forward passes over the mini-batch;
        collective then."""
        texts: list[SFTBatch] = []
        text_tokens = torch.ones(())
        if self.texts:
            texts, text_tokens = self.texts.take()
        actor = self.engines.actor
        ptx_coef = self.config.ppo.unsup_coef
        entropy_coef = self.entropy_coef.value
        sums = MetricSums()
        recorded = None
        if minibatch.micro_batches[0].old_logprobs is None:
            recorded = RecordedTokens()

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
            if with_router is None:
                return policy_loss(rows, sums)
            return with_router(rows)

        constants = _constants(minibatch)
        constants["entropy_coef"] = entropy_coef
        constants["text_tokens"] = text_tokens
        constants["minimum_length"] = None
        if self.minimum_length is not None:
            constants["minimum_length"] = (self.minimum_length.ids, self.minimum_length.minimum)
        return EngineObjective(
            role="actor",
            engine=actor,
            batches=[*minibatch.micro_batches, *texts],
            loss=loss,
            sums=sums,
            constants=constants,
            recorded=recorded,
        )

    def critic_objective(
        self,
        minibatch: MiniBatch[RewardedRollout] | MiniBatch[Experience],
        recorded: RecordedTokens | None = None,
    ) -> EngineObjective:
        """The value loss of the `minibatch`; nothing is computed yet. `recorded` receives the
        values of the pass, where scoring has computed none."""
        critic = self.engines.critic
        flags = self.config.algorithm
        sums = MetricSums()
        assert critic is not None

        def loss(rows: RewardedRollout) -> Tensor:
            return critic_loss(critic, rows, minibatch, flags, sums, recorded)

        return EngineObjective(
            role="critic",
            engine=critic,
            batches=minibatch.micro_batches,
            loss=loss,
            sums=sums,
            constants=_constants(minibatch),
            recorded=recorded,
        )

    def minimise(self, objectives: Sequence[EngineObjective], step: int) -> Outcome:
        """Forward, backward and one update of each engine of the `objectives`, of which that of the
        actor, if there is one, is the first. `NonFiniteError` if a loss or gradient is not finite,
        and the run is to stop. Collective.

        An actor's update that `--max_log_ratio` forbids skips the critic's as well; `--target_kl`
        makes an update the PPO step's last one. Both compare the policy in this forward pass with
        the one that scored the answers, over the tokens of all ranks, so every rank decides alike.
        With `--align_overflow`, the gradients of both engines are computed before either update;
        otherwise those that wait are applied first, so that one engine's are in memory.
        """
        outcome = Outcome({}, [])  # `_record_result` fills it
        flags = self.config.algorithm
        logprobs: RecordedTokens | None = None
        # the gradients of a pass that is already made are in memory: their update comes first
        with_gradients = [each for each in objectives if each.gradients is not None]
        without_gradients = [each for each in objectives if each.gradients is None]
        waiting: list[tuple[EngineObjective, Gradients[Any]]] = []  # for --align_overflow
        with self.clock.phase("train"):
            for objective in [*with_gradients, *without_gradients]:
                gradients = self._gradients_of(objective)
                if objective.role == "actor" and gradients.fault is None:
                    logprobs = objective.recorded
                    refused = "--max_log_ratio: the update is not applied"
                    if _is_above(flags.max_log_ratio, LARGEST_LOG_RATIO, objective.sums, refused):
                        apply(gradients, refused=True)
                        for _, waiting_gradients in waiting:
                            apply(waiting_gradients, refused=True)
                        return Outcome({}, [], ends_step=True)
                if self.config.aligns_overflow:
                    waiting.append((objective, gradients))
                else:
                    with block(f"update {objective.role}"), self.clock.part(objective.role):
                        result = apply(gradients)
                    self._record_result(objective, result, step, outcome)
            if waiting:
                self._update_together(waiting, step, outcome)
            ends_step = False
            if "actor" in outcome.grad_norms:
                consequence = "--target_kl: it was the PPO step's last update"
                actor_sums = objectives[0].sums
                ends_step = _is_above(flags.target_kl, KL_OF_UPDATE, actor_sums, consequence)
        return Outcome(outcome.grad_norms, outcome.sums, ends_step, logprobs)

    def _gradients_of(self, objective: EngineObjective) -> Gradients[Any]:
        """The gradients of the pass that is already made, else of one that is made here."""
        if objective.gradients is not None:
            return objective.gradients
        with block(f"train {objective.role}"), self.clock.part(objective.role):
            return accumulate(objective.engine, objective.batches, objective.loss)

    def _update_together(
        self,
        waiting: Sequence[tuple[EngineObjective, Gradients[Any]]],
        step: int,
        outcome: Outcome,
    ) -> None:
        """Update the engines with the gradients that wait, or none of them if one has overflown
        (`--align_overflow`)."""
        with block("update actor and critic"):
            results = apply_together([gradients for _, gradients in waiting])
        for (objective, _), result in zip(waiting, results, strict=True):
            self._record_result(objective, result, step, outcome)

    def _record_result(
        self, objective: EngineObjective, result: StepResult, step: int, outcome: Outcome
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
        "denominators": asdict(minibatch.denominators),
        "value_tokens": minibatch.value_tokens,
        "metric_weight": minibatch.metric_weight,
    }
