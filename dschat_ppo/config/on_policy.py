"""Where old log-probs and values come from: scoring, or the forward passes of the only update of a
PPO step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from dschat_ppo.config.batch_plan import PPOPlan
from dschat_ppo.config.ppo_config import PPOConfig
from dschat_ppo.features import hooks

# A forward pass of scoring; recorded while sampling; the forward pass of the update, which also
# gives the values.
OldLogprobs = Literal["recompute", "rollout", "update"]


def old_logprobs_source(
    config: PPOConfig, plan: PPOPlan, model_configs: Iterable[dict[str, Any]]
) -> tuple[OldLogprobs, str | None]:
    """The source of old log-probs, and with `--old_logprobs auto` the reason that it is not the
    update. `model_configs` are the `config.json` of actor and critic."""
    of_scoring: OldLogprobs = "recompute" if config.recompute_old_logprobs else "rollout"
    if config.ppo.old_logprobs != "auto":
        return of_scoring, None
    reason = _needed_before(config, plan)
    if reason is None and any(router_adds_noise(model) for model in model_configs):
        reason = "the router of a model adds noise in training"
    if reason is None:
        return "update", None
    return of_scoring, reason


def describe(source: OldLogprobs, reason: str | None) -> str:
    """The result of `old_logprobs_source` for the log."""
    description = {
        "recompute": "scoring recomputes them",
        "rollout": "those recorded while sampling",
        "update": "those of the update, which also gives the values; ratios are 1",
    }[source]
    if reason is None:
        return description
    return f"{description}, because {reason} (--old_logprobs auto)"


def _needed_before(config: PPOConfig, plan: PPOPlan) -> str | None:
    """Why old log-probs and values must be known before the update; None if they need not: the KL
    in the reward is then that of the log-probs recorded while sampling. In bf16 these differ from
    those of a training forward by 0.05 per token (standard deviation, a model of 260 k parameters),
    around 0, which `abs` sums up to 3.8 in 128 tokens."""
    algorithm = config.algorithm
    if plan.updates_per_rollout > 1:
        return f"a PPO step makes {plan.updates_per_rollout} optimizer steps"
    # a feature says with `old_logprobs.reason_to_score` why, or None
    for reason_to_score in hooks("old_logprobs.reason_to_score"):
        reason: str | None = reason_to_score(config)
        if reason is not None:
            return reason
    if algorithm.importance_correction != "none":
        return "--importance_correction compares them with those of sampling"
    if algorithm.high_entropy_share < 1:
        return "--high_entropy_share selects tokens by their entropy"
    if algorithm.selects_tokens:
        return f"--policy_loss {algorithm.policy_loss} selects tokens by them"
    if algorithm.kl_estimator == "full":
        return "--kl_estimator full compares whole distributions"
    if algorithm.kl_estimator == "abs" and config.run.dtype != "fp32":
        return f"--kl_estimator abs measures rounding in {config.run.dtype}"
    if config.ppo.actor_dropout:
        return "--actor_dropout changes them in training"
    if algorithm.has_critic and config.ppo.critic_dropout:
        return "--critic_dropout changes values in training"
    for needs in config.needs:
        if needs.changed_in_training is not None:
            return needs.changed_in_training
    return None


def router_adds_noise(model: dict[Any, Any]) -> bool:
    """Whether a mixture of experts multiplies the inputs of its router by noise in training (Fedus
    et al. 2022); `model` is a `config.json`."""
    for name, value in model.items():
        if "jitter" in str(name) and value:
            return True
        if isinstance(value, dict) and router_adds_noise(value):
            return True
    return False
