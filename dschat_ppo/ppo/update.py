"""One optimizer step of actor and critic, or why it is left out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from dschat_ppo.config.steps import PPOConfig
from dschat_ppo.data.collators import SFTBatch
from dschat_ppo.engine.optimizer_step import accumulate, apply, apply_together
from dschat_ppo.engine.rlhf_engine import RLHFEngine
from dschat_ppo.engine.skip_update import StepResult
from dschat_ppo.monitor.metric_sums import MetricSums
from dschat_ppo.nonfinite.nonfinite_policy import NonFinitePolicy
from dschat_ppo.nonfinite.repro_bundle import FailureContext
from dschat_ppo.ppo.losses import ActorLoss, critic_loss, ptx_loss
from dschat_ppo.ppo.mini_dataset import Update
from dschat_ppo.ppo.plain_text import TextBatches
from dschat_ppo.ppo.update_limits import UpdateLimits
from dschat_ppo.types import Experience


@dataclass(frozen=True)
class Outcome:
    """`norms`: gradient norms by role, of the updates that were applied; `ends`: the PPO step makes no more."""

    norms: dict[str, float]
    ends: bool = False


@dataclass(frozen=True)
class _Task:
    """What one engine does in the step; `sums` are of it alone, `constants` what a replay needs."""

    engine: Any
    batches: list[Any]
    loss_of: Callable[[Any], Tensor]
    sums: MetricSums
    constants: dict[str, Any]


class Updater:
    """Makes the updates of step 3.

    Args:
        config: the resolved flags.
        engines: the roles.
        texts: blocks of plain text for the PTX loss, or None.
        guard: what happens to numbers that are not finite.
    """

    def __init__(self, config: PPOConfig, engines: RLHFEngine, texts: TextBatches | None, guard: NonFinitePolicy):
        self.config = config
        self.engines = engines
        self.texts = texts
        self.guard = guard
        self.actor_loss = ActorLoss(engines.actor, engines.reference, config.algorithm, config.ppo.temperature)
        self.limits = UpdateLimits(config.algorithm)

    def once(self, part: Update, sums: MetricSums, entropy_coef: float, train_actor: bool, step: int) -> Outcome:
        """One optimizer step of actor and critic; only what is applied counts into `sums`. Collective.

        An actor's update that `--max_log_ratio` forbids takes the critic's of the same rows with it. With
        `--align_overflow` both gradients are made before either update.

        Args:
            part: this rank's rows.
            sums: metrics of the PPO step.
            entropy_coef: weight of the entropy bonus now.
            train_actor: False for the critic alone.
            step: PPO step.

        Raises:
            NonFiniteError: a loss or gradient is not finite, and the run is to stop.
        """
        tasks = {"actor": self._actor(part, entropy_coef)} if train_actor else {}
        if self.engines.critic is not None:
            tasks["critic"] = self._critic(part)
        norms, waiting = dict[str, float](), []
        for role, task in tasks.items():
            gradients = accumulate(task.engine, task.batches, task.loss_of)
            if role == "actor" and gradients.fault is None and self.limits.forbid(task.sums):
                apply(gradients, refused=True)
                return Outcome({}, ends=True)
            if self.config.aligns_overflow:
                waiting.append(gradients)
            else:
                norms |= self._settle(role, task, apply(gradients), sums, step)
        for (role, task), result in zip(tasks.items(), apply_together(waiting), strict=False):
            norms |= self._settle(role, task, result, sums, step)
        return Outcome(norms, "actor" in norms and self.limits.end(tasks["actor"].sums))

    def _settle(self, role: str, task: _Task, result: StepResult, sums: MetricSums, step: int) -> dict[str, float]:
        """Count what was applied; the norm by its role, {} if nothing was."""

        def scene() -> FailureContext:
            state = result.fault.random_state if result.fault else []
            return FailureContext(task.batches, task.constants, task.engine, random_state=state)

        self.guard.handle(role, step, result, scene)
        if not result.applied:
            return {}
        sums.merge(task.sums)
        return {role: result.grad_norm}

    def _actor(self, part: Update, entropy_coef: float) -> _Task:
        """Over its experience and, with PTX, over plain text in the same step."""
        texts, text_tokens = self.texts.take() if self.texts else ([], torch.ones(()))
        ptx_coef, sums = self.config.ppo.unsup_coef, MetricSums()

        def loss_of(rows: Experience | SFTBatch) -> Tensor:
            if isinstance(rows, SFTBatch):
                return ptx_coef * ptx_loss(self.engines.actor, rows, text_tokens, sums)
            return self.actor_loss(rows, part, entropy_coef, sums)

        constants = {**denominators(part), "entropy_coef": entropy_coef, "text_tokens": float(text_tokens)}
        return _Task(self.engines.actor, [*part.micro_batches, *texts], loss_of, sums, constants)

    def _critic(self, part: Update) -> _Task:
        critic, clip_eps, sums = self.engines.critic, self.config.algorithm.value_clip_eps, MetricSums()

        def loss_of(rows: Experience) -> Tensor:
            return critic_loss(critic, rows, part, clip_eps, sums)

        return _Task(critic, part.micro_batches, loss_of, sums, denominators(part))


def denominators(part: Update) -> dict[str, Any]:
    """The numbers of an `Update` that are of the whole optimizer step."""
    return {"over": asdict(part.over), "value_tokens": part.value_tokens, "share": part.share}
