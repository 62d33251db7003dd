"""The position of step 3 in its run, and the PPO step in flight."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from dschat_ppo.common import dist
from dschat_ppo.monitor.metric_sums import MetricSums
from dschat_ppo.ppo.token_records import UpdateTokens
from dschat_ppo.ppo.update import EngineObjective, Outcome
from dschat_ppo.types import Experience, record_of, tensors_of, to_device

# fields of `PPOState` that a checkpoint holds as they are
SAVED = (
    "steps",
    "updates",
    "actor_updates",
    "updates_ended",
    "metrics",
    "metrics_before",
    "first_metrics",
    "last_metrics",
)


@dataclass
class PPOState:
    """The position in the run, and the PPO step in flight. Only the methods below change it."""

    steps: int = 0  # finished PPO steps
    updates: int = 0  # optimizer steps of the PPO step in flight
    actor_updates: int = 0  # those of them that updated the actor
    updates_ended: bool = False  # a limit ended the updates of the PPO step in flight
    # of all ranks; None between two PPO steps, or if not finite
    experience: Experience | None = None
    # what its updates computed for each token, in a step of which a record is kept
    update_tokens: list[UpdateTokens] = field(default_factory=list)
    # of the experience in flight, with gradients that wait for its only update
    critic_pass: EngineObjective | None = None
    # of the PPO step in flight, known so far
    metrics: dict[str, float] = field(default_factory=dict)
    # metrics of its updates, as sums over this rank's tokens
    sums: MetricSums = field(default_factory=MetricSums)
    # those of the evaluation before the first PPO step; None: not evaluated yet
    metrics_before: dict[str, float] | None = None
    first_metrics: dict[str, float] = field(default_factory=dict)  # of the first finished PPO step
    last_metrics: dict[str, float] = field(default_factory=dict)  # of the last one

    def begin_updates(self, experience: Experience | None, metrics: dict[str, float]) -> None:
        """Start the updates of a PPO step. Without experience it has none."""
        self.experience = experience
        self.update_tokens = []
        self.metrics = metrics
        self.sums = MetricSums()
        if experience is None:
            self.critic_pass = None
        self.updates = 0
        self.actor_updates = 0
        self.updates_ended = False

    def count_update(self, outcome: Outcome) -> None:
        """Count an optimizer step with the metrics of its `outcome`, keep what its pass has
        recorded of the tokens, and drop the critic's pass that it has used. The first one of a PPO
        step also gives the log ratios of a policy that has not moved yet. Collective in the first
        one, and with a record."""
        self.critic_pass = None
        self._keep_tokens(outcome)
        for sums in outcome.sums:
            # ranks that share rows count each of them once
            self.sums.merge(sums.scaled(1 / dist.ranks_of_row()))
        device = dist.device()
        # every rank knows the norm; only one counts it
        once = torch.tensor([dist.is_main()], device=device)
        for role, norm in outcome.grad_norms.items():
            self.sums.add_mean(f"optim/grad_norm/{role}", torch.tensor([norm], device=device), once)
        if self.updates == 0:
            metrics = self.sums.reduce()
            for statistic in ("mean", "max"):
                log_ratio = metrics.get(f"policy/log_ratio_abs_{statistic}")
                if log_ratio is not None:
                    self.metrics[f"policy/first_log_ratio_abs_{statistic}"] = log_ratio
        self.updates += 1
        if "actor" in outcome.grad_norms:
            self.actor_updates += 1
        self.updates_ended = outcome.ends_step

    def _keep_tokens(self, outcome: Outcome) -> None:
        """Keep old log-probs that an update has computed, and, if the actor's was applied, the
        tokens of the update for a record. Collective."""
        actor = outcome.objectives.get("actor")
        if actor is None or actor.recorded is None:
            return
        assert self.experience is not None
        tokens = actor.recorded.of_all_names(self.experience)
        if self.experience.old_logprobs is None:
            self.experience = replace(self.experience, old_logprobs=tokens["logprobs"])
        if "losses" not in tokens or "actor" not in outcome.grad_norms:
            return
        critic = outcome.objectives.get("critic")
        if critic is not None and critic.recorded is not None:
            tokens |= critic.recorded.of_all_names(self.experience)
        constants = actor.step_loss.constants
        self.update_tokens.append(
            UpdateTokens(
                tokens=tokens,
                denominators=constants["denominators"],
                value_tokens=constants["value_tokens"],
                entropy_coef=constants["entropy_coef"],
            )
        )

    def finish_step(self, metrics: dict[str, float]) -> None:
        """Count the PPO step in flight as finished."""
        self.steps += 1
        if not self.first_metrics:
            self.first_metrics = metrics
        self.last_metrics = metrics
        self.begin_updates(None, {})

    def state_dict(self) -> dict[str, Any]:
        """What all ranks have in common; `sums` are not in it."""
        state = {name: copy(getattr(self, name)) for name in SAVED}
        state["experience"] = None
        if self.experience is not None:
            state["experience"] = tensors_of(self.experience)
        state["update_tokens"] = [vars(update) for update in self.update_tokens]
        return state

    def load_state_dict(
        self, state: dict[str, Any], sums: MetricSums, device: torch.device
    ) -> None:
        """Restore `state_dict()`, with the sums of this rank, and the experience on `device`."""
        for name in SAVED:
            setattr(self, name, state[name])
        self.sums = sums
        self.experience = None
        if state["experience"] is not None:
            self.experience = to_device(record_of(Experience, state["experience"]), device)
        self.update_tokens = [UpdateTokens(**update) for update in state["update_tokens"]]
