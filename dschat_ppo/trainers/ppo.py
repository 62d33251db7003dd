"""Step 3: PPO. `PPOTrainer.run` is the whole algorithm on one screen; the rest says what each line does."""

from __future__ import annotations

import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from dschat_ppo.algorithms.controllers import AdaptiveEntropy, FixedCoefficient
from dschat_ppo.common import dist
from dschat_ppo.common.logging import logger, progress_bar
from dschat_ppo.common.phases import PhaseClock
from dschat_ppo.common.seeding import seed_this_rank
from dschat_ppo.config.batch_plan import PPOPlan
from dschat_ppo.config.steps import PPOConfig
from dschat_ppo.engine.build import learning_rate
from dschat_ppo.engine.rlhf_engine import RLHFEngine
from dschat_ppo.experience.mini_dataset import MiniDataset, Update
from dschat_ppo.experience.shaping import Shaping
from dschat_ppo.monitor.health import HealthWatch
from dschat_ppo.monitor.metrics import MetricSums
from dschat_ppo.monitor.rollout_metrics import drift_metrics, experience_metrics, phase_metrics
from dschat_ppo.monitor.writers import MetricsWriter
from dschat_ppo.rewards.mixture import RewardMixture
from dschat_ppo.trainers.collector import Collector
from dschat_ppo.trainers.dumps import Dumps
from dschat_ppo.trainers.judge import Judge
from dschat_ppo.trainers.nonfinite import NonFiniteGuard
from dschat_ppo.trainers.ptx import TextBatches
from dschat_ppo.trainers.rollouts import Rollouts
from dschat_ppo.trainers.rows_check import RowsCheck
from dschat_ppo.trainers.updater import Outcome, Updater
from dschat_ppo.trainers.validation import Validation
from dschat_ppo.types import Experience

HEADLINE = (
    "reward/score_mean",
    "kl/ref_k1",
    "policy/entropy",
    "value/explained_variance",
    "answers/length_mean",
)

RESULT = (*HEADLINE, "reward/total_mean", "answers/ended_share", "answers/distinct_share")


