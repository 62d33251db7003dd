"""One optimizer step of actor and critic, and the reasons to skip it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dschat_ppo.algorithms.controllers import AdaptiveEntropy, FixedCoefficient
from dschat_ppo.common.logging import logger
from dschat_ppo.common.phases import PhaseClock, block
from dschat_ppo.config.steps import PPOConfig
from dschat_ppo.data.collators import SFTBatch
from dschat_ppo.engine.optimizer_step import Gradients, accumulate, apply, apply_together
from dschat_ppo.engine.rlhf_engine import RLHFEngine
from dschat_ppo.engine.router_term import router_settings, with_router_term
from dschat_ppo.engine.skip_update import StepResult
from dschat_ppo.monitor.metric_sums import MetricSums
from dschat_ppo.nonfinite.nonfinite_policy import NonFinitePolicy
from dschat_ppo.nonfinite.repro_bundle import FailureContext
from dschat_ppo.ppo.losses import KL_OF_UPDATE, LARGEST_LOG_RATIO, ActorLoss, RecordedTokens, critic_loss, ptx_loss
from dschat_ppo.ppo.mini_dataset import MiniBatch, TextBatches
from dschat_ppo.types import Engine, Experience, LateEnds, RewardedRollout


@dataclass(frozen=True)
class Objective:
    """What one engine minimises in an optimizer step."""

    role: str  # "actor" or "critic"
    engine: Engine
    batches: list[Any]  # micro-batches of this rank
    loss: Callable[[Any], Tensor]  # a micro-batch's part of the loss
    sums: MetricSums  # metrics that the loss records, of this optimizer step alone
    constants: dict[str, Any]  # what a replay needs besides the micro-batches
    recorded: RecordedTokens | None = None  # log-probs or values of the pass, where scoring has computed none
    gradients: Gradients[Any] | None = None  # of a pass that is already made


@dataclass(frozen=True)
class Outcome:
    """The result of an optimizer step."""

    grad_norms: dict[str, float]  # by role, of the updates that were applied
    sums: list[MetricSums]  # metrics of the updates that were applied
    ends_step: bool = False  # a limit ends the updates of this PPO step
    logprobs: RecordedTokens | None = None  # of the actor's pass, where scoring has computed none and all are finite


class PPOUpdate:
    """Builds the objectives of actor and critic, and makes optimizer steps. `texts` are blocks for the PTX loss, or
    None."""

    def __init__(
        self, config: PPOConfig, engines: RLHFEngine, texts: TextBatches | None,
        entropy_coef: AdaptiveEntropy | FixedCoefficient, nonfinite: NonFinitePolicy, clock: PhaseClock,
        late_ends: LateEnds | None = None,
    ):  # fmt: skip
        self.config = config
        self.engines = engines
        self.texts = texts
        self.entropy_coef = entropy_coef
        self.nonfinite = nonfinite
        self.clock = clock
        coef = config.algorithm.router_loss_coef
        self.router = router_settings(coef, engines.actor.module) if coef > 0 else None
        self.actor_loss = ActorLoss(
            engines.actor, engines.reference, config.algorithm, config.ppo.temperature, bool(config.run.trackers),
            late_ends,
        )  # fmt: skip

    def actor_objective(self, minibatch: MiniBatch[Experience]) -> Objective:
        """The policy loss of the experience and, with PTX, the loss of plain text in the same optimizer step.
        Collective with `--router_loss_coef`, whose term is over the experience."""
        texts, text_tokens = self.texts.take() if self.texts else ([], torch.ones(()))
        actor, ptx_coef, entropy_coef = self.engines.actor, self.config.ppo.unsup_coef, self.entropy_coef.value
        sums = MetricSums()
        recorded = RecordedTokens() if minibatch.micro_batches[0].old_logprobs is None else None

        def policy_loss(rows: Experience, sums: MetricSums) -> Tensor:
            return self.actor_loss(rows, minibatch, entropy_coef, sums, recorded)

        with_router, router = None, dict[str, Any]()
        if self.router is not None:
            with self.clock.phase("train"):
                with_router, router = with_router_term(
                    self.router, "policy/router_loss", minibatch.micro_batches, policy_loss,
                    lambda rows: rows.response_mask.any(dim=1), sums,
                )  # fmt: skip

        def loss(rows: Experience | SFTBatch) -> Tensor:
            if isinstance(rows, SFTBatch):
                return ptx_coef * ptx_loss(actor, rows, text_tokens, sums)
            return policy_loss(rows, sums) if with_router is None else with_router(rows)

        constants = {**_constants(minibatch), "entropy_coef": entropy_coef, **router}
        constants["text_tokens"] = float(text_tokens) if texts else 1.0
        return Objective("actor", actor, [*minibatch.micro_batches, *texts], loss, sums, constants, recorded)

    def critic_pass(self, minibatch: MiniBatch[RewardedRollout]) -> Objective:
        """The critic's objective over rows without values, with the values recorded and the gradients made. Collective.
        `minimise` takes it in place of a `critic_objective` of the same rows, or `drop` drops the gradients."""
        objective = self.critic_objective(minibatch, RecordedTokens())
        with self.clock.phase("train"), block("train critic"):
            gradients = accumulate(objective.engine, objective.batches, objective.loss)
        return replace(objective, gradients=gradients)

    def drop(self, made: Objective) -> None:
        """Drop the gradients of a `critic_pass` whose rows make no update. Collective."""
        assert made.gradients is not None
        apply(made.gradients, refused=True)

    def critic_objective(
        self, minibatch: MiniBatch[RewardedRollout] | MiniBatch[Experience], recorded: RecordedTokens | None = None
    ) -> Objective:
        """The value loss of the experience. `recorded` receives the values, of rows that have none."""
        critic, flags, sums = self.engines.critic, self.config.algorithm, MetricSums()
        assert critic is not None

        def loss(rows: RewardedRollout) -> Tensor:
            return critic_loss(critic, rows, minibatch, flags, sums, recorded)

        return Objective("critic", critic, minibatch.micro_batches, loss, sums, _constants(minibatch), recorded)

    def minimise(self, objectives: Sequence[Objective], step: int) -> Outcome:
        """Forward, backward and one update of each engine; the actor's objective, if there is one, is the first.
        `NonFiniteError` if a loss or gradient is not finite, and the run is to stop. Collective.

        An actor's update that `--max_log_ratio` forbids skips the critic's update of the same rows as well;
        `--target_kl` makes an update the PPO step's last one. Both compare the policy in the update's forward pass with
        the one that scored the answers, over the tokens of all ranks that the policy loss counts, so every rank makes
        the same decision. With `--align_overflow`, the gradients of both engines are computed before either update.
        Otherwise gradients that wait are applied first, so that those of one engine alone are in memory.
        """
        outcome, flags = Outcome({}, []), self.config.algorithm
        logprobs: RecordedTokens | None = None
        waiting: list[tuple[Objective, Gradients[Any]]] = []  # for --align_overflow
        with self.clock.phase("train"):
            for objective in sorted(objectives, key=lambda objective: objective.gradients is None):
                with block(f"train {objective.role}"):
                    gradients = objective.gradients or accumulate(objective.engine, objective.batches, objective.loss)
                if objective.role == "actor" and gradients.fault is None:
                    logprobs, refused = objective.recorded, "--max_log_ratio: the update is not applied"
                    if _is_above(flags.max_log_ratio, LARGEST_LOG_RATIO, objective.sums, refused):
                        apply(gradients, refused=True)
                        return Outcome({}, [], ends_step=True)
                if self.config.aligns_overflow:
                    waiting.append((objective, gradients))
                else:
                    with block(f"update {objective.role}"):
                        result = apply(gradients)
                    self._record_result(objective, result, step, outcome)
            with block("update actor and critic") if waiting else nullcontext():
                results = apply_together([gradients for _, gradients in waiting])
            for (objective, _), result in zip(waiting, results, strict=True):
                self._record_result(objective, result, step, outcome)
            ends = "actor" in outcome.grad_norms and _is_above(
                flags.target_kl, KL_OF_UPDATE, objectives[0].sums, "--target_kl: it was the PPO step's last update"
            )
        return Outcome(outcome.grad_norms, outcome.sums, ends, logprobs)

    def _record_result(self, objective: Objective, result: StepResult, step: int, outcome: Outcome) -> None:
        """Record an update that was applied; handle a number that is not finite."""

        def context() -> FailureContext:
            state = result.fault.random_state if result.fault else []
            return FailureContext(objective.batches, objective.constants, objective.engine, random_state=state)

        self.nonfinite.handle(objective.role, step, result, context)
        if result.applied:
            outcome.grad_norms[objective.role] = result.grad_norm
            outcome.sums.append(objective.sums)


def _is_above(limit: float | None, name: str, sums: MetricSums, consequence: str) -> bool:
    """Whether the metric `name` is above a limit, if one is set; logs it. Collective with a limit."""
    if limit is None:
        return False
    measured = sums.only(name).reduce()[name]
    if measured > limit:
        logger().info(f"{name} of {measured:.4g} is above {consequence}")
    return measured > limit


def _constants(minibatch: MiniBatch) -> dict[str, Any]:
    """The numbers of a mini-batch that belong to the whole optimizer step, under their names in repro bundles."""
    return {
        "over": asdict(minibatch.denominators),
        "value_tokens": minibatch.value_tokens,
        "share": minibatch.metric_weight,
    }
