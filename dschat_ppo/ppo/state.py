"""The state of step 3, and the components that its loop (`loop.py`) uses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from dschat_ppo.algorithms.controllers import AdaptiveEntropy, FixedCoefficient
from dschat_ppo.common import dist
from dschat_ppo.common.logging import logger
from dschat_ppo.common.phases import PhaseClock, announce_step
from dschat_ppo.common.progress import report_phase
from dschat_ppo.common.seeding import seed_this_rank
from dschat_ppo.config.batch_plan import PPOPlan
from dschat_ppo.config.on_policy import describe, old_logprobs_source
from dschat_ppo.config.steps import PPOConfig
from dschat_ppo.engine.optimizer_step import learning_rates
from dschat_ppo.engine.rlhf_engine import RLHFEngine
from dschat_ppo.models.micro_batches import share_prompts
from dschat_ppo.monitor.metric_sums import MetricSums
from dschat_ppo.monitor.rollout_metrics import experience_metrics
from dschat_ppo.nonfinite.nonfinite_policy import FiniteExperience, NonFinitePolicy
from dschat_ppo.nonfinite.repro_bundle import ReproBundles
from dschat_ppo.ppo.advantages import AdvantageComputation
from dschat_ppo.ppo.collect import ExperienceCollection
from dschat_ppo.ppo.generate import RolloutGenerator
from dschat_ppo.ppo.mini_dataset import MiniBatch, MiniDataset, TextBatches
from dschat_ppo.ppo.own_algorithms import own_metrics
from dschat_ppo.ppo.score import RewardScorer
from dschat_ppo.ppo.update import Objective, Outcome, PPOUpdate
from dschat_ppo.rewards.reward_mixture import RewardMixture
from dschat_ppo.types import Experience, RewardedRollout, record_of, tensors_of, to_device


@dataclass
class PPOState:
    """The position in the run, and the PPO step in flight. Only the methods below change it."""

    steps: int = 0  # finished PPO steps
    updates: int = 0  # optimizer steps of the PPO step in flight
    applied: int = 0  # those of them that updated the actor
    ended: bool = False  # a limit ended the updates of the PPO step in flight
    experience: Experience | None = None  # of all ranks; None between two PPO steps, or if not finite
    critic_pass: Objective | None = None  # of the experience in flight, with gradients that wait for its only update
    metrics: dict[str, float] = field(default_factory=dict)  # of the PPO step in flight, known so far
    sums: MetricSums = field(default_factory=MetricSums)  # metrics of the updates, this rank's part
    evaluated: dict[str, float] | None = None  # metrics before the first PPO step; None: not evaluated yet
    first: dict[str, float] = field(default_factory=dict)  # metrics of the first finished PPO step
    last: dict[str, float] = field(default_factory=dict)  # of the last one

    def steps_left(self, total: int) -> Iterator[int]:
        """Numbers, from 1 on, of the PPO steps up to `total` that are not finished."""
        while self.steps < total:
            announce_step(self.steps + 1)
            yield self.steps + 1

    def begin_updates(self, experience: Experience | None, metrics: dict[str, float]) -> None:
        """Start the updates of a PPO step. Without experience it has none."""
        self.experience, self.metrics, self.sums = experience, metrics, MetricSums()
        if experience is None:
            self.critic_pass = None
        self.updates, self.applied, self.ended = 0, 0, False

    def count_update(self, outcome: Outcome) -> None:
        """Count an optimizer step and its metrics, and keep the old log-probs that it has computed. Collective in the
        first one of a PPO step."""
        if outcome.logprobs is not None and self.experience is not None:
            old_logprobs = outcome.logprobs.gathered(self.experience)  # (N, R)
            self.experience = replace(self.experience, old_logprobs=old_logprobs)
        for sums in outcome.sums:
            self.sums.merge(sums.scaled(1 / dist.sequence_ranks()))  # ranks that share rows count each of them once
        device = dist.device()
        once = torch.tensor([dist.is_main()], device=device)  # every rank knows the norm; only one counts it
        for role, norm in outcome.grad_norms.items():
            self.sums.add_mean(f"optim/grad_norm/{role}", torch.tensor([norm], device=device), once)
        if self.updates == 0:
            first = self.sums.reduce()
            for name in ("mean", "max"):
                if f"policy/log_ratio_abs_{name}" in first:
                    self.metrics[f"policy/first_log_ratio_abs_{name}"] = first[f"policy/log_ratio_abs_{name}"]
        self.updates += 1
        self.applied += "actor" in outcome.grad_norms
        self.ended = outcome.ends_step

    def take_critic_pass(self) -> Objective | None:
        """The critic's pass that has given the values, for the update that uses its gradients; or None."""
        made, self.critic_pass = self.critic_pass, None
        return made

    def add_metric(self, name: str, value: float) -> None:
        """Add a metric of the PPO step in flight."""
        self.metrics[name] = value

    def finish_step(self, metrics: dict[str, float]) -> None:
        """Count the PPO step in flight as finished."""
        self.steps += 1
        self.first, self.last = self.first or metrics, metrics
        self.begin_updates(None, {})

    def state_dict(self) -> dict[str, Any]:
        """The part that all ranks have in common; `sums` are not in it."""
        return {
            "steps": self.steps,
            "updates": self.updates,
            "applied": self.applied,
            "ended": self.ended,
            "experience": None if self.experience is None else tensors_of(self.experience),
            "metrics": dict(self.metrics),
            "evaluated": self.evaluated,
            "first": dict(self.first),
            "last": dict(self.last),
        }

    def load_state_dict(self, state: dict[str, Any], sums: MetricSums, device: torch.device) -> None:
        """Restore `state_dict()`, with this rank's part of the sums, and the experience on `device`."""
        self.steps, self.updates = state["steps"], state["updates"]
        self.applied, self.ended = state["applied"], state["ended"]
        self.metrics, self.evaluated = state["metrics"], state["evaluated"]
        self.first, self.last = state["first"], state["last"]
        self.sums = sums
        self.experience = None
        if state["experience"] is not None:
            self.experience = to_device(record_of(Experience, state["experience"]), device)


