"""The phases of a step, with what each model holds at the peak of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dschat_ppo.config.batch_plan import PPOPlan
from dschat_ppo.config.steps import PPOConfig, PreferenceConfig
from dschat_ppo.engine.tensor_parallel import reason_not_to_divide
from dschat_ppo.planner import pass_memory, role_memory
from dschat_ppo.planner.phase import Phase
from dschat_ppo.planner.role_memory import FP32, Memory, Role


def steady_phase(name: str, roles: Sequence[Role], ema: bool = False) -> Phase:
    """What stays between two updates.

    Args:
        name: of the phase.
        roles: the models.
        ema: `--enable_ema`: an fp32 average of the actor's trained weights in host memory, divided over the ranks.
    """
    phase = Phase(name)
    for role in roles:
        phase.add(role.name, "weights", role_memory.weights(role))
        phase.add(role.name, "optimizer", role_memory.optimizer(role))
        phase.add(role.name, "gradients", role_memory.gradients(role))
        phase.add(role.name, "buffers", role_memory.buckets(role) + role_memory.gathered(role))
    if ema:
        phase.add("average", "weights", Memory.of(FP32 * roles[0].trained / roles[0].ranks, on_host=True))
    return phase


def load_phase(roles: Sequence[Role], ema: bool) -> Phase:
    """Building the engines: all of them but for the moments, which the first update makes. For the last model that
    trains, its weights once more, while DeepSpeed moves them into one buffer (stage 3: this rank's part in fp32, and
    the weights that the probe of its kernels gathers)."""
    phase = steady_phase("load", roles, ema)
    trained = [role for role in roles if role.trained]
    for role in trained:
        moments = role.part * role_memory.MOMENTS
        phase.add(role.name, "optimizer", Memory(0, -moments) if role.offloads_optimizer else Memory(-moments))
    for role in trained[-1:]:
        again = FP32 * role.part if role.stage == 3 else role.itemsize * role.trained
        phase.add(role.name, "buffers", Memory.of(again) + role_memory.gathered_layer_by_layer(role))
    return phase


def update_phase(
    name: str, role: Role, roles: Sequence[Role], tokens: int, scored: int, micro_batches: int, config: Any,
    ema: bool = False,
) -> Phase:  # fmt: skip
    """An update of one model: the larger of the beginning and the end of the backward pass of its last micro-batch.

    At the beginning there are all activations, the gradients of earlier micro-batches, and the gradient of the head; at
    the end all gradients, and the activations of the first layer.

    Args:
        name: of the phase.
        role: that is updated.
        roles: the models.
        tokens: of a micro-batch on this rank, padding included.
        scored: tokens whose log-probs the loss reads.
        micro_batches: of an update.
        config: of the step.
        ema: `--enable_ema`.
    """
    on_host = config.memory.offload_activations
    first, last = (steady_phase(name, roles, ema) for _ in range(2))
    for phase in (first, last):
        phase.add(role.name, "buffers", role_memory.gathered_layer_by_layer(role))
    first.add(role.name, "activations", pass_memory.activations(role, tokens, on_host))
    first.add(role.name, "logits", pass_memory.head_memory(role, scored))
    of_head = role.itemsize * min(role.parts.head or role.parts.embedding, role.trained)
    first.add(role.name, "gradients", Memory.of(of_head))
    if micro_batches > 1:
        first.add(role.name, "gradients", role_memory.accumulated(role))
    last.add(role.name, "gradients", role_memory.update_gradients(role))
    last.add(role.name, "activations", Memory.of(max(role.parts.saved.layers, default=0) * tokens))
    return max(first, last, key=lambda phase: phase.total().device + phase.total().host)


def checkpoint_phase(roles: Sequence[Role], ema: bool) -> Phase:
    """Saving a checkpoint and the model: rank 0 collects the whole weights of a model that trains in host memory."""
    phase = steady_phase("checkpoint", roles, ema)
    largest = max((role for role in roles if role.trained), key=lambda role: role.itemsize * role.trained)
    phase.once = largest.itemsize * largest.parts.total
    return phase


def score_phase(config: PPOConfig, plan: PPOPlan, roles: Sequence[Role]) -> Phase:
    """Scoring: forward passes of one model after another over micro-batches, and the experience."""
    phase = steady_phase("scoring", roles, config.ppo.enable_ema)
    tokens = micro_batch_tokens(config, plan)
    costs = {
        role.name: [("activations", pass_memory.forward_activations(role, tokens)),
                    ("logits", pass_memory.head_memory(role, _scored(config, tokens), with_gradient=False)),
                    ("buffers", role_memory.gathered_layer_by_layer(role))]
        for role in roles
    }  # fmt: skip
    dearest = max(costs, key=lambda name: sum(memory.device for _, memory in costs[name]))
    for part, memory in costs[dearest]:
        phase.add(dearest, part, memory)
    _add_experience(phase, config, plan, roles[0].on_gpu)
    return phase


def generates_by_layer(config: PPOConfig, actor: Role, model_config: Any) -> bool:
    """Whether a rollout gathers one layer of the actor at a time, for each token: at stage 3 on request, or if
    `--inference_tp_size` cannot divide the layers and they are not whole anyway."""
    reason = reason_not_to_divide(model_config, config.lora.actor_lora_dim)
    not_divided = config.ppo_memory.inference_tp_size > 1 and reason is not None and not actor.kept_whole
    return actor.stage == 3 and (config.ppo.unpin_actor_parameters or not_divided)


def rollout_phase(
    config: PPOConfig, plan: PPOPlan, roles: Sequence[Role], model_config: Any, device_memory: int, sleeps: bool
) -> tuple[Phase, int]:
    """Generation, and the number of sequences that are decoded at a time.

    Args:
        config: of the step.
        plan: batch sizes.
        roles: the models, the actor first.
        model_config: of the actor.
        device_memory: bytes that this rank's tensors may take.
        sleeps: whether tensors sleep in the rollout.
    """
    ppo, memory, actor = config.ppo, config.ppo_memory, roles[0]
    phase = steady_phase("rollout", roles, ppo.enable_ema)
    for role in roles[1:]:
        if role.trained:  # an update drops whole weights, and only the actor's are gathered for a rollout
            phase.add(role.name, "buffers", Memory(-role_memory.gathered(role).device))
    if sleeps:
        _put_to_sleep(phase, roles)
    size, by_layer = memory.inference_tp_size, generates_by_layer(config, actor, model_config)
    divides = size > 1 and reason_not_to_divide(model_config, config.lora.actor_lora_dim) is None
    phase.add("actor", "buffers", _generating_weights(actor, size if divides else 1, by_layer, sleeps))
    if not actor.on_gpu and actor.dtype == "bf16" and not by_layer:
        phase.add("actor", "buffers", Memory.of(actor.itemsize * actor.parts.active))
    length = ppo.max_prompt_seq_len + ppo.max_answer_seq_len
    free = device_memory - phase.total().device - (0 if actor.on_gpu else phase.total().host)
    sequences = plan.rows_per_rank * (size if divides else 1)
    rows = pass_memory.running_rows(actor, sequences, length, ppo.rollout_rows, free)
    cache = pass_memory.kv_cache(actor, rows, length)
    phase.add("actor", "KV cache", Memory.of(cache.device / (size if divides else 1)))
    phase.add("actor", "logits", pass_memory.sampling_logits(actor, rows))
    return phase, rows


def _generating_weights(actor: Role, size: int, by_layer: bool, sleeps: bool) -> Memory:
    """Weights of the actor in addition to those between updates: at stage 3 whole ones (1 / size of the layers with
    tensor parallelism, or one layer at a time), and adapted ones merged, which replace the first."""
    parts, s = actor.parts, actor.itemsize
    if by_layer:
        return Memory.of(s * (max(parts.layers, default=0) + max(parts.embedding, parts.head)))
    merged = 0 if actor.bits else s * parts.adapted
    if actor.stage == 3:
        if actor.kept_whole or actor.ranks == 1 and not actor.offloads_weights:
            return Memory.of(merged)
        layers = sum(parts.layers)
        return Memory.of(s * (parts.total - layers + layers / size))
    return Memory.of(merged, on_host=sleeps)


def _put_to_sleep(phase: Phase, roles: Sequence[Role]) -> None:
    """`--sleep_in_rollout`: everything but the actor's weights is in host memory; buckets of gradients are freed. On a
    CPU that plays the device, both copies exist for a moment, so that nothing leaves it."""
    _add_host_copies(phase, roles)
    if not roles[0].on_gpu:
        return
    for key, memory in list(phase.held.items()):
        if key != ("actor", "weights"):
            phase.held[key] = Memory(0, memory.host)


def _add_host_copies(phase: Phase, roles: Sequence[Role]) -> None:
    """Host memory for what sleeps, which is kept from the first rollout on (`engine/hybrid_engine.py`)."""
    for (role, part), memory in sleeping(roles).items():
        phase.add(role, part, Memory(0, memory))


def sleeping(roles: Sequence[Role]) -> dict[tuple[str, str], int]:
    """Bytes that sleep by role and part: all on the device but the actor's weights, and buckets of gradients, whose
    contents mean nothing."""
    held = steady_phase("rollout", roles).held
    freed = {role.name: role_memory.buckets(role).device for role in roles}
    moved = {
        (role, part): memory.device - (freed[role] if part == "buffers" else 0)
        for (role, part), memory in held.items() if (role, part) != ("actor", "weights")
    }  # fmt: skip
    return {key: size for key, size in moved.items() if size}


def _add_experience(phase: Phase, config: PPOConfig, plan: PPOPlan, on_gpu: bool) -> None:
    ppo = config.ppo
    rows = pass_memory.experience(
        plan.rollout_rows, ppo.max_prompt_seq_len, ppo.max_answer_seq_len, config.ppo_memory.experience_on_host, on_gpu
    )
    phase.add("experience", "buffers", rows)


def micro_batch_tokens(config: PPOConfig, plan: PPOPlan) -> int:
    """Tokens of a micro-batch on this rank: a row may be longer than the budget; ranks may share it."""
    longest = config.ppo.max_prompt_seq_len + config.ppo.max_answer_seq_len
    budget = max(longest, plan.micro_batch_tokens // longest * longest)
    most = plan.rows_per_rank * plan.shared * longest
    return -(-min(budget, most) // plan.shared)


def micro_batches_of_update(config: PPOConfig, plan: PPOPlan) -> int:
    """Micro-batches of an update, with answers of the maximum length."""
    ppo = config.ppo
    tokens = plan.rows_per_rank * (ppo.max_prompt_seq_len + ppo.max_answer_seq_len) * ppo.ppo_epochs
    return -(-tokens // (plan.updates_per_rollout * micro_batch_tokens(config, plan)))


def _scored(config: PPOConfig, tokens: int) -> int:
    """Tokens of answers among the tokens of a micro-batch."""
    ppo = config.ppo
    return -(-tokens * ppo.max_answer_seq_len // (ppo.max_prompt_seq_len + ppo.max_answer_seq_len))


def ppo_phases(
    config: PPOConfig, plan: PPOPlan, roles: Sequence[Role], model_config: Any, device_memory: int, sleeps: bool
) -> tuple[list[Phase], int]:
    """The phases of step 3, and the number of sequences that are decoded at a time. Arguments as `rollout_phase`."""
    ema, tokens = config.ppo.enable_ema, micro_batch_tokens(config, plan)
    rollout, rows = rollout_phase(config, plan, roles, model_config, device_memory, sleeps)
    phases = [load_phase(roles, ema), rollout, score_phase(config, plan, roles)]
    for role in roles:
        if role.trained:
            scored = _scored(config, tokens)
            name, count = f"{role.name} update", micro_batches_of_update(config, plan)
            phase = update_phase(name, role, roles, tokens, scored, count, config, ema)
            _add_experience(phase, config, plan, role.on_gpu)
            phases.append(phase)
    phases.append(checkpoint_phase(roles, ema))
    if sleeps:
        for phase in phases[2:]:  # after the first rollout
            _add_host_copies(phase, roles)
    return phases, rows


def supervised_phases(config: Any, role: Role) -> list[Phase]:
    """The phases of steps 1 and 2. Pairs of answers make two rows of each row of a batch."""
    fit, roles = config.fit, [role]
    rows = fit.per_device_train_batch_size * rows_per_sample(config)
    tokens = -(-rows * fit.max_seq_len // config.memory.sequence_parallel_size)
    update = update_phase("update", role, roles, tokens, tokens, fit.gradient_accumulation_steps, config)
    return [load_phase(roles, False), update, checkpoint_phase(roles, False)]


def rows_per_sample(config: Any) -> int:
    """2 for objectives over pairs of answers, else 1."""
    is_pair = isinstance(config, PreferenceConfig) and config.reward.data_use == "preference"
    return 2 if is_pair else 1
