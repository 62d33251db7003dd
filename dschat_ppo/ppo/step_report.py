"""Metrics, evaluations, log lines and warnings of step 3, around its loop."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from dschat_ppo.common import dist
from dschat_ppo.common.logging import logger
from dschat_ppo.common.progress import Progress
from dschat_ppo.monitor.health import HealthWatch
from dschat_ppo.monitor.rollout_metrics import drift_metrics, kl_metrics, phase_metrics
from dschat_ppo.monitor.step_line import PPO_COLUMNS, show_step
from dschat_ppo.monitor.trackers import SampledResponse
from dschat_ppo.monitor.writers import MetricsWriter
from dschat_ppo.ppo.components import PPOComponents
from dschat_ppo.ppo.evaluation import Evaluation, shown_metrics
from dschat_ppo.ppo.samples import Samples
from dschat_ppo.run.output_folder import KeptModels

# metrics that `result.json` has
RESULT_METRICS = (
    *(column.metric for column in PPO_COLUMNS),
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
    kept_models: KeptModels | None = None
    samples: Samples | None = None

    def __post_init__(self) -> None:
        self.bar = Progress("PPO", self.ppo.plan.ppo_steps, self.ppo.state.steps)

    def evaluate_before_training(self) -> None:
        """Evaluate the untrained actor, or, if the run resumes after that, look for the best models
        so far."""
        state = self.ppo.state
        if state.metrics_before is None:
            state.metrics_before = self._evaluate(0)
            if state.metrics_before:
                self.writer.write(0, state.metrics_before)
        elif self.evaluation is not None:
            self.evaluation.require_best_models(state.metrics_before)
        self.bar.measure_from_here()

    def until_early_stop(self, steps: Iterable[int]) -> Iterable[int]:
        """The PPO steps that are left, which `--early_stop_patience` may end."""
        if self.evaluation is None:
            return steps
        return self.evaluation.early_stop.until_due(steps)

    def finish(self, step: int) -> None:
        """Finish the PPO step in flight. Collective."""
        ppo = self.ppo
        state = ppo.state
        metrics = state.metrics | state.sums.reduce()
        responses = list[SampledResponse]()
        if state.experience is not None:
            metrics |= update_metrics(ppo, metrics)
            if state.actor_updates:
                ppo.entropy_coef.update(metrics["policy/entropy"], 1)
            if self.samples is not None and self.samples.is_due(step):
                for line in self.samples.write(step, state.experience):
                    responses.append(
                        SampledResponse(
                            line["prompt"], line["answer"], line["score"], line["length"]
                        )
                    )
            ppo.write_records(step)
        metrics |= ppo.nonfinite.metrics(*ppo.engines.trained)
        metrics |= self._evaluate(step)
        if self.kept_models is not None and self.kept_models.is_due(step):
            with ppo.clock.phase("save"):
                self.kept_models.save_step(step)
        metrics |= phase_metrics(ppo.clock, ppo.device)
        self.writer.write(step, metrics, responses)
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
        """For `result.json`: `RESULT_METRICS` and those of evaluations, `_before` of the first PPO
        step and `_after` of the last."""
        state = self.ppo.state
        before = state.first_metrics | (state.metrics_before or {})
        after = state.last_metrics
        names = []
        for name in after:
            if name in before and (name in RESULT_METRICS or name.startswith("eval/")):
                names.append(name)
        result: dict[str, Any] = {f"{name}_before": before[name] for name in names}
        result |= {f"{name}_after": after[name] for name in names}
        if self.evaluation is not None and self.evaluation.best is not None:
            score, step = self.evaluation.best
            result["best_eval_score"] = score
            result["best_step"] = step
        ends_early = state.steps < self.ppo.plan.ppo_steps
        if ends_early and self.evaluation is not None:
            result["early_stop"] = self.evaluation.early_stop.reason
        result["ppo_steps"] = state.steps
        result["optimizer_steps"] = state.steps * self.ppo.plan.updates_per_rollout
        return result


def update_metrics(ppo: PPOComponents, metrics: dict[str, float]) -> dict[str, float]:
    """Drift between sampling and training in the PPO step in flight, and the share of its updates
    that were applied; also counts the tokens that its updates trained on.

    Rollout log-probs are compared with those of a forward pass of the policy that sampled. Where
    `old_logprobs` come from such a pass, over all tokens, and the KL to the reference is measured
    with them again. Else in the first optimizer step, whose pass precedes every update: `metrics`,
    those of the step so far, have its result.
    """
    state = ppo.state
    epochs = ppo.config.ppo.ppo_epochs
    experience = state.experience
    assert experience is not None
    tokens = float(experience.response_mask.sum() + experience.prompt_mask.sum())
    ppo.clock.count_tokens("train", tokens * epochs / dist.world_size())
    measured: dict[str, float] = {}
    if ppo.old_logprobs == "rollout":
        for statistic in ("mean", "max"):
            difference = metrics.get(f"policy/first_log_ratio_abs_{statistic}")
            if difference is not None:
                measured[f"rollout/logprob_diff_{statistic}"] = difference
    elif experience.old_logprobs is not None:
        measured = kl_metrics(experience, ppo.data_sources) | drift_metrics(experience)
    if state.steps >= ppo.plan.warmup_rollouts:
        rows_used = state.actor_updates * ppo.plan.global_batch
        measured["policy/updates_done_share"] = rows_used / (len(experience.scores) * epochs)
    return measured
