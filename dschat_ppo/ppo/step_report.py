"""Metrics, evaluations, log lines and warnings of step 3, around its loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dschat_ppo.common import dist
from dschat_ppo.common.logging import logger
from dschat_ppo.common.progress import Progress
from dschat_ppo.monitor.health import HealthWatch
from dschat_ppo.monitor.rollout_metrics import drift_metrics, kl_metrics, phase_metrics
from dschat_ppo.monitor.step_line import PPO_COLUMNS, show_step
from dschat_ppo.monitor.trackers import Answer
from dschat_ppo.monitor.writers import MetricsWriter
from dschat_ppo.ppo.components import PPOComponents
from dschat_ppo.ppo.evaluation import Evaluation, shown_metrics
from dschat_ppo.ppo.samples import Samples
from dschat_ppo.run.output_folder import KeptModels

RESULT = (
    *(c.metric for c in PPO_COLUMNS),
    "reward/total_mean",
    "rollout/ended_share",
    "rollout/distinct_share",
)


@dataclass(eq=False)
class PPOReport:
    """Finishes PPO steps: reduces metrics, adapts the entropy coefficient, evaluates, saves models,
    and logs."""

    ppo: PPOComponents
    evaluation: Evaluation | None
    health: HealthWatch
    writer: MetricsWriter
    kept: KeptModels | None = None
    samples: Samples | None = None

    def __post_init__(self) -> None:
        self.bar = Progress("PPO", self.ppo.plan.ppo_steps, self.ppo.state.steps)

    def evaluate_before_training(self) -> None:
        """Evaluate the untrained actor, or, if the run resumes after that, look for the best models
        so far."""
        state = self.ppo.state
        if state.evaluated is None:
            state.evaluated = self._evaluate(0)
            if state.evaluated:
                self.writer.write(0, state.evaluated)
        elif self.evaluation is not None:
            self.evaluation.require_best_models(state.evaluated)
        self.bar.measure_from_here()

    def finish(self, step: int) -> None:
        """Finish the PPO step in flight. Collective."""
        ppo = self.ppo
        state = self.ppo.state
        metrics = state.metrics | state.sums.reduce()
        shown = list[dict[str, Any]]()
        if state.experience is not None:
            metrics |= update_metrics(ppo, metrics)
            if state.applied:
                ppo.entropy_coef.update(metrics["policy/entropy"], 1)
            if self.samples is not None and self.samples.is_due(step):
                shown = self.samples.write(step, state.experience)
        metrics |= {**ppo.nonfinite.metrics(*ppo.engines.trained), **self._evaluate(step)}
        if self.kept is not None and self.kept.is_due(step):
            with ppo.clock.phase("save"):
                self.kept.save_step(step)
        metrics |= phase_metrics(ppo.clock, ppo.device)
        answers = [
            Answer(line["prompt"], line["answer"], line["score"], line["length"]) for line in shown
        ]
        self.writer.write(step, metrics, answers)
        self.bar.advance()
        show_step(PPO_COLUMNS, metrics, self.bar, ppo.config.console)
        self.health.check(step, metrics)
        state.finish_step(metrics)

    def _evaluate(self, step: int) -> dict[str, float]:
        """Metrics of the held-out prompts, if they are due after PPO step `step`; else {}.
        Collective."""
        ppo = self.ppo
        evaluation = self.evaluation
        if evaluation is None or not evaluation.is_due(step, ppo.plan.ppo_steps):
            return {}
        with ppo.clock.phase("evaluate"):
            ppo.engines.eval()
            metrics = evaluation.run(step)
        logger().info(f"evaluation after step {step}: {shown_metrics(metrics)}")
        return metrics

    def result(self) -> dict[str, Any]:
        """For `result.json`: `RESULT` and the evaluations, `_before` of the first step and `_after`
        of the last."""
        first = {**self.ppo.state.first, **(self.ppo.state.evaluated or {})}
        last = self.ppo.state.last
        shown = [
            name for name in last if name in first and (name in RESULT or name.startswith("eval/"))
        ]
        result = {f"{name}_before": first[name] for name in shown} | {
            f"{name}_after": last[name] for name in shown
        }
        if self.evaluation is not None and self.evaluation.best is not None:
            score, step = self.evaluation.best
            result |= {"best_eval_score": score, "best_step": step}
        return result


def update_metrics(ppo: PPOComponents, metrics: dict[str, float]) -> dict[str, float]:
    """Drift between sampling and training in the PPO step in flight, and the share of its updates
    that were applied. Rollout log-probs are compared with those of a training forward pass: over
    all tokens if `old_logprobs` come from one, and then the KL to the reference is measured with
    them again; else over the first optimizer step, whose pass precedes every update."""
    state = ppo.state
    epochs = ppo.config.ppo.ppo_epochs
    experience = state.experience
    assert experience is not None
    tokens = float(experience.response_mask.sum() + experience.prompt_mask.sum())
    ppo.clock.count_tokens("train", tokens * epochs / dist.world_size())
    found: dict[str, float] = {}
    if ppo.old_logprobs != "rollout" and experience.old_logprobs is not None:
        found = kl_metrics(experience, ppo.data_sources) | drift_metrics(experience)
    elif ppo.old_logprobs == "rollout":
        first = {
            name: metrics.get(f"policy/first_log_ratio_abs_{name}") for name in ("mean", "max")
        }
        found = {
            f"rollout/logprob_diff_{name}": value
            for name, value in first.items()
            if value is not None
        }
    if state.steps >= ppo.plan.warmup_rollouts:
        rows_used = state.applied * ppo.plan.global_batch
        found["policy/updates_done_share"] = rows_used / (len(experience.scores) * epochs)
    return found