class PPOTrainer:
    """Collects experience and updates actor and critic from it.

    Args:
        config: the resolved flags.
        plan: the arithmetic of batches.
        engines: the roles.
        prompts: token rows of the prompts.
        tokenizer: of the actor.
        rewards: the sources of reward.
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
        self.validation: Validation | None = None  # set by who has held-out prompts
        self.clock = PhaseClock()
        self.health = HealthWatch()
        rollouts = Rollouts(ppo, engines.hybrid, prompts, tokenizer, seed, device)
        seed_this_rank(seed)
        self.mini_dataset = MiniDataset(plan.global_batch, plan.micro_batch_tokens, ppo.max_answer_seq_len, seed)
        judge = Judge(rewards, prompts, tokenizer)
        self.collector = Collector(config, plan, engines, rollouts, judge, self.mini_dataset, self.clock)
        self.shaping = Shaping(algorithm, ppo.max_answer_seq_len, seed)
        self.guard = NonFiniteGuard(config.safety, Dumps("ppo", config, tokenizer))
        self.rows_check = RowsCheck(config, engines, self.shaping, self.guard)
        self.updater = Updater(config, engines, texts, self.guard)
        self.entropy_coef: AdaptiveEntropy | FixedCoefficient = FixedCoefficient(algorithm.entropy_coef)
        if algorithm.entropy_target is not None:
            self.entropy_coef = AdaptiveEntropy(
                algorithm.entropy_coef, algorithm.entropy_target, algorithm.entropy_delta, 0.0,
                algorithm.entropy_coef_max,
            )  # fmt: skip

    def run(self, writer: MetricsWriter) -> dict[str, float]:
        """All PPO steps; returns `RESULT` of the first and of the last step, as `_before` and `_after`."""
        first, metrics = dict[str, float](), dict[str, float]()
        evaluated = self.validate(0)
        if evaluated:
            writer.write(0, evaluated)
        with progress_bar("PPO", self.plan.ppo_steps) as bar:
            for step in range(1, self.plan.ppo_steps + 1):
                kl_coef = self.shaping.kl_coef.value  # of this step: it adapts once the rows are seen
                rows, metrics = self.collector.collect(step)
                experience = self.rows_check.experience(rows, step)
                if experience is not None:  # else a number is not finite, and no update is made
                    metrics |= self.update(experience, step)
                    metrics |= experience_metrics(experience, kl_coef, self.collector.judge.mixture.names)
                    metrics |= {"coef/kl": kl_coef, **self._rollout_drift(experience, metrics)}
                metrics |= {**self.guard.metrics(*self.engines.trained), **self.validate(step)}
                self._report(writer, step, metrics)
                first = first or {**metrics, **evaluated}
                bar.update()
        return self._result(first, metrics)

    def _result(self, first: dict[str, float], last: dict[str, float]) -> dict[str, float]:
        """What `result.json` says of the first and of the last step, and of the evaluations."""
        shown = [name for name in last if name in first and (name in RESULT or name.startswith("eval/"))]
        result = {f"{name}_before": first[name] for name in shown} | {f"{name}_after": last[name] for name in shown}
        if self.validation is not None and self.validation.best is not None:
            score, step = self.validation.best
            result |= {"best_eval_score": score, "best_step": step}
        return result

    def validate(self, step: int) -> dict[str, float]:
        """Metrics of the held-out prompts, if it is time for them; else {}. Collective."""
        if self.validation is None or not self.validation.due(step, self.plan.ppo_steps):
            return {}
        with self.clock.phase("evaluate"):
            self.engines.eval()
            metrics = self.validation.run(step)
        shown = ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        logger().info(f"evaluation after PPO step {step}: {shown}")
        return metrics

    def _rollout_drift(self, experience: Experience, metrics: dict[str, float]) -> dict[str, float]:
        """Rollout against training log-probs: over all tokens, or over the first optimizer step if that is where a
        training forward meets the recorded ones first."""
        if self.config.recompute_old_logprobs:
            return drift_metrics(experience)
        found = {name: metrics.get(f"policy/first_log_ratio_abs_{name}") for name in ("mean", "max")}
        return {f"rollout/logprob_diff_{name}": value for name, value in found.items() if value is not None}

    def update(self, experience: Experience, step: int) -> dict[str, float]:
        """All optimizer steps of one PPO step; returns their metrics, over all ranks.

        Args:
            experience: rows of all ranks.
            step: PPO step, part of the shuffle's seed.
        """
        self.engines.train()
        train_actor = step > self.plan.warmup_rollouts
        sums, first = MetricSums(), dict[str, float]()
        metrics = self._rates()
        epochs, done = self.config.ppo.ppo_epochs, 0
        with self.clock.phase("train"):
            for number, part in enumerate(self.mini_dataset.updates(experience, epochs, step)):
                outcome = self.update_once(part, sums, train_actor, step)
                for role, norm in outcome.norms.items():
                    sums.add_mean(f"grad_norm/{role}", torch.tensor([norm], device=self.device))
                done += "actor" in outcome.norms
                if number == 0:
                    first = sums.reduce()
                if outcome.ends:
                    break
            tokens = float(experience.response_mask.sum() + experience.prompt_mask.sum())
            self.clock.count_tokens("train", tokens * epochs / dist.world_size())
        metrics |= sums.reduce()
        if train_actor:
            metrics["policy/updates_done_share"] = done * self.plan.global_batch / (len(experience.scores) * epochs)
        if done:
            self.entropy_coef.update(metrics["policy/entropy"], 1)
        for name in ("mean", "max"):
            if f"policy/log_ratio_abs_{name}" in first:
                metrics[f"policy/first_log_ratio_abs_{name}"] = first[f"policy/log_ratio_abs_{name}"]
        return metrics

    def _rates(self) -> dict[str, float]:
        """Learning rates and coefficients as the updates begin."""
        metrics = {f"lr/{role}": learning_rate(engine) for role, engine in self.engines.trained.items()}
        return {**metrics, "coef/entropy": self.entropy_coef.value}

    def update_once(self, part: Update, sums: MetricSums, train_actor: bool = True, step: int = 0) -> Outcome:
        """One optimizer step of actor and critic, as `Updater.once` says."""
        return self.updater.once(part, sums, self.entropy_coef.value, train_actor, step)

    def _report(self, writer: MetricsWriter, step: int, metrics: dict[str, float]) -> None:
        metrics |= phase_metrics(self.clock, self.device)
        writer.write(step, metrics)
        shown = ", ".join(f"{name} {metrics[name]:.4f}" for name in HEADLINE if name in metrics)
        logger().info(f"PPO step {step}/{self.plan.ppo_steps}: {shown}")
        for warning in self.health.check(metrics):
            logger().warning(f"health: step {step}: {warning}")
