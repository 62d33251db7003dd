"""The components of step 3, which its loop (`loop.py`) uses, and how they are built."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice

from transformers import PreTrainedTokenizerBase

from dschat_ppo.algorithms.controllers import AdaptiveEntropy, FixedCoefficient
from dschat_ppo.common import dist
from dschat_ppo.common.logging import logger
from dschat_ppo.common.phases import PhaseClock, block
from dschat_ppo.common.progress import report_phase
from dschat_ppo.common.seeding import seed_this_rank
from dschat_ppo.config.batch_plan import PPOPlan
from dschat_ppo.config.on_policy import OldLogprobs, describe, old_logprobs_source
from dschat_ppo.config.ppo_config import PPOConfig
from dschat_ppo.data.further_data import FurtherData
from dschat_ppo.data.prepare import TokenRows
from dschat_ppo.engine.optimizer_step import accumulate, apply, learning_rates
from dschat_ppo.engine.rlhf_engine import RLHFEngine
from dschat_ppo.features import hooks
from dschat_ppo.models.micro_batches import pack_rows, share_prompts
from dschat_ppo.monitor.rollout_metrics import experience_metrics
from dschat_ppo.nonfinite import NonFinitePolicy, recorders_of
from dschat_ppo.ppo.advantages import AdvantageComputation, advantage_terms, early_rewards_of
from dschat_ppo.ppo.collect import ExperienceCollection
from dschat_ppo.ppo.followers import followers_of_run
from dschat_ppo.ppo.mini_dataset import MiniBatch, MiniDataset
from dschat_ppo.ppo.own_algorithms import own_metrics
from dschat_ppo.ppo.rollout_sampler import RolloutSampler
from dschat_ppo.ppo.rollouts import RolloutExtension
from dschat_ppo.ppo.rounds import rounds_of_run
from dschat_ppo.ppo.score import ForwardPasses, RewardRequests, further_passes
from dschat_ppo.ppo.state import PPOState
from dschat_ppo.ppo.token_records import StepTokens, token_records_of
from dschat_ppo.ppo.update import PPOUpdate
from dschat_ppo.rewards.reward_source import RewardMixture
from dschat_ppo.types import Experience, RewardedRollout, ScoredRollout, select_rows


@dataclass(frozen=True)
class PPOData:
    """The data of step 3 as tokens."""

    rows: TokenRows  # prompts
    tokenizer: PreTrainedTokenizerBase  # of the actor
    further_data: Sequence[FurtherData] = ()


class PPOComponents:
    """The components of step 3, which the functions of `loop.py` use, and what these do with
    several of them at once.

    `state` is the position in the run and the PPO step in flight; everything else samples, scores
    or updates.
    """

    def __init__(
        self,
        config: PPOConfig,
        plan: PPOPlan,
        data: PPOData,
        engines: RLHFEngine,
        rewards: RewardMixture,
        extensions: Sequence[RolloutExtension] = (),
    ):
        """Build the components. Collective.

        Args:
            config: the flags.
            plan: batches and steps.
            data: what to train on.
            engines: the models.
            rewards: score the responses.
            extensions: what features have in the rollouts.
        """
        self.config = config
        self.plan = plan
        self.engines = engines
        self.device = dist.device()
        self.further_data = data.further_data
        self.data_sources = data.rows.sources
        self.state = PPOState()
        self.clock = PhaseClock()
        self.nonfinite = NonFinitePolicy(config.safety, recorders_of(config, data.tokenizer))
        seed = config.run.seed
        prompts = data.rows.train
        # The sampler is built before the seeds are set, since its self-check draws random numbers.
        sampler = RolloutSampler(
            config.ppo, engines.hybrid, prompts, data.tokenizer, seed, extensions
        )
        seed_this_rank(seed)
        self.forbidden_tokens = sampler.config.stopping.forbidden_tokens
        # The source of old log-probs is chosen before the forward passes and the updates are built,
        # since it says which of them compute the log-probs.
        self.old_logprobs = self._choose_old_logprobs()
        # The advantages come before the collection, whose rounds may compare scores as the
        # advantages see them.
        self.advantage_computation = self._build_advantages(rewards)
        requests = RewardRequests(rewards, prompts, data.tokenizer, extensions)
        self.collection = self._build_collection(sampler, requests)
        self.mini_dataset = MiniDataset(
            plan.global_batch,
            plan.micro_batch_tokens,
            config.ppo.max_answer_seq_len,
            seed,
            share_prompts(engines.actor, engines.critic),
            pack_rows(engines.actor, engines.critic),
        )
        # The coefficient comes before the updates, each of which reads its value.
        self.entropy_coef = self._build_entropy_coef()
        self.token_records = token_records_of(config, data.tokenizer, rewards.names)
        self.updates = PPOUpdate(
            config=config,
            forbidden_tokens=self.forbidden_tokens,
            engines=engines,
            further_batches={more.name: more.batches for more in data.further_data},
            entropy_coef=self.entropy_coef,
            nonfinite=self.nonfinite,
            clock=self.clock,
            token_records=self.token_records,
        )
        self.followers = followers_of_run(config, engines, self.clock)
        logger().info(f"loss = {self.updates.actor_sum()}")

    def _choose_old_logprobs(self) -> OldLogprobs:
        """Which pass gives the old log-probs; logs it with its reason."""
        model_configs = []
        for engine in self.engines.trained.values():
            model_configs.append(engine.module.config.to_dict())
        source, reason = old_logprobs_source(self.config, self.plan, model_configs)
        logger().info(f"old log-probs: {describe(source, reason)}")
        return source

    def _build_advantages(self, rewards: RewardMixture) -> AdvantageComputation:
        """What computes token rewards and advantages."""
        config = self.config
        return AdvantageComputation(
            flags=config.algorithm,
            max_length=config.ppo.max_answer_seq_len,
            seed=config.run.seed,
            score_clip=config.score_clip,
            warmup_rollouts=self.plan.warmup_rollouts,
            early_rewards=early_rewards_of(config),
            source_weights=[weight for _, weight in rewards.sources],
            terms=advantage_terms(config),
        )

    def _build_collection(
        self, sampler: RolloutSampler, requests: RewardRequests
    ) -> ExperienceCollection:
        """What samples and scores the responses of a PPO step."""
        passes = self._build_forward_passes()
        # what a feature puts around the rollouts of training where it needs the models: it offers
        # (rollouts so far, flags, sampler, forward passes) -> rollouts in their place
        for wrap in hooks("rollouts.with_models"):
            sampler.sample_rollout = wrap(sampler.sample_rollout, self.config, sampler, passes)
        return ExperienceCollection(
            config=self.config,
            plan=self.plan,
            sampler=sampler,
            requests=requests,
            passes=passes,
            rounds=rounds_of_run(self.config, self.plan, self.advantage_computation),
            clock=self.clock,
            several_data_sets=len(self.data_sources) > 1,
        )

    def _build_forward_passes(self) -> ForwardPasses:
        """The forward passes that score a rollout."""
        config = self.config
        engines = self.engines
        reference = None
        if config.algorithm.has_reference:
            reference = engines.reference
        critic = None
        if self.old_logprobs != "update":  # else the critic's training pass gives the values
            critic = engines.critic
        return ForwardPasses(
            actor=engines.actor,
            reference=reference,
            critic=critic,
            temperature=config.ppo.temperature,
            micro_batch_tokens=self.plan.micro_batch_tokens,
            old_logprobs=self.old_logprobs,
            kl_estimator=config.algorithm.kl_estimator,
            forbidden_tokens=self.forbidden_tokens,
            further=further_passes(config, engines.frozen, self.forbidden_tokens),
            clock=self.clock,
        )

    def _build_entropy_coef(self) -> AdaptiveEntropy | FixedCoefficient:
        """The coefficient of the entropy bonus; with `--entropy_target` it adapts."""
        algorithm = self.config.algorithm
        if algorithm.entropy_target is None:
            return FixedCoefficient(algorithm.entropy_coef)
        return AdaptiveEntropy(
            algorithm.entropy_coef,
            algorithm.entropy_target,
            algorithm.entropy_delta,
            algorithm.entropy_coef_max,
        )

    def critic_pass(self, rows: RewardedRollout, step: int) -> RewardedRollout:
        """The rows with values (N, R), if there is a critic. If scoring has computed none, the PPO
        step makes one update: its forward and backward pass is made here and gives the values, and
        its gradients wait in `state.critic_pass`. Collective."""
        if rows.values is not None or self.engines.critic is None:
            return rows
        self.engines.train()
        [minibatch] = self.mini_dataset.minibatches(rows, 1, step)
        objective = self.updates.critic_objective(minibatch, step)
        assert objective.recorded is not None
        with self.clock.phase("train"), block("train critic"), self.clock.part("critic"):
            gradients = accumulate(
                objective.engine, objective.step_loss.all_batches, objective.step_loss
            )
        self.state.critic_pass = replace(objective, gradients=gradients)
        return replace(rows, values=objective.recorded.gathered("values", rows))

    def is_unscored(self, rows: ScoredRollout, step: int) -> bool:
        """Whether no row of a PPO step has a score; then the step has no updates. `UserError` at
        the third such step in a row."""
        unscored = not bool(rows.has_score.any())
        self.nonfinite.count_unscored(unscored, step)
        if unscored:
            self.state.begin_updates(None, dict(self.collection.metrics))
        return unscored

    def keep_if_finite(self, experience: Experience, step: int) -> Experience | None:
        """Start the updates of a PPO step, with the metrics of its experience, which is returned.
        None if a number is not finite: then the step has no updates, or the run stops
        (`NonFiniteError`), and nothing adapts to its rows. Collective in that case."""
        scored_rows = experience
        if experience.sampled_mask is not None:  # some rows have left their groups
            scored_rows = select_rows(experience, experience.has_score.nonzero().squeeze(1))
        if self.nonfinite.is_finite(scored_rows, step):
            metrics = self._experience_metrics(scored_rows, len(experience.scores))
            self.state.begin_updates(experience, metrics)
            return experience
        self.advantage_computation.undo()
        if self.state.critic_pass is not None and self.state.critic_pass.gradients is not None:
            apply(self.state.critic_pass.gradients, refused=True)  # drops them
        self.state.begin_updates(None, dict(self.collection.metrics))
        return None

    def _experience_metrics(self, scored_rows: Experience, rollout_count: int) -> dict[str, float]:
        """The metrics of a PPO step before its updates: of its collection, of `scored_rows`, which
        are all rows with a score, and the rates of the updates. `rollout_count`: all rows, with or
        without a score."""
        computation = self.advantage_computation
        scores_around_clip = None
        if computation.score_clip:
            scores_around_clip = (
                computation.scaled(scored_rows.scores),
                computation.scaled_and_clipped(scored_rows.scores),
            )
        metrics = dict(self.collection.metrics)
        metrics |= experience_metrics(
            scored_rows,
            computation.used_kl_coef,
            self.collection.requests.mixture.names,
            self.data_sources,
            scores_around_clip,
            computation.score_magnitudes(scored_rows),
        )
        metrics["rollout/count"] = rollout_count
        metrics["kl/coef"] = computation.used_kl_coef
        metrics |= own_metrics(self.config.ppo.metrics, scored_rows)
        for role, engine in self.engines.trained.items():
            for name, rate in learning_rates(engine).items():
                metrics[f"optim/{name}/{role}"] = rate
        metrics["policy/entropy_coef"] = self.entropy_coef.value
        return metrics

    def after_actor_update(self) -> None:
        """Move what follows the actor from update to update."""
        for follower in self.followers:
            if follower.after_update is not None:
                follower.after_update()

    def after_updates(self, step: int) -> None:
        """After the updates of PPO step `step`, move what follows the actor from step to step.
        A follower may raise `NonFiniteError`. Collective."""
        for follower in self.followers:
            if follower.after_step is not None:
                self.state.metrics |= follower.after_step(step)

    def write_records(self, step: int) -> None:
        """Write the records of PPO step `step`, after its updates, where they are due."""
        state = self.state
        if state.experience is None:
            return
        # a resumed run knows the KL coefficient of this step by its metric alone
        kl_coef = state.metrics["kl/coef"]
        settings = replace(self.advantage_computation.settings, kl_coef=kl_coef)
        step_tokens = StepTokens(step, state.experience, state.update_tokens, settings)
        for record in self.token_records:
            if record.is_due(step):
                dist.on_main(partial(record.write, step_tokens))

    def minibatches_left(self, experience: Experience | None, step: int) -> Iterator[MiniBatch]:
        """The mini-batches of a PPO step that no update has used yet; none once a limit has ended
        its updates."""
        if experience is None:
            return
        self.engines.train()
        minibatches = self.mini_dataset.minibatches(experience, self.config.ppo.ppo_epochs, step)
        for minibatch in islice(minibatches, self.state.updates, None):
            if self.state.updates_ended:
                return
            report_phase(self.state.updates, self.plan.updates_per_rollout, "updates", name="train")
            yield minibatch
