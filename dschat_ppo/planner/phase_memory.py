"""Bytes of one rank at the peak of each phase of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from transformers import PretrainedConfig

from dschat_ppo.config.batch_plan import PPOPlan, tokens_on_cpu
from dschat_ppo.config.ppo_config import PPOConfig
from dschat_ppo.config.step_config import StepConfig
from dschat_ppo.features import hooks
from dschat_ppo.models.micro_batches import COPIED, sharing_pays
from dschat_ppo.planner.role_memory import (
    Role,
    accumulated_gradients,
    activations,
    fused_head_bytes,
    running_rows,
    steady_bytes,
    update_gradients,
)
from dschat_ppo.rollout.cache_memory import (
    LOGITS_BYTES,
)

ROLLOUT = "rollout"  # the name of the phase of generation


@dataclass
class Phase:
    """Bytes of one rank at the peak of a phase."""

    name: str
    # (role, part, in host memory) -> bytes
    held: dict[tuple[str, str, bool], int] = field(default_factory=dict)
    once: int = 0  # bytes of host memory that rank 0 alone needs

    def add(self, role: str, part: str, size: float, on_host: bool = False) -> None:
        self.held[role, part, on_host] = self.held.get((role, part, on_host), 0) + int(size)

    def total(
        self, role: str | None = None, part: str | None = None, on_host: bool | None = None
    ) -> int:
        """The sum of some entries; None: of all roles, parts or kinds of memory."""
        total = 0
        for (entry_role, entry_part, entry_on_host), size in self.held.items():
            if role not in (None, entry_role) or part not in (None, entry_part):
                continue
            if on_host in (None, entry_on_host):
                total += size
        return total


@dataclass(frozen=True)
class GatheredLayers:
    """How generation holds the actor's layers."""

    by_layer: bool = False  # at stage 3 gathered one at a time
    shards: int = 1  # ranks that divide each layer


def steady_phase(name: str, config: StepConfig, roles: Sequence[Role]) -> Phase:
    """What stays between two updates."""
    phase = Phase(name)
    for role in roles:
        for kind, size, on_host in steady_bytes(role):
            phase.add(role.name, kind, size, on_host)
    # A feature offers `memory.adjust(phase, config, roles)`, which changes what the phase holds.
    for adjust in hooks("memory.adjust"):
        adjust(phase, config, roles)
    return phase


def update_phase(
    config: StepConfig, roles: Sequence[Role], role: Role, tokens: int, micro_batches: int
) -> Phase:
    """An update of one model: the larger of the beginning and the end of the backward pass of its
    last micro-batch. At the beginning there are all activations, the gradients of earlier
    micro-batches, and that of the head; at the end all gradients, and the activations of the first
    layer. `tokens`: of a micro-batch on this rank, padding included."""
    name = f"{role.name} update"
    if role.name == "model":
        name = "update"
    sizes = role.sizes
    beginning = steady_phase(name, config, roles)
    for kind, size, on_host in activations(role, tokens, config.memory.offload_activations):
        beginning.add(role.name, kind, size, on_host)
    beginning.add(role.name, "logits", fused_head_bytes(role, tokens))
    beginning.add(role.name, "gradients", role.itemsize * min(sizes.head, sizes.trained))
    earlier_gradients = 0
    if micro_batches > 1:
        earlier_gradients = accumulated_gradients(role)
    beginning.add(role.name, "gradients", earlier_gradients)
    end = steady_phase(name, config, roles)
    end.add(role.name, "gradients", update_gradients(role))
    end.add(role.name, "activations", sizes.saved.layer * tokens)
    largest = max(beginning, end, key=Phase.total)
    largest.add(role.name, "buffers", role.gathered)
    return largest


def scoring_phase(config: PPOConfig, roles: Sequence[Role], tokens: int) -> Phase:
    """Forward passes over micro-batches, of one model after another, of which the dearest counts:
    at stage 3 that of a large reward model gathers more than an update of a small actor needs."""
    phases = []
    for role in roles:
        phase = steady_phase("scoring", config, roles)
        phase.add(role.name, "activations", role.sizes.saved.layer * tokens)
        phase.add(role.name, "logits", fused_head_bytes(role, tokens))
        phase.add(role.name, "buffers", role.gathered)
        phases.append(phase)
    return max(phases, key=Phase.total)


def checkpoint_phase(config: StepConfig, roles: Sequence[Role]) -> Phase:
    """Saving a checkpoint and the model: rank 0 collects the whole weights of a model that trains
    in host memory, and brings them into the number format in which they are saved."""
    phase = steady_phase("checkpoint", config, roles)
    phase.once = max(
        max(role.itemsize, role.saved_itemsize) * role.sizes.total
        for role in roles
        if role.sizes.trained
    )
    return phase


