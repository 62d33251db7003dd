"""The phases of a step, with what each model holds at the peak of each."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dschat_ppo.config.batch_plan import PPOPlan
from dschat_ppo.config.steps import FitConfig, PPOConfig, PreferenceConfig, StepConfig
from dschat_ppo.engine.tensor_parallel import reason_not_to_divide
from dschat_ppo.models.micro_batches import COPIED, sharing_pays
from dschat_ppo.planner import role_memory
from dschat_ppo.planner.role_memory import FP32, Memory, Role
from dschat_ppo.rollout.memory import LOGITS_BYTES

PARTS = ("weights", "gradients", "optimizer", "activations", "KV cache", "logits", "buffers")


@dataclass
class Phase:
    """Bytes of one rank at the peak of a phase."""

    name: str
    held: dict[tuple[str, str], Memory] = field(default_factory=dict)  # (role, part of `PARTS`) -> bytes
    once: int = 0  # bytes of host memory that rank 0 alone needs

    def add(self, role: str, part: str, memory: Memory) -> None:
        if memory.device or memory.host:
            self.held[role, part] = self.held.get((role, part), Memory()) + memory

    def total(self, role: str | None = None, part: str | None = None) -> Memory:
        """The sum of some entries; None: of all roles or parts."""
        chosen = [
            memory for (whose, what), memory in self.held.items() if role in (None, whose) and part in (None, what)
        ]
        return sum(chosen, Memory())


def steady_phase(name: str, roles: Sequence[Role], ema: bool = False) -> Phase:
    """What stays between two updates. `ema`: `--enable_ema`, an fp32 average of the actor's trained weights in host
    memory, divided over the ranks."""
    phase = Phase(name)
    for role in roles:
        phase.add(role.name, "weights", role_memory.weights(role))
        phase.add(role.name, "optimizer", role_memory.optimizer(role))
        phase.add(role.name, "gradients", role_memory.gradients(role))
        phase.add(role.name, "buffers", role_memory.buckets(role) + role_memory.gathered(role))
    if ema:
        phase.add("average", "weights", Memory.of(FP32 * roles[0].trained / roles[0].ranks, on_host=True))
    return phase


def update_phase(
    name: str, role: Role, roles: Sequence[Role], tokens: int, scored: int, micro_batches: int, config: StepConfig,
    ema: bool = False,
) -> Phase:  # fmt: skip
    """An update of one model: the larger of the beginning and the end of the backward pass of its last micro-batch. At
    the beginning there are all activations, the gradients of earlier micro-batches, and that of the head; at the end
    all gradients, and the activations of the first layer. `tokens`: of a micro-batch on this rank, padding included;
    `scored`: those whose log-probs the loss reads."""
    first, last = (steady_phase(name, roles, ema) for _ in range(2))
    for phase in (first, last):
        phase.add(role.name, "buffers", role_memory.gathered_layer_by_layer(role))
    first.add(role.name, "activations", role_memory.activations(role, tokens, config.memory.offload_activations))
    first.add(role.name, "logits", role_memory.head_memory(role, scored))
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


def supervised_phases(config: FitConfig, role: Role) -> list[Phase]:
    """The phases of steps 1 and 2. Pairs of answers make two rows of each row of a batch."""
    fit, roles = config.fit, [role]
    is_pair = isinstance(config, PreferenceConfig) and config.reward.data_use == "preference"
    rows = fit.per_device_train_batch_size * (2 if is_pair else 1)
    tokens = -(-rows * fit.max_seq_len // config.memory.sequence_parallel_size)
    update = update_phase("update", role, roles, tokens, tokens, fit.gradient_accumulation_steps, config)
    return [update, checkpoint_phase(roles, False)]


def ppo_phases(
    config: PPOConfig, plan: PPOPlan, roles: Sequence[Role], actor_config: Any, device_memory: int, sleeps: bool
) -> tuple[list[Phase], int]:
    """The phases of step 3, and the number of sequences that are decoded at a time. `device_memory`: bytes that this
    rank's tensors may take; `sleeps`: whether tensors sleep in the rollout."""
    ppo, ema = config.ppo, config.ppo.enable_ema
    # answers that share their prompt: where an update has all answers to its prompts, and ranks do not divide its rows
    answers = plan.samples if plan.rollout_rows == plan.global_batch and plan.shared == 1 else 1
    prompt, answer = ppo.max_prompt_seq_len, ppo.max_answer_seq_len
    # tokens of a pass on this rank: answers shorter than the longest fill it up to the budget, if there are enough
    budget = max(prompt + answer, plan.micro_batch_tokens)  # a row may be longer; ranks may share it
    all_tokens = plan.rows_per_rank // answers * group_tokens(prompt, answer, answers)
    tokens = -(-min(budget, all_tokens * plan.shared) // plan.shared)
    scored = -(-tokens * answers * answer // (prompt + answers * answer))  # of answers
    micro_batches = -(-all_tokens * ppo.ppo_epochs // (plan.updates_per_rollout * tokens))
    rollout, rows = _rollout_phase(config, plan, roles, actor_config, device_memory, sleeps)
    phases = [rollout, _score_phase(roles, tokens, scored, ema)]
    phases += [
        update_phase(f"{role.name} update", role, roles, tokens, scored, micro_batches, config, ema)
        for role in roles if role.trained
    ]  # fmt: skip
    phases.append(checkpoint_phase(roles, ema))
    if sleeps:
        for phase in phases[1:]:  # the host memory is kept from the first rollout on (`engine/hybrid_engine.py`)
            _add_host_copies(phase, roles)
    return phases, rows


def group_tokens(prompt: int, answer: int, answers: int) -> int:
    """Most tokens of the answers to a prompt, as `split_by_tokens` counts them: they share the longest prompt and copy
    its keys and values, or each runs the longest prompt that is not worth sharing. `prompt`, `answer`: most tokens."""
    sizes = range(prompt + 1)
    shared = bisect_left(sizes, True, key=lambda size: sharing_pays(size, answers, answers * (size + answer)))
    together = prompt + answers * answer + (answers - 1) * (prompt // COPIED)
    return max(together, answers * (shared - 1 + answer))  # prompts below `shared` tokens are not shared


def _score_phase(roles: Sequence[Role], tokens: int, scored: int, ema: bool) -> Phase:
    """Scoring: forward passes of one model after another over micro-batches, of which the dearest counts."""
    phase = steady_phase("scoring", roles, ema)
    costs = {
        role.name: {
            "activations": role_memory.forward_activations(role, tokens),
            "logits": role_memory.head_memory(role, scored, with_gradient=False),
            "buffers": role_memory.gathered_layer_by_layer(role),
        }
        for role in roles
    }
    dearest = max(costs, key=lambda name: sum(memory.device for memory in costs[name].values()))
    for part, memory in costs[dearest].items():
        phase.add(dearest, part, memory)
    return phase


def _rollout_phase(
    config: PPOConfig, plan: PPOPlan, roles: Sequence[Role], actor_config: Any, device_memory: int, sleeps: bool
) -> tuple[Phase, int]:
    """Generation, and the number of sequences that are decoded at a time. Arguments as `ppo_phases`."""
    ppo, actor, wanted = config.ppo, roles[0], config.ppo_memory.inference_tp_size
    phase = steady_phase("rollout", roles, ppo.enable_ema)
    for role in roles[1:]:
        if role.trained:  # an update drops whole weights, and only the actor's are gathered for a rollout
            phase.add(role.name, "buffers", Memory(-role_memory.gathered(role).device))
    if sleeps:
        _add_host_copies(phase, roles)
        if actor.on_gpu:  # on a CPU that plays the device, both copies exist for a moment, so that nothing leaves it
            for key, memory in phase.held.items():
                if key != ("actor", "weights"):
                    phase.held[key] = Memory(0, memory.host)
    divides = wanted > 1 and reason_not_to_divide(actor_config, config.lora.actor_lora_dim) is None
    size = wanted if divides else 1
    # one layer is gathered at a time, for each token: on request, or if layers cannot be divided and are not whole
    gathers = ppo.unpin_actor_parameters or (wanted > 1 and not divides and not actor.kept_whole)
    by_layer = actor.stage == 3 and gathers
    phase.add("actor", "buffers", _generating_weights(actor, size, by_layer, sleeps))
    if not actor.on_gpu and actor.dtype == "bf16" and not by_layer:
        phase.add("actor", "buffers", Memory.of(actor.itemsize * actor.parts.packed))
    length = ppo.max_prompt_seq_len + ppo.max_answer_seq_len
    free = device_memory - phase.total().device - (0 if actor.on_gpu else phase.total().host)
    rows = role_memory.running_rows(actor, plan.rows_per_rank * size, length, ppo.rollout_rows, free)
    phase.add("actor", "KV cache", Memory.of(actor.parts.cache_bytes(length) * rows / size))
    phase.add("actor", "logits", Memory.of(LOGITS_BYTES * rows * actor.parts.vocabulary))
    return phase, rows


def _generating_weights(actor: Role, size: int, by_layer: bool, sleeps: bool) -> Memory:
    """Weights of the actor in addition to those between updates: at stage 3 whole ones (1 / size of the layers with
    tensor parallelism, or one layer at a time), and adapted ones merged, which replace the first."""
    parts, s = actor.parts, actor.itemsize
    if by_layer:
        return Memory.of(s * (max(parts.layers, default=0) + max(parts.embedding, parts.head)))
    merged = 0 if actor.bits else s * parts.adapted
    if actor.stage < 3:
        return Memory.of(merged, on_host=sleeps)
    if actor.kept_whole or actor.ranks == 1 and not actor.offloads_weights:
        return Memory.of(merged)
    layers = sum(parts.layers)
    return Memory.of(s * (parts.total - layers + layers / size))


def _add_host_copies(phase: Phase, roles: Sequence[Role]) -> None:
    """Host memory for what sleeps (`--sleep_in_rollout`): all on the device but the actor's weights, and buffers of
    gradients, whose contents mean nothing and which are freed."""
    freed = {(role.name, "buffers"): role_memory.buckets(role).device for role in roles}
    freed |= {(role.name, "gradients"): role_memory.gradients(role).device for role in roles}
    for key, memory in steady_phase("rollout", roles).held.items():
        if key != ("actor", "weights"):
            phase.add(*key, Memory(0, memory.device - freed.get(key, 0)))