@dataclass(frozen=True)
class PPOData:
    """What the actor learns from."""

    prompts: Dataset  # token rows
    tokenizer: PreTrainedTokenizerBase  # of the actor
    sources: Sequence[str] = ()  # names of the data sets, which the column `source` of the prompts numbers
    texts: TextBatches | None = None  # blocks of plain text for the PTX loss


class PPOComponents:
    """The components that `run`, `make_experience` and `update` use. Constructing it is collective."""

    def __init__(self, config: PPOConfig, plan: PPOPlan, data: PPOData, engines: RLHFEngine, rewards: RewardMixture):
        ppo, algorithm, seed = config.ppo, config.algorithm, config.run.seed
        device, prompts, tokenizer = dist.device(), data.prompts, data.tokenizer
        self.config = config
        self.plan = plan
        self.engines = engines
        self.device = device
        self.texts = data.texts
        self.data_sources = tuple(data.sources)
        self.state = PPOState()
        self.clock = PhaseClock()
        self.nonfinite = NonFinitePolicy(config.safety, ReproBundles("ppo", config, tokenizer))
        generator = RolloutGenerator(ppo, engines.hybrid, prompts, tokenizer, seed, device)
        seed_this_rank(seed)
        model_configs = [engine.module.config.to_dict() for engine in engines.trained.values()]
        self.old_logprobs, reason = old_logprobs_source(config, plan, model_configs)
        logger().info(f"old log-probs: {describe(self.old_logprobs, reason)}")
        self.shaping = AdvantageComputation(
            algorithm, ppo.max_answer_seq_len, seed, config.score_clip, plan.warmup_rollouts
        )
        models = {
            "actor": engines.actor, "critic": engines.critic,
            "reference": engines.reference if engines.reference_sync else config.reference_folder,
            "reward": config.reward_folder,
        }  # fmt: skip
        self.is_finite = FiniteExperience(
            self.shaping, self.nonfinite, models, in_rank_order=not algorithm.dynamic_sampling
        )
        self.collection = ExperienceCollection(
            config, plan, engines, generator, RewardScorer(rewards, prompts, tokenizer),
            self.shaping.shaped, self.clock, self.old_logprobs,
            several_data_sets=len(self.data_sources) > 1,
        )  # fmt: skip
        # between updates and in a pool of rows; scoring and the advantage computation are on the device in any case
        self.experience_device = torch.device("cpu") if config.ppo_memory.experience_on_host else device
        self.mini_dataset = MiniDataset(
            plan.global_batch, plan.micro_batch_tokens, ppo.max_answer_seq_len, seed, device,
            share_prompts(engines.actor, engines.critic) and not algorithm.full_kl_loss,
        )  # fmt: skip
        self.entropy_coef: AdaptiveEntropy | FixedCoefficient = FixedCoefficient(algorithm.entropy_coef)
        if algorithm.entropy_target is not None:
            self.entropy_coef = AdaptiveEntropy(
                algorithm.entropy_coef, algorithm.entropy_target, algorithm.entropy_delta, 0.0,
                algorithm.entropy_coef_max,
            )  # fmt: skip
        self.updates = PPOUpdate(
            config,
            engines,
            data.texts,
            self.entropy_coef,
            self.nonfinite,
            self.clock,
            generator.config.stopping.late_ends,
        )

    def critic_pass(self, rows: RewardedRollout, step: int) -> RewardedRollout:
        """The rows with their values (N, R), if there is a critic. Collective.

        Where the PPO step makes one update, scoring gives no values. The forward and backward pass of that update gives
        them here, and its gradients wait in `state.critic_pass`.
        """
        if rows.values is not None or self.engines.critic is None:
            return rows
        self.engines.train()
        [minibatch] = self.mini_dataset.minibatches(rows, 1, step)
        self.state.critic_pass = made = self.updates.critic_pass(minibatch)
        assert made.recorded is not None
        return replace(rows, values=made.recorded.gathered(rows))

    def begin_updates(self, experience: Experience, step: int) -> Experience | None:
        """Start the updates of a PPO step, with the metrics of its experience; returns it where it is kept. None if a
        number is not finite: then the step has no updates, or the run stops (`NonFiniteError`). Collective in that
        case."""
        metrics, kept = dict(self.collection.metrics), None
        if self.is_finite(experience, step):
            kl_coef = self.shaping.used_kl_coef
            names = self.collection.reward_scorer.mixture.names
            clip = None
            if self.shaping.score_clip:
                clip = self.shaping.scaled(experience.scores), self.shaping.shaped(experience.scores)
            metrics |= experience_metrics(experience, kl_coef, names, self.data_sources, clip)
            metrics["kl/coef"] = kl_coef
            metrics |= own_metrics(self.config.ppo.metrics, experience)
            for role, engine in self.engines.trained.items():
                metrics |= {f"optim/{name}/{role}": rate for name, rate in learning_rates(engine).items()}
            metrics["policy/entropy_coef"] = self.entropy_coef.value
            kept = to_device(experience, self.experience_device)
        elif self.state.critic_pass is not None:
            self.updates.drop(self.state.critic_pass)
        self.state.begin_updates(kept, metrics)
        return kept

    def sync_reference(self, step: int) -> None:
        """Move the reference towards the actor, if that is due after PPO step `step`. `NonFiniteError` if a weight of
        the actor is not finite. Collective."""
        sync, flags = self.engines.reference_sync, self.config.ppo_schedule
        if sync is None or step % flags.ref_sync_interval != 0:
            return
        with self.clock.phase("sync"):
            moved = sync.update()
        self.state.add_metric("kl/reference_moved", moved)
        share = flags.ref_sync_mixup
        logger().info(
            f"PPO step {step}: reference = {share:g} x actor + {1 - share:g} x reference; it moved by {moved:.2e} of "
            "its norm"
        )

    def minibatches_left(self, experience: Experience | None, step: int) -> Iterator[MiniBatch]:
        """The mini-batches of a PPO step that no update has used yet; none once a limit has ended its updates."""
        if experience is None:
            return
        self.engines.train()
        minibatches = self.mini_dataset.minibatches(experience, self.config.ppo.ppo_epochs, step)
        for minibatch in islice(minibatches, self.state.updates, None):
            if self.state.ended:
                return
            report_phase(self.state.updates, self.plan.updates_per_rollout, "updates", name="train")
            yield minibatch
