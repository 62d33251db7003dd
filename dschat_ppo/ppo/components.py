"""The parts of step 3, built from the flags. `loop.py` holds the algorithm that uses them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from dschat_ppo.algorithms.controllers import AdaptiveEntropy, FixedCoefficient
from dschat_ppo.common.phases import PhaseClock
from dschat_ppo.common.seeding import seed_this_rank
from dschat_ppo.config.batch_plan import PPOPlan
from dschat_ppo.config.steps import PPOConfig
from dschat_ppo.engine.build_engine import learning_rate
from dschat_ppo.engine.rlhf_engine import RLHFEngine
from dschat_ppo.monitor.rollout_metrics import experience_metrics
from dschat_ppo.nonfinite.finite_experience import FiniteExperience
from dschat_ppo.nonfinite.policy import NonFinitePolicy
from dschat_ppo.nonfinite.repro_bundle import ReproBundles
from dschat_ppo.ppo.advantages import AdvantageComputation
from dschat_ppo.ppo.collect import ExperienceCollection
from dschat_ppo.ppo.generate import RolloutGenerator
from dschat_ppo.ppo.mini_dataset import MiniBatch, MiniDataset
from dschat_ppo.ppo.plain_text import TextBatches
from dschat_ppo.ppo.reward_scorer import RewardScorer
from dschat_ppo.ppo.state import PPOState
from dschat_ppo.ppo.update import PPOUpdate
from dschat_ppo.rewards.mixture import RewardMixture
from dschat_ppo.types import Experience


class PPOComponents:
    """What `run`, `make_experience` and `update` act on. Building it is collective.

    Args:
        config: the resolved flags.
        plan: the batch sizes.
        engines: the roles.
        prompts: token rows of the prompts.
        tokenizer: of the actor.
        rewards: the reward sources.
        device: of this rank.
        texts: blocks of plain text for the PTX loss, or None.
    """

    def __init__(
        self, config: PPOConfig, plan: PPOPlan, engines: RLHFEngine, prompts: Dataset,
        tokenizer: PreTrainedTokenizerBase, rewards: RewardMixture, device: torch.device,
        texts: TextBatches | None = None,
    ):  # fmt: skip
        ppo, algorithm, seed = config.ppo, config.algorithm, config.run.seed
        self.config = config
        self.plan = plan
        self.engines = engines
        self.device = device
        self.texts = texts
        self.state = PPOState()
        self.clock = PhaseClock()
        self.nonfinite = NonFinitePolicy(config.safety, ReproBundles("ppo", config, tokenizer))
        generator = RolloutGenerator(ppo, engines.hybrid, prompts, tokenizer, seed, device)
        seed_this_rank(seed)
        self.advantage_computation = AdvantageComputation(algorithm, ppo.max_answer_seq_len, seed)
        models = {
            "actor": engines.actor, "critic": engines.critic,
            "reference": ppo.actor_model_name_or_path, "reward": config.reward_folder,
        }  # fmt: skip
        self.advantages = FiniteExperience(
            self.advantage_computation, self.nonfinite, models, in_rank_order=not algorithm.dynamic_sampling
        )
        self.collection = ExperienceCollection(
            config, plan, engines, generator, RewardScorer(rewards, prompts, tokenizer),
            self.advantage_computation.shaped, self.clock,
        )  # fmt: skip
        self.mini_dataset = MiniDataset(plan.global_batch, plan.micro_batch_tokens, ppo.max_answer_seq_len, seed)
        self.entropy_coef: AdaptiveEntropy | FixedCoefficient = FixedCoefficient(algorithm.entropy_coef)
        if algorithm.entropy_target is not None:
            self.entropy_coef = AdaptiveEntropy(
                algorithm.entropy_coef, algorithm.entropy_target, algorithm.entropy_delta, 0.0,
                algorithm.entropy_coef_max,
            )  # fmt: skip
        self.updates = PPOUpdate(config, engines, texts, self.entropy_coef, self.nonfinite, self.clock)

    def begin_updates(self, experience: Experience | None) -> None:
        """Start the updates of a PPO step, with the metrics of its experience."""
        metrics = dict(self.collection.metrics)
        if experience is not None:
            kl_coef = self.advantage_computation.used_kl_coef
            metrics |= experience_metrics(experience, kl_coef, self.collection.reward_scorer.mixture.names)
            metrics["coef/kl"] = kl_coef
            metrics |= {f"lr/{role}": learning_rate(engine) for role, engine in self.engines.trained.items()}
            metrics["coef/entropy"] = self.entropy_coef.value
        self.state.begin_updates(experience, metrics)

    def minibatches_left(self, experience: Experience | None, step: int) -> Iterator[MiniBatch]:
        """The mini-batches of a PPO step that no update has used yet; none once a limit has ended its updates."""
        if experience is None:
            return
        self.engines.train()
        minibatches = self.mini_dataset.minibatches(experience, self.config.ppo.ppo_epochs, step)
        for minibatch in islice(minibatches, self.state.updates, None):
            if self.state.ended:
                return
            yield minibatch
