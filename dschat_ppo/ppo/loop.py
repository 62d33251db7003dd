"""Step 3: PPO. `PPOTrainer.run` is the whole algorithm on one screen; the rest says what each line does."""

from __future__ import annotations

from itertools import islice
from typing import Any

import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from dschat_ppo.algorithms.controllers import AdaptiveEntropy, FixedCoefficient
from dschat_ppo.checkpoint.resumable import NO_CHECKPOINTS, Checkpointer, RankStates, load_saved, say_it_begins_anew
from dschat_ppo.common import dist
from dschat_ppo.common.logging import logger, progress_bar
from dschat_ppo.common.phases import PhaseClock, announce_step
from dschat_ppo.common.seeding import seed_this_rank
from dschat_ppo.config.batch_plan import PPOPlan
from dschat_ppo.config.steps import PPOConfig
from dschat_ppo.engine.build_engine import learning_rate
from dschat_ppo.engine.rlhf_engine import RLHFEngine
from dschat_ppo.errors import RolloutCancelled, UserError
from dschat_ppo.monitor.health import HealthWatch
from dschat_ppo.monitor.metric_sums import MetricSums
from dschat_ppo.monitor.rollout_metrics import drift_metrics, experience_metrics, phase_metrics
from dschat_ppo.monitor.writers import MetricsWriter
from dschat_ppo.nonfinite.policy import NonFinitePolicy
from dschat_ppo.nonfinite.repro_bundle import ReproBundles
from dschat_ppo.ppo.advantages import AdvantageComputation
from dschat_ppo.ppo.collect import ExperienceCollector
from dschat_ppo.ppo.evaluate import Evaluation
from dschat_ppo.ppo.finite_check import FiniteCheck
from dschat_ppo.ppo.generate import Rollouts
from dschat_ppo.ppo.mini_dataset import MiniDataset, Update
from dschat_ppo.ppo.plain_text import TextBatches
from dschat_ppo.ppo.reward_scorer import RewardScorer
from dschat_ppo.ppo.state import PPOState
from dschat_ppo.ppo.update import Outcome, Updater
from dschat_ppo.rewards.reward_mixture import RewardMixture
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
        self.validation: Evaluation | None = None  # set by who has held-out prompts
        self.clock = PhaseClock()
        self.health = HealthWatch()
        self.progress = PPOState()
        rollouts = Rollouts(ppo, engines.hybrid, prompts, tokenizer, seed, device)
        seed_this_rank(seed)
        self.mini_dataset = MiniDataset(plan.global_batch, plan.micro_batch_tokens, ppo.max_answer_seq_len, seed)
        judge = RewardScorer(rewards, prompts, tokenizer)
        self.shaping = AdvantageComputation(algorithm, ppo.max_answer_seq_len, seed)
        self.collector = ExperienceCollector(config, plan, engines, rollouts, judge, self.shaping.shaped, self.clock)
        self.guard = NonFinitePolicy(config.safety, ReproBundles("ppo", config, tokenizer))
        self.rows_check = FiniteCheck(config, engines, self.shaping, self.guard)
        self.updater = Updater(config, engines, texts, self.guard)
        self.entropy_coef: AdaptiveEntropy | FixedCoefficient = FixedCoefficient(algorithm.entropy_coef)
        if algorithm.entropy_target is not None:
            self.entropy_coef = AdaptiveEntropy(
                algorithm.entropy_coef, algorithm.entropy_target, algorithm.entropy_delta, 0.0,
                algorithm.entropy_coef_max,
            )  # fmt: skip

    def run(self, writer: MetricsWriter, checkpointer: Checkpointer = NO_CHECKPOINTS) -> dict[str, float]:
        """All PPO steps that are left; returns `RESULT` of the first and of the last, as `_before` and `_after`.

        Args:
            writer: of the metrics.
            boundary: is passed after each optimizer step and each PPO step.

        Raises:
            StopRequested: from the boundary.
        """
        progress = self.progress
        if progress.evaluated is None:
            progress.evaluated = self.validate(0)
            if progress.evaluated:
                writer.write(0, progress.evaluated)
        with progress_bar("PPO", self.plan.ppo_steps, progress.steps) as bar:
            while progress.steps < self.plan.ppo_steps:
                if progress.experience is None and not self._collect(checkpointer):
                    checkpointer.save_if_due()
                    continue
                if progress.experience is not None:  # else a number is not finite, and no update is made
                    self._train(checkpointer)
                self._finish(writer)
                checkpointer.save_if_due()
                bar.update()
        return self._result({**progress.first, **progress.evaluated}, progress.last)

    def _collect(self, checkpointer: Checkpointer) -> bool:
        """Experience of the next PPO step. False: it was given up, because the run is to stop.

        The seeds of answers depend on nothing but the step, so a resumed run collects the same.
        """
        step, before = self.progress.steps + 1, self.collector.state_dict()
        announce_step(step)
        try:
            rows, metrics = self.collector.collect(step, checkpointer)
        except RolloutCancelled:
            self.collector.load_state_dict(before, self.device)
            return False
        kl_coef = self.shaping.kl_coef.value  # of this step: it adapts once the rows are seen
        experience = self.rows_check.experience(rows, step)
        if experience is not None:
            metrics |= experience_metrics(experience, kl_coef, self.collector.judge.mixture.names)
            metrics |= {"coef/kl": kl_coef, **self._rates()}
        self.progress.begin_step(experience, metrics)
        return True

    def _train(self, checkpointer: Checkpointer) -> None:
        """The optimizer steps that are left of the PPO step in flight."""
        progress, step = self.progress, self.progress.steps + 1
        assert progress.experience is not None
        announce_step(step)
        self.engines.train()
        updates = self.mini_dataset.updates(progress.experience, self.config.ppo.ppo_epochs, step)
        for part in islice(updates, progress.updates, None):
            if progress.ended:
                break
            if progress.updates:
                checkpointer.save_if_due()
            with self.clock.phase("train"):
                self._update(part, step)

    def _update(self, part: Update, step: int) -> None:
        """One optimizer step, and what it measured."""
        progress = self.progress
        outcome = self.update_once(part, progress.sums, step > self.plan.warmup_rollouts, step)
        once = torch.tensor([dist.is_main()], device=self.device)  # all ranks know it, and their number may change
        for role, norm in outcome.norms.items():
            progress.sums.add_mean(f"grad_norm/{role}", torch.tensor([norm], device=self.device), once)
        if progress.updates == 0:
            first = progress.sums.reduce()
            for name in ("mean", "max"):
                if f"policy/log_ratio_abs_{name}" in first:
                    progress.metrics[f"policy/first_log_ratio_abs_{name}"] = first[f"policy/log_ratio_abs_{name}"]
        if "actor" in outcome.norms and self.engines.actor_average is not None:
            self.engines.actor_average.update()
        progress.updates += 1
        progress.applied += "actor" in outcome.norms
        progress.ended = outcome.ends

    def update_once(self, part: Update, sums: MetricSums, train_actor: bool = True, step: int = 0) -> Outcome:
        """One optimizer step of actor and critic, as `Updater.once` says."""
        return self.updater.once(part, sums, self.entropy_coef.value, train_actor, step)

    def _finish(self, writer: MetricsWriter) -> None:
        """Metrics of the PPO step in flight, which ends; evaluates if it is time."""
        progress, step = self.progress, self.progress.steps + 1
        metrics = progress.metrics | progress.sums.reduce()
        if progress.experience is not None:
            metrics |= self._update_metrics(progress.experience, metrics)
        metrics |= {**self.guard.metrics(*self.engines.trained), **self.validate(step)}
        self._report(writer, step, metrics)
        progress.end_step(metrics)

    def _update_metrics(self, experience: Experience, metrics: dict[str, float]) -> dict[str, float]:
        """What all updates of the PPO step amount to; adapts the entropy bonus."""
        epochs, applied = self.config.ppo.ppo_epochs, self.progress.applied
        tokens = float(experience.response_mask.sum() + experience.prompt_mask.sum())
        self.clock.count_tokens("train", tokens * epochs / dist.world_size())
        found = self._rollout_drift(experience, metrics)
        if self.progress.steps >= self.plan.warmup_rollouts:
            found["policy/updates_done_share"] = applied * self.plan.global_batch / (len(experience.scores) * epochs)
        if applied:
            self.entropy_coef.update(metrics["policy/entropy"], 1)
        return found

    def _rollout_drift(self, experience: Experience, metrics: dict[str, float]) -> dict[str, float]:
        """Rollout against training log-probs: over all tokens, or over the first optimizer step if that is where a
        training forward meets the recorded ones first."""
        if self.config.recompute_old_logprobs:
            return drift_metrics(experience)
        found = {name: metrics.get(f"policy/first_log_ratio_abs_{name}") for name in ("mean", "max")}
        return {f"rollout/logprob_diff_{name}": value for name, value in found.items() if value is not None}

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

    def _rates(self) -> dict[str, float]:
        """Learning rates and coefficients as the updates begin."""
        metrics = {f"lr/{role}": learning_rate(engine) for role, engine in self.engines.trained.items()}
        return {**metrics, "coef/entropy": self.entropy_coef.value}

    def _report(self, writer: MetricsWriter, step: int, metrics: dict[str, float]) -> None:
        metrics |= phase_metrics(self.clock, self.device)
        writer.write(step, metrics)
        shown = ", ".join(f"{name} {metrics[name]:.4f}" for name in HEADLINE if name in metrics)
        logger().info(f"PPO step {step}/{self.plan.ppo_steps}: {shown}")
        for warning in self.health.check(metrics):
            logger().warning(f"health: step {step}: {warning}")

    def _result(self, first: dict[str, float], last: dict[str, float]) -> dict[str, float]:
        """What `result.json` says of the first and of the last step, and of the evaluations."""
        shown = [name for name in last if name in first and (name in RESULT or name.startswith("eval/"))]
        result = {f"{name}_before": first[name] for name in shown} | {f"{name}_after": last[name] for name in shown}
        if self.validation is not None and self.validation.best is not None:
            score, step = self.validation.best
            result |= {"best_eval_score": score, "best_step": step}
        return result

    def update(self, experience: Experience) -> dict[str, float]:
        """All optimizer steps over `experience`, the rows of all ranks; returns their metrics, over all ranks."""
        self.progress.begin_step(experience, self._rates())
        self._train(NO_CHECKPOINTS)
        metrics = self.progress.metrics | self.progress.sums.reduce()
        return metrics | self._update_metrics(experience, metrics)

    @property
    def engines_to_save(self) -> dict[str, Any]:
        """The actor's engine and, if there is one, the critic's."""
        return self.engines.trained

    @property
    def position(self) -> tuple[int, int]:
        """PPO steps done, and optimizer steps done of the one in flight."""
        return self.progress.steps, self.progress.updates

    @property
    def is_best(self) -> bool:
        """Whether the last evaluation was made at this position and is the best so far."""
        best = self.validation.best if self.validation is not None else None
        return best is not None and self.position == (best[1], 0)

    def shared_state(self) -> dict[str, Any]:
        """What a resumed run needs and all ranks have in common."""
        return {
            "progress": self.progress.state_dict(),
            "collector": self.collector.state_dict(),
            "shaping": self.shaping.state_dict(),
            "entropy_coef": self.entropy_coef.state_dict(),
            "health": self.health.state_dict(),
            "guard": self.guard.state_dict(),
            "texts": None if self.texts is None else self.texts.stream.state_dict(),
            "best": None if self.validation is None else self.validation.best,
        }

    def rank_state(self) -> dict[str, Any]:
        """What a resumed run needs of this rank alone."""
        average = self.engines.actor_average
        return {
            "sums": self.progress.sums.state_dict(),
            "actor_average": None if average is None else average.state_dict(),
        }

    def load_state(self, shared: dict[str, Any], ranks: RankStates) -> None:
        """Go on from `shared_state` and the `rank_state` of each rank of the saved run.

        Raises:
            UserError: rows of a PPO step in flight lack what the flags now ask for.
        """
        self.progress.load_state_dict(shared["progress"], self._sums_of(ranks), self.device)
        self._load_average(ranks)
        self.collector.load_state_dict(shared["collector"], self.device)
        self._check_rows()
        self.shaping.load_state_dict(shared["shaping"])
        if self.config.algorithm.entropy_target is not None:
            load_saved("--entropy_target", shared["entropy_coef"], self.entropy_coef.load_state_dict)
        self.health.load_state_dict(shared["health"])
        self.guard.load_state_dict(shared["guard"])
        if self.texts is not None:
            load_saved("--unsupervised_dataset_name", shared["texts"], self.texts.stream.load_state_dict)
        if self.validation is not None and shared["best"] is not None:
            self.validation.best = tuple(shared["best"])

    def _check_rows(self) -> None:
        """Rows of a PPO step in flight, and those that wait for the next, were made under the saved flags."""
        algorithm, pool = self.config.algorithm, self.collector.pool
        asked = {"values": algorithm.has_critic, "ref_logprobs": algorithm.has_reference}
        asked["selected"] = algorithm.selects_tokens
        kept = [vars(rows) for rows in (self.progress.experience, pool and pool.accepted) if rows is not None]
        lacking = [name for name in asked if asked[name] and any(name in rows and rows[name] is None for rows in kept)]
        if lacking:
            raise UserError(
                f"--resume_force: rows of a PPO step in the checkpoint have no {', '.join(lacking)}, which the flags "
                "now ask for; give the former settings, or go on from a checkpoint without such rows by --resume FOLDER"
            )

    def _sums_of(self, ranks: RankStates) -> MetricSums:
        """This rank's part. On another number of ranks the first one takes what all of them have measured; the others
        take the same names with nothing counted, so that `reduce` is one collective on all ranks."""
        if ranks.own is not None:
            return MetricSums.restored([ranks.own["sums"]], self.device)
        sums = MetricSums.restored([state["sums"] for state in ranks.read_all()], self.device)
        return sums if dist.is_main() else sums.emptied()

    def _load_average(self, ranks: RankStates) -> None:
        average = self.engines.actor_average
        if average is None:
            return
        own = None if ranks.own is None else ranks.own["actor_average"]
        if own is not None and average.has_layout_of(own):
            average.load_state_dict(own)
        elif not average.load_parts(state["actor_average"] or {} for state in ranks.read_all()):
            say_it_begins_anew("--enable_ema")
            average.begin()
