"""The state of step 3, the components that its loop (`loop.py`) uses, and what a checkpoint holds
of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from dschat_ppo.algorithms.controllers import AdaptiveEntropy, FixedCoefficient
from dschat_ppo.checkpoint.manager import RankStates, load_saved, log_starts_from_scratch
from dschat_ppo.common import dist
from dschat_ppo.common.logging import logger
from dschat_ppo.common.phases import PhaseClock, block
from dschat_ppo.common.progress import report_phase
from dschat_ppo.common.seeding import seed_this_rank
from dschat_ppo.config.batch_plan import PPOPlan
from dschat_ppo.config.on_policy import describe, old_logprobs_source
from dschat_ppo.config.ppo_config import PPOConfig
from dschat_ppo.data.prepare import TokenRows
from dschat_ppo.engine.optimizer_step import accumulate, apply, learning_rates
from dschat_ppo.engine.rlhf_engine import RLHFEngine
from dschat_ppo.episodes.rollouts import EpisodeRollouts
from dschat_ppo.models.micro_batches import share_prompts
from dschat_ppo.monitor.health import HealthWatch
from dschat_ppo.monitor.metric_sums import MetricSums
from dschat_ppo.monitor.rollout_metrics import experience_metrics
from dschat_ppo.monitor.writers import JsonLines
from dschat_ppo.nonfinite import NonFinitePolicy, ReproBundles
from dschat_ppo.ppo.advantages import AdvantageComputation
from dschat_ppo.ppo.collect import ExperienceCollection
from dschat_ppo.ppo.evaluation import Evaluation
from dschat_ppo.ppo.group_pool import GroupPool
from dschat_ppo.ppo.mini_dataset import MiniBatch, MiniDataset, TextBatches
from dschat_ppo.ppo.own_algorithms import own_metrics
from dschat_ppo.ppo.rollout_sampler import RolloutSampler
from dschat_ppo.ppo.score import ForwardPasses, RewardRequests
from dschat_ppo.ppo.teaching import teachers_of
from dschat_ppo.ppo.update import Objective, Outcome, PPOUpdate, RecordedTokens
from dschat_ppo.rewards.reward_source import RewardMixture
from dschat_ppo.types import (
    Engine,
    Experience,
    RewardedRollout,
    ScoredRollout,
    record_of,
    select_rows,
    tensors_of,
    to_device,
)

# of `PPOState`, as they are
SAVED = "steps", "updates", "applied", "ended", "metrics", "evaluated", "first", "last"


@dataclass
class PPOState:
    """The position in the run, and the PPO step in flight. Only the methods below change it."""

    steps: int = 0  # finished PPO steps
    updates: int = 0  # optimizer steps of the PPO step in flight
    applied: int = 0  # those of them that updated the actor
    ended: bool = False  # a limit ended the updates of the PPO step in flight
    # of all ranks; None between two PPO steps, or if not finite
    experience: Experience | None = None
    # of the experience in flight, with gradients that wait for its only update
    critic_pass: Objective | None = None
    # of the PPO step in flight, known so far
    metrics: dict[str, float] = field(default_factory=dict)
    sums: MetricSums = field(default_factory=MetricSums)  # metrics of the updates, this rank's part
    # metrics before the first PPO step; None: not evaluated yet
    evaluated: dict[str, float] | None = None
    first: dict[str, float] = field(default_factory=dict)  # metrics of the first finished PPO step
    last: dict[str, float] = field(default_factory=dict)  # of the last one

    def begin_updates(self, experience: Experience | None, metrics: dict[str, float]) -> None:
        """Start the updates of a PPO step. Without experience it has none."""
        self.experience, self.metrics, self.sums = experience, metrics, MetricSums()
        if experience is None:
            self.critic_pass = None
        self.updates, self.applied, self.ended = 0, 0, False

    def count_update(self, outcome: Outcome) -> None:
        """Count an optimizer step and its metrics, and keep the old log-probs that it has computed.
        Collective in the first one of a PPO step."""
        self.critic_pass = None
        if outcome.logprobs is not None and self.experience is not None:
            old_logprobs = outcome.logprobs.gathered(self.experience)  # (N, R)
            self.experience = replace(self.experience, old_logprobs=old_logprobs)
        for sums in outcome.sums:
            # ranks that share rows count each of them once
            self.sums.merge(sums.scaled(1 / dist.sequence_ranks()))
        device = dist.device()
        # every rank knows the norm; only one counts it
        once = torch.tensor([dist.is_main()], device=device)
        for role, norm in outcome.grad_norms.items():
            self.sums.add_mean(f"optim/grad_norm/{role}", torch.tensor([norm], device=device), once)
        if self.updates == 0:
            first = self.sums.reduce()
            for name in ("mean", "max"):
                if f"policy/log_ratio_abs_{name}" in first:
                    self.metrics[f"policy/first_log_ratio_abs_{name}"] = first[
                        f"policy/log_ratio_abs_{name}"
                    ]
        self.updates += 1
        self.applied += "actor" in outcome.grad_norms
        self.ended = outcome.ends_step

    def finish_step(self, metrics: dict[str, float]) -> None:
        """Count the PPO step in flight as finished."""
        self.steps += 1
        self.first, self.last = self.first or metrics, metrics
        self.begin_updates(None, {})

    def state_dict(self) -> dict[str, Any]:
        """The part that all ranks have in common; `sums` are not in it."""
        saved = {name: copy(getattr(self, name)) for name in SAVED}
        return saved | {
            "experience": None if self.experience is None else tensors_of(self.experience)
        }

    def load_state_dict(
        self, state: dict[str, Any], sums: MetricSums, device: torch.device
    ) -> None:
        """Restore `state_dict()`, with this rank's part of the sums, and the experience on
        `device`."""
        for name in SAVED:
            setattr(self, name, state[name])
        self.sums = sums
        self.experience = None
        if state["experience"] is not None:
            self.experience = to_device(record_of(Experience, state["experience"]), device)


class PPOComponents:
    """The components that `run`, `make_experience` and `update` use. Constructing it is collective.
    `tokenizer`: of the actor; `texts`: blocks of plain text for the PTX loss."""

    def __init__(
        self,
        config: PPOConfig,
        plan: PPOPlan,
        rows: TokenRows,
        tokenizer: PreTrainedTokenizerBase,
        engines: RLHFEngine,
        rewards: RewardMixture,
        texts: TextBatches | None = None,
        episodes: EpisodeRollouts | None = None,
    ):
        ppo, algorithm, seed = config.ppo, config.algorithm, config.run.seed
        self.config = config
        self.plan = plan
        self.engines = engines
        self.device = dist.device()
        self.texts = texts
        self.data_sources = rows.sources
        self.state = PPOState()
        self.clock = PhaseClock()
        self.nonfinite = NonFinitePolicy(config.safety, ReproBundles(config, tokenizer))
        sampler = RolloutSampler(ppo, engines.hybrid, rows.train, tokenizer, seed, episodes)
        seed_this_rank(seed)
        model_configs = [engine.module.config.to_dict() for engine in engines.trained.values()]
        self.old_logprobs, reason = old_logprobs_source(config, plan, model_configs)
        logger().info(f"old log-probs: {describe(self.old_logprobs, reason)}")
        self.shaping = AdvantageComputation(
            algorithm,
            ppo.max_answer_seq_len,
            seed,
            config.score_clip,
            plan.warmup_rollouts,
            config.environment.to_go_weight,
            config.distill_coef if config.teacher_gives_rewards else 0.0,
            [weight for _, weight in rewards.sources],
        )
        minimum_length = sampler.config.stopping.minimum_length
        reference = engines.reference if algorithm.has_reference else None
        teachers = teachers_of(config, engines.teachers, engines.reference, minimum_length)
        passes = ForwardPasses(
            engines.actor,
            reference,
            None if self.old_logprobs == "update" else engines.critic,
            ppo.temperature,
            plan.micro_batch_tokens,
            self.old_logprobs,
            algorithm.kl_estimator,
            minimum_length,
            teachers if config.teacher_gives_rewards else None,
            self.clock,
        )
        pool = None
        if algorithm.dynamic_sampling:
            pool = GroupPool(
                plan.rollout_rows,
                self.shaping.shaped,
                algorithm.dynamic_sampling_range,
                self.shaping.source_weights if algorithm.advantage_estimator == "gdpo" else (),
            )
        self.collection = ExperienceCollection(
            config,
            plan,
            sampler,
            RewardRequests(rewards, rows.train, tokenizer, episodes),
            passes,
            pool,
            self.clock,
            len(self.data_sources) > 1,
        )
        self.mini_dataset = MiniDataset(
            plan.global_batch,
            plan.micro_batch_tokens,
            ppo.max_answer_seq_len,
            seed,
            share_prompts(engines.actor, engines.critic),
        )
        self.entropy_coef: AdaptiveEntropy | FixedCoefficient = FixedCoefficient(
            algorithm.entropy_coef
        )
        if algorithm.entropy_target is not None:
            self.entropy_coef = AdaptiveEntropy(
                algorithm.entropy_coef,
                algorithm.entropy_target,
                algorithm.entropy_delta,
                algorithm.entropy_coef_max,
            )
        self.updates = PPOUpdate(
            config, minimum_length, engines, texts, self.entropy_coef, self.nonfinite, self.clock
        )

    def critic_pass(self, rows: RewardedRollout, step: int) -> RewardedRollout:
        """The rows with their values (N, R), if there is a critic. Where the PPO step makes one
        update, the forward and backward pass of that update gives them here, and its gradients wait
        in `state.critic_pass`. Collective."""
        if rows.values is not None or self.engines.critic is None:
            return rows
        self.engines.train()
        [minibatch] = self.mini_dataset.minibatches(rows, 1, step)
        values = RecordedTokens()
        objective = self.updates.critic_objective(minibatch, values)
        with self.clock.phase("train"), block("train critic"), self.clock.part("critic"):
            gradients = accumulate(objective.engine, objective.batches, objective.loss)
        self.state.critic_pass = replace(objective, gradients=gradients)
        return replace(rows, values=values.gathered(rows))

    def is_unscored(self, rows: ScoredRollout, step: int) -> bool:
        """Whether no row of a PPO step has a score; then the step has no updates. `UserError` at
        the third such step in a row."""
        unscored = not bool(rows.kept.any())
        self.nonfinite.count_unscored(unscored, step)
        if unscored:
            self.state.begin_updates(None, dict(self.collection.metrics))
        return unscored

    def keep_if_finite(self, experience: Experience, step: int) -> Experience | None:
        """Start the updates of a PPO step, with the metrics of its experience, which is returned.
        None if a number is not finite: then the step has no updates, or the run stops
        (`NonFiniteError`), and nothing adapts to its rows. Collective in that case."""
        metrics = dict(self.collection.metrics)
        kept = None
        counted = experience  # the rows that have not left their groups
        if experience.sampled_mask is not None:
            counted = select_rows(experience, experience.kept.nonzero().squeeze(1))
        if self.nonfinite.is_finite(counted, step):
            kl_coef = self.shaping.used_kl_coef
            names = self.collection.requests.mixture.names
            clip = None
            if self.shaping.score_clip:
                clip = self.shaping.scaled(counted.scores), self.shaping.shaped(counted.scores)
            metrics |= experience_metrics(counted, kl_coef, names, self.data_sources, clip)
            metrics["rollout/count"] = len(experience.scores)
            metrics["kl/coef"] = kl_coef
            metrics |= own_metrics(self.config.ppo.metrics, counted)
            for role, engine in self.engines.trained.items():
                metrics |= {
                    f"optim/{name}/{role}": rate for name, rate in learning_rates(engine).items()
                }
            metrics["policy/entropy_coef"] = self.entropy_coef.value
            kept = experience
        else:
            self.shaping.undo()
            if self.state.critic_pass is not None and self.state.critic_pass.gradients is not None:
                apply(self.state.critic_pass.gradients, refused=True)  # drops them
        self.state.begin_updates(kept, metrics)
        return kept

    def sync_reference(self, step: int) -> None:
        """Move the reference towards the actor, if that is due after PPO step `step`.
        `NonFiniteError` if a weight of the actor is not finite. Collective."""
        sync = self.engines.reference_sync
        if sync is not None and step % self.config.reference.ref_sync_interval == 0:
            with self.clock.phase("sync"):
                self.state.metrics["kl/reference_moved"] = sync.update()

    def minibatches_left(self, experience: Experience | None, step: int) -> Iterator[MiniBatch]:
        """The mini-batches of a PPO step that no update has used yet; none once a limit has ended
        its updates."""
        if experience is None:
            return
        self.engines.train()
        minibatches = self.mini_dataset.minibatches(experience, self.config.ppo.ppo_epochs, step)
        for minibatch in islice(minibatches, self.state.updates, None):
            if self.state.ended:
                return
            report_phase(self.state.updates, self.plan.updates_per_rollout, "updates", name="train")
            yield minibatch


@dataclass(eq=False)
class ResumablePPO:
    """Saves and restores step 3; a `Resumable`."""

    ppo: PPOComponents
    evaluation: Evaluation | None
    health: HealthWatch
    files: Sequence[JsonLines] = ()  # which grow during the run

    @property
    def engines_to_save(self) -> dict[str, Engine]:
        """The actor's engine and, if there is one, the critic's."""
        return self.ppo.engines.trained

    @property
    def position(self) -> tuple[int, int]:
        """Finished PPO steps, and optimizer steps of the one in flight."""
        return self.ppo.state.steps, self.ppo.state.updates

    @property
    def is_best(self) -> bool:
        """Whether the last evaluation was made at this position and is the best so far."""
        best = self.evaluation.best if self.evaluation is not None else None
        return best is not None and self.position == (best[1], 0)

    def shared_state(self) -> dict[str, Any]:
        """The state that all ranks have in common."""
        ppo = self.ppo
        return {
            "progress": ppo.state.state_dict(),
            "collector": ppo.collection.state_dict(),
            "shaping": ppo.shaping.state_dict(),
            "entropy_coef": ppo.entropy_coef.state_dict(),
            "health": self.health.state_dict(),
            "guard": ppo.nonfinite.state_dict(),
            "texts": None if ppo.texts is None else ppo.texts.stream.state_dict(),
            "best": None if self.evaluation is None else self.evaluation.best,
            "files": {file.path.name: file.saved_offset() for file in self.files},
        }

    def rank_state(self) -> dict[str, Any]:
        """The state of this rank alone."""
        average, sync = self.ppo.engines.actor_average, self.ppo.engines.reference_sync
        return {
            "sums": self.ppo.state.sums.state_dict(),
            "actor_average": None if average is None else average.state_dict(),
            "reference": None if sync is None else sync.state_dict(),
        }

    def load_state(self, shared: dict[str, Any], ranks: RankStates) -> None:
        """Restore the `shared_state` of the saved run and the `rank_state` of its ranks."""
        ppo = self.ppo
        ppo.state.load_state_dict(shared["progress"], self._sums_of(ranks), ppo.device)
        average, sync = ppo.engines.actor_average, ppo.engines.reference_sync
        if average is not None and not average.restore(
            state["actor_average"] or {} for state in ranks.read_all()
        ):
            log_starts_from_scratch("--enable_ema")
            average.begin()
        if sync is not None and not sync.restore(
            state["reference"] or {} for state in ranks.read_all()
        ):
            log_starts_from_scratch("--ref_sync_interval")
        ppo.collection.load_state_dict(shared["collector"], ppo.device)
        ppo.shaping.load_state_dict(shared["shaping"])
        if ppo.config.algorithm.entropy_target is not None:
            load_saved("--entropy_target", shared["entropy_coef"], ppo.entropy_coef.load_state_dict)
        self.health.load_state_dict(shared["health"])
        ppo.nonfinite.load_state_dict(shared["guard"])
        if ppo.texts is not None:
            load_saved(
                "--unsupervised_dataset_name", shared["texts"], ppo.texts.stream.load_state_dict
            )
        if self.evaluation is not None and shared["best"] is not None:
            self.evaluation.best = tuple(shared["best"])
        for file in self.files:
            file.offset = shared["files"].get(file.path.name, 0)

    def _sums_of(self, ranks: RankStates) -> MetricSums:
        """This rank's part of the metric sums. On another number of ranks, rank 0 takes the sums of
        all ranks; the others take the same names with nothing counted, so that `reduce` is the same
        collective on every rank."""
        device = self.ppo.device
        if ranks.own is not None:
            return MetricSums.restored([ranks.own["sums"]], device)
        sums = MetricSums.restored([state["sums"] for state in ranks.read_all()], device)
        return sums.scaled(float(dist.is_main()))  # the maxima are those of all ranks on each