def supervised_batch(config: StepConfig, ranks: int, on_gpu: bool) -> tuple[int, int]:
    """(tokens of a pass on a rank, passes of an update) of steps 1 and 2. A pair takes two rows. On
    a CPU a micro-batch runs in several passes (`supervised/passes.py`)."""
    fit = config.training
    shared = config.ranks_of_row
    sample_tokens = fit.max_seq_len
    if config.step_data.use == "preference":
        sample_tokens = 2 * fit.max_seq_len
    tokens = fit.per_device_train_batch_size * sample_tokens
    in_pass = tokens
    if not on_gpu and config.step_data.lazy is None:
        in_pass = min(tokens, tokens_on_cpu(sample_tokens, ranks))
    passes = fit.gradient_accumulation_steps * -(-tokens // in_pass)
    return -(-in_pass // shared), passes


def ppo_batch(plan: PPOPlan) -> tuple[int, int]:
    """The same of step 3. Responses shorter than the longest fill a micro-batch up to its budget,
    if there are enough; they share their prompt where an update has all responses to its prompts,
    and ranks do not divide its rows."""
    prompt = plan.flags.max_prompt_seq_len
    response = plan.flags.max_answer_seq_len
    samples = plan.samples
    row_tokens = prompt + response
    all_tokens = plan.rows_per_rank * row_tokens
    if (
        plan.rollout_rows == plan.global_batch
        and plan.shared == 1
        and sharing_pays(prompt, samples, samples * row_tokens)
    ):
        copied_tokens = (samples - 1) * (prompt // COPIED)
        group_tokens = prompt + samples * response + copied_tokens
        all_tokens = plan.rows_per_rank // samples * group_tokens
    budget = max(row_tokens, plan.micro_batch_tokens)  # a row may be longer; ranks may share it
    tokens = -(-min(budget, all_tokens * plan.shared) // plan.shared)
    passes = -(-all_tokens * plan.flags.ppo_epochs // (plan.updates_per_rollout * tokens))
    return tokens, passes


def rollout_phase(
    config: PPOConfig,
    plan: PPOPlan,
    roles: Sequence[Role],
    actor_config: PretrainedConfig,
    device_memory: int,
) -> tuple[Phase, int]:
    """Generation: its peak, and the number of sequences that a rank decodes at a time.

    At stage 3 the actor's weights are gathered: all, or this rank's shard of layers that ranks
    divide, or one layer at a time. Weights under LoRA are merged with it.

    Args:
        config: of step 3.
        plan: its batches.
        roles: all, the actor first.
        actor_config: of the actor's model.
        device_memory: bytes that this rank's tensors may take.
    """
    ppo = config.ppo
    actor = roles[0]
    sizes = actor.sizes
    phase = steady_phase(ROLLOUT, config, roles)
    gathered = GatheredLayers(by_layer=ppo.unpin_actor_parameters)
    # a feature offers `memory.gathered_layers(config, actor_config)`: its way, or None
    for gathered_layers in hooks("memory.gathered_layers"):
        gathered = gathered_layers(config, actor_config) or gathered
    shards = gathered.shards
    by_layer = actor.stage == 3 and gathered.by_layer
    phase.add("actor", "buffers", generation_weights(actor, by_layer, shards))
    length = ppo.max_prompt_seq_len + ppo.max_answer_seq_len
    planned = phase.total()
    if actor.on_gpu:
        planned = phase.total(on_host=False)
    free = device_memory - planned
    rows = running_rows(actor, plan.rows_per_rank * shards, length, ppo.rollout_rows, free)
    phase.add("actor", "KV cache", sizes.cache_bytes(length) * rows / shards)
    phase.add("actor", "logits", LOGITS_BYTES * rows * sizes.vocabulary)
    return phase, rows


def generation_weights(actor: Role, by_layer: bool, shards: int) -> float:
    """Bytes of the weights that generation makes beside those that the actor holds: gathered ones,
    `by_layer` one layer at a time, else 1 / `shards` of the layers; or merged ones, where LoRA
    adapts them. A CPU lays matrices out again."""
    sizes = actor.sizes
    size: float = actor.itemsize * sizes.adapted
    if actor.bits:  # quantised weights are not merged
        size = 0
    if by_layer:
        return actor.itemsize * (sizes.layer + sizes.head)
    if actor.gathered:
        size = actor.itemsize * (sizes.total - sizes.layers + sizes.layers / shards)
    if not actor.on_gpu:
        size += actor.itemsize * sizes.total
    return size
