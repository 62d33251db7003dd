"""The time of a step, from the work of its phases and the constants of the hardware."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dschat_ppo.config.batch_plan import PPOPlan
from dschat_ppo.config.on_policy import OldLogprobs
from dschat_ppo.config.steps import PPOConfig
from dschat_ppo.planner.hardware import Hardware
from dschat_ppo.planner.role_memory import FP32, MOMENTS, Role, sums_at_once
from dschat_ppo.planner.step_phases import micro_batch_tokens, micro_batches_of_update, rows_per_sample, sleeping


@dataclass(frozen=True)
class StepTime:
    """Seconds of a PPO step or an optimizer step, by part; `tokens` of all ranks that it processes."""

    seconds: dict[str, float]
    tokens: int

    @property
    def total(self) -> float:
        """Seconds of all parts."""
        return sum(self.seconds.values())


def pass_flops(role: Role, tokens: int, length: int, passes: float) -> float:
    """FLOPs of a forward pass and what follows it, over `tokens` tokens in rows of `length` tokens.

    A forward pass costs 2 for each parameter that a token multiplies and token (Kaplan et al. 2020, section 2.1), and
    for the scores and sums of causal attention 2 x 2 x heads x head size x length / 2 for each token and layer.
    """
    return passes * tokens * (2 * role.parts.active + 2 * role.parts.heads * length)


def update_passes(role: Role) -> float:
    """The cost of an update in forward passes: 1 forward, 1 for the gradients of activations, 1 for those of weights
    (of the share that trains), and with gradient checkpointing 1 to compute activations again."""
    share = role.trained / role.parts.total
    return 2 + share + (1 if role.checkpoints else 0)


def compute_seconds(flops: float, role: Role, hardware: Hardware) -> float:
    """FLOPs of one rank / (peak x utilisation)."""
    peak = hardware.fp32_flops if role.dtype == "fp32" else hardware.flops
    return flops / (peak * hardware.utilisation)


def gather_seconds(role: Role, hardware: Hardware, passes: int, updates: int = 0) -> float:
    """At stage 3, `passes` gathers of the whole weights, or one after each of `updates` if they stay whole in between:
    each rank receives s P (N - 1) / N bytes; offloaded parts also cross the host link, s P / N."""
    if role.stage < 3:
        return 0.0
    size = role.whole_weights
    seconds = size * (role.ranks - 1) / role.ranks / hardware.link
    if role.offloads_weights:
        seconds += size / role.ranks / hardware.host_link
    return (updates if role.kept_whole else passes) * seconds


def transfers(role: Role, micro_batches: int) -> int:
    """How often an update moves s T (N - 1) / N bytes for gradients and new weights.

    An all-reduce moves them twice. DeepSpeed all-reduces gradients once at stages 0 and 1, in bf16 their sums in fp32,
    and after each micro-batch at stage 2; stages 1 and 2 then gather the new weights. Stage 3 reduce-scatters after
    each micro-batch.
    """
    in_fp32 = FP32 // role.itemsize if sums_at_once(role) else 1
    return (2, 2 * in_fp32 + 1, 2 * micro_batches + 1, micro_batches)[role.stage]


def optimizer_seconds(role: Role, hardware: Hardware, micro_batches: int) -> float:
    """One update of `micro_batches`: gradients and weights cross the link (`transfers`); AdamW reads and writes fp32
    weights and moments and reads gradients, 2 x 12 + 4 bytes a parameter. In host memory, that is at the host's
    bandwidth, and gradients and new weights cross the host link."""
    size = role.itemsize * role.trained * (role.ranks - 1) / role.ranks
    moved = transfers(role, micro_batches) * size / hardware.link
    states = role.part * (2 * (FP32 + MOMENTS) + FP32)
    if not role.offloads_optimizer:
        return moved + states / hardware.bandwidth
    return moved + states / HOST_BANDWIDTH + role.part * (FP32 + role.itemsize) / hardware.host_link


HOST_BANDWIDTH = 8e9  # bytes per second that one rank's CPU Adam reaches


def decode_seconds(actor: Role, hardware: Hardware, rows: int, prompt: int, answer: int, by_layer: bool) -> float:
    """Decoding `answer` tokens for `rows` sequences: each step reads the weights and all keys and values, or computes
    2 FLOPs for each active parameter and row, whichever takes longer.

    Args:
        actor: the model.
        hardware: the device.
        rows: decoded at a time.
        prompt: tokens of a prompt.
        answer: tokens of an answer.
        by_layer: weights are gathered for each token.
    """
    weights = actor.itemsize * actor.parts.active
    cached = actor.parts.kv_bytes * rows * (prompt + answer / 2)
    read = (weights + cached) / (hardware.bandwidth * hardware.decode_share)
    computed = compute_seconds(pass_flops(actor, rows, prompt + answer, 1), actor, hardware)
    gathered = weights * (actor.ranks - 1) / actor.ranks / hardware.link if by_layer else 0.0
    return answer * (max(read, computed) + hardware.step_seconds + gathered)


def scored_roles(source: OldLogprobs) -> tuple[str, ...]:
    """The models that score answers before the update: not actor and critic where the forward passes of the update
    give their numbers, and not the actor where those recorded while sampling count."""
    return {
        "update": ("reference", "reward"),
        "rollout": ("reference", "reward", "critic"),
        "recompute": ("reference", "reward", "critic", "actor"),
    }[source]


def ppo_time(
    config: PPOConfig, plan: PPOPlan, roles: Sequence[Role], hardware: Hardware, rows: int, source: OldLogprobs,
    by_layer: bool,
) -> StepTime:  # fmt: skip
    """A PPO step with answers of the maximum length.

    Args:
        config: of the step.
        plan: batch sizes.
        roles: the models, the actor first.
        hardware: the device.
        rows: sequences that a rank decodes at a time.
        source: of the old log-probs, see `config/on_policy.py`.
        by_layer: the rollout gathers the actor's weights for each token.
    """
    ppo, actor = config.ppo, roles[0]
    prompt, answer = ppo.max_prompt_seq_len, ppo.max_answer_seq_len
    length, own = prompt + answer, plan.rows_per_rank
    tokens = own * length
    rounds = -(-own // max(1, rows))
    prefill = compute_seconds(pass_flops(actor, plan.prompts_per_rank * prompt, prompt, 1), actor, hardware)
    rollout = prefill + rounds * decode_seconds(actor, hardware, min(rows, own), prompt, answer, by_layer)
    if actor.stage == 3 and not by_layer and not actor.kept_whole:
        rollout += gather_seconds(actor, hardware, 1)
    if config.ppo_memory.sleep_in_rollout and hardware.on_gpu:
        rollout += 2 * sum(sleeping(roles).values()) / hardware.host_link
    micro_batches = -(-tokens // micro_batch_tokens(config, plan))
    scored = [role for role in roles if role.name in scored_roles(source)]
    scoring = sum(
        compute_seconds(pass_flops(role, tokens, length, 1), role, hardware)
        + gather_seconds(role, hardware, micro_batches) for role in scored
    )  # fmt: skip
    seconds = {"rollout": rollout, "scoring": scoring}
    for role in roles:
        if role.trained:
            flops = ppo.ppo_epochs * pass_flops(role, tokens, length, update_passes(role))
            updates = plan.updates_per_rollout
            per_update = micro_batches_of_update(config, plan)
            gathers = gather_seconds(role, hardware, 2 * per_update * updates, updates)
            steps = updates * optimizer_seconds(role, hardware, per_update)
            seconds[f"{role.name} update"] = compute_seconds(flops, role, hardware) + gathers + steps
    return StepTime(seconds, plan.rollout_rows * length)


def supervised_time(config: Any, role: Role, hardware: Hardware) -> StepTime:
    """An optimizer step with rows of the maximum length."""
    fit = config.fit
    rows = fit.per_device_train_batch_size * fit.gradient_accumulation_steps * rows_per_sample(config)
    tokens = rows * fit.max_seq_len // config.memory.sequence_parallel_size
    flops = pass_flops(role, tokens, fit.max_seq_len, update_passes(role))
    micro_batches = fit.gradient_accumulation_steps
    gathers = gather_seconds(role, hardware, 2 * micro_batches, updates=1)
    update = compute_seconds(flops, role, hardware) + gathers + optimizer_seconds(role, hardware, micro_batches)
    return StepTime({"update": update}, rows * fit.max_seq_len * role.ranks // config.memory.sequence_parallel_size)
