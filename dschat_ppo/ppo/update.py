"""One optimizer step of actor and critic: what each of them minimises, and the reasons to skip the
update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field
from typing import Any

from torch import Tensor

from dschat_ppo.algorithms.controllers import AdaptiveEntropy, FixedCoefficient
from dschat_ppo.common.logging import logger
from dschat_ppo.common.phases import PhaseClock, block
from dschat_ppo.config.ppo_config import PPOConfig
from dschat_ppo.engine.optimizer_step import (
    Gradients,
    StepResult,
    accumulate,
    apply,
    apply_together,
)
from dschat_ppo.engine.rlhf_engine import RLHFEngine
from dschat_ppo.engine.step_loss import StepLoss, step_terms, with_terms
from dschat_ppo.monitor.metric_sums import MetricSums
from dschat_ppo.nonfinite import NonFinitePolicy
from dschat_ppo.ppo.loss_terms import loss_terms
from dschat_ppo.ppo.mini_dataset import MiniBatch
from dschat_ppo.ppo.token_losses import (
    KL_OF_UPDATE,
    LARGEST_LOG_RATIO,
    TOKENS_OF_ACTOR,
    TOKENS_OF_CRITIC,
    ActorLoss,
    RecordedTokens,
    critic_loss,
)
from dschat_ppo.ppo.token_records import TokenRecord
from dschat_ppo.types import (
    Engine,
    Experience,
    ForbiddenTokens,
    RewardedRollout,
    row_sequences,
)


@dataclass(frozen=True)
class EngineObjective:
    """What one engine minimises in an optimizer step."""

    role: str  # "actor" or "critic"
    engine: Engine
    step_loss: StepLoss
    # of the pass: log-probs or values where scoring has computed none, and the numbers of records
    recorded: RecordedTokens | None = None
    gradients: Gradients[Any] | None = None  # of a pass that is already made


@dataclass(frozen=True)
class Outcome:
    """The result of an optimizer step."""

    grad_norms: dict[str, float]  # by role, of the updates that were applied
    sums: list[MetricSums]  # metrics of the updates that were applied
    ends_step: bool = False  # a limit ends the updates of this PPO step
    # by role, those whose gradients are finite, with what their passes have recorded
    objectives: Mapping[str, EngineObjective] = field(default_factory=dict)


@dataclass(eq=False)
class PPOUpdate:
    """Builds the objectives of actor and critic, and makes optimizer steps."""

    config: PPOConfig
    forbidden_tokens: ForbiddenTokens | None  # of sampling
    engines: RLHFEngine
    further_batches: Mapping[str, Any]  # batches that features have added to the run, by name
    entropy_coef: AdaptiveEntropy | FixedCoefficient
    nonfinite: NonFinitePolicy
    clock: PhaseClock
    token_records: Sequence[TokenRecord] = ()

    def __post_init__(self) -> None:
        """Build the loss of the actor."""
        actor = self.engines.actor
        token_terms = loss_terms(self.config, self.engines.frozen, self.forbidden_tokens)
        self.actor_loss = ActorLoss(
            actor=actor,
            flags=self.config.algorithm,
            temperature=self.config.ppo.temperature,
            forbidden_tokens=self.forbidden_tokens,
            terms=token_terms,
            has_policy_loss=self.config.has_policy_loss,
        )
        # of the actor's loss over a whole optimizer step
        self.step_terms = step_terms(self.config, actor, self.further_batches)

    def actor_sum(self) -> str:
        """The loss of the actor as the sum of its terms, for the log."""
        summands = []
        if self.config.has_policy_loss:
            summands.append(self.config.algorithm.policy_loss)
        if isinstance(self.entropy_coef, AdaptiveEntropy):
            summands.append("- c entropy (c adapts to --entropy_target)")
        elif self.entropy_coef.value > 0:
            summands.append(f"- {self.entropy_coef.value:g} entropy")
        for loss_term in self.actor_loss.terms:
            summands.append(f"+ {loss_term.coef:g} {loss_term.name}")
        for step_term in self.step_terms:
            summands.append(f"+ {step_term.coef:g} {step_term.name}")
        return " ".join(summands).removeprefix("+ ")

    def actor_objective(self, minibatch: MiniBatch[Experience], step: int) -> EngineObjective:
        """The policy loss of the `minibatch`, with the terms of the whole optimizer step, which may
        take further data, and run forward passes over the mini-batch. `step`: the PPO step.
        Collective."""
        entropy_coef = self.entropy_coef.value
        recorded = None
        if self._is_recorded(step):
            recorded = RecordedTokens(TOKENS_OF_ACTOR)
        elif minibatch.micro_batches[0].old_logprobs is None:
            recorded = RecordedTokens(["logprobs"])

        def of_rows(rows: Experience, sums: MetricSums) -> Tensor:
            return self.actor_loss(rows, minibatch, entropy_coef, sums, recorded)

        constants = _constants(minibatch)
        constants["entropy_coef"] = entropy_coef
        constants["forbidden_tokens"] = None
        if self.forbidden_tokens is not None:
            constants["forbidden_tokens"] = astuple(self.forbidden_tokens)
        step_loss = StepLoss(
            batches=minibatch.micro_batches,
            of_batch=of_rows,
            rows_of=_rows_with_response,
            sums=MetricSums(),
            metric_prefix="policy/",
            constants=constants,
        )
        with self.clock.phase("train"):
            step_loss = with_terms(step_loss, self.step_terms)
        return EngineObjective("actor", self.engines.actor, step_loss, recorded)

    def critic_objective(
        self,
        minibatch: MiniBatch[RewardedRollout] | MiniBatch[Experience],
        step: int,
    ) -> EngineObjective:
        """The value loss of the `minibatch` of a PPO step; nothing is computed yet. The values of
        the pass are kept where scoring has computed none."""
        critic = self.engines.critic
        flags = self.config.algorithm
        assert critic is not None
        recorded = None
        if self._is_recorded(step):
            recorded = RecordedTokens(TOKENS_OF_CRITIC)
        elif minibatch.micro_batches[0].values is None:
            recorded = RecordedTokens(["values"])

        def of_rows(rows: RewardedRollout, sums: MetricSums) -> Tensor:
            return critic_loss(critic, rows, minibatch, flags, sums, recorded)

        step_loss = StepLoss(
            batches=minibatch.micro_batches,
            of_batch=of_rows,
            rows_of=_rows_with_response,
            sums=MetricSums(),
            constants=_constants(minibatch),
        )
        return EngineObjective("critic", critic, step_loss, recorded)

    def _is_recorded(self, step: int) -> bool:
        """Whether a record of the tokens of this PPO step is due."""
        return any(record.is_due(step) for record in self.token_records)

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
        finite: dict[str, EngineObjective] = {}  # by role
        # the gradients of a pass that is already made are in memory: their update comes first
        with_gradients = [each for each in objectives if each.gradients is not None]
        without_gradients = [each for each in objectives if each.gradients is None]
        waiting: list[tuple[EngineObjective, Gradients[Any]]] = []  # for --align_overflow
        with self.clock.phase("train"):
            for objective in [*with_gradients, *without_gradients]:
                gradients = self._gradients_of(objective)
                if gradients.fault is None:
                    finite[objective.role] = objective
                if objective.role == "actor" and gradients.fault is None:
                    refused = "--max_log_ratio: the update is not applied"
                    if _is_above(
                        flags.max_log_ratio, LARGEST_LOG_RATIO, objective.step_loss.sums, refused
                    ):
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
                actor_sums = objectives[0].step_loss.sums
                ends_step = _is_above(flags.target_kl, KL_OF_UPDATE, actor_sums, consequence)
        return Outcome(outcome.grad_norms, outcome.sums, ends_step, finite)

    def _gradients_of(self, objective: EngineObjective) -> Gradients[Any]:
        """The gradients of the pass that is already made, else of one that is made here."""
        if objective.gradients is not None:
            return objective.gradients
        with block(f"train {objective.role}"), self.clock.part(objective.role):
            return accumulate(
                objective.engine, objective.step_loss.all_batches, objective.step_loss
            )

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
            objective.role,
            step,
            result,
            objective.engine,
            objective.step_loss.all_batches,
            dict(objective.step_loss.constants),
        )
        if result.applied:
            outcome.grad_norms[objective.role] = result.grad_norm
            outcome.sums.append(objective.step_loss.sums)


def _rows_with_response(rows: RewardedRollout) -> Tensor:
    """(b,) bool, or with contexts (S,), True for sequences of rows that do not only fill a
    micro-batch."""
    is_counted = rows.response_mask.any(dim=1)
    if rows.contexts is None:
        return is_counted
    return is_counted[row_sequences(rows).rows]


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
    """The numbers of a mini-batch that belong to the whole optimizer step, by name."""
    return {
        "denominators": asdict(minibatch.denominators),
        "value_tokens": minibatch.value_tokens,
        "metric_weight": minibatch.metric_weight,
    }
