"""The models of a step as roles, from its flags."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig

from dschat_ppo.common.extras import require_extra
from dschat_ppo.config.steps import PPOConfig, PreferenceConfig, StepConfig
from dschat_ppo.engine.ds_config import read_overlay, train_config
from dschat_ppo.engine.whole_weights import OF_GATHERING, fits_whole
from dschat_ppo.models.adapters import AdapterSettings
from dschat_ppo.planner.model_parts import ModelParts, parts_of
from dschat_ppo.planner.role_memory import ITEMSIZE, Role, running_stage


def roles_of(
    config: StepConfig, models: Mapping[str, PretrainedConfig], ranks: int, device_memory: int, on_gpu: bool
) -> list[Role]:
    """The models that a step holds; the actor is the first of step 3. `device_memory`: bytes of a rank's device, or on
    a CPU its share of the host's."""
    dtype, adapters = config.run.dtype, config.adapters
    fit: Any = config.ppo if isinstance(config, PPOConfig) else config.fit

    def parts(role: str, scalar: bool, dim: int = 0, layers: str | None = None) -> ModelParts:
        adapter = None
        if dim > 0:
            require_extra("peft", "LoRA")  # which adds the layers that are counted
            adapter = AdapterSettings(
                dim, adapters.lora_alpha, 0.0, layers, adapters.use_rslora, adapters.use_dora,
                adapters.only_optimize_lora,
            )  # fmt: skip
        return parts_of(models[role], dtype, scalar, adapter, config.memory.tiled_mlp, on_gpu)

    def fits(size: ModelParts) -> bool:
        return fits_whole(ITEMSIZE[dtype] * size.total, ranks, device_memory)

    def trained(
        name: str, size: ModelParts, zero_stage: int, checkpoints: bool, shared: int = 0, layer_by_layer: bool = False
    ) -> Role:
        overlay, device = read_overlay(config.run.deepspeed_config), "cuda" if on_gpu else "cpu"
        made = train_config(
            zero_stage, dtype, fit.offload, ranks, fit.max_grad_norm, overlay, config.memory, device=device
        )
        zero: dict[str, Any] = made["zero_optimization"]
        stage = running_stage(zero["stage"], dtype)
        on_host = {
            name: str((zero.get(f"offload_{name}") or {}).get("device", "none")) != "none"
            for name in ("optimizer", "param")
        }
        offloads = stage == 3 and on_host["param"]
        gathers = any(key.startswith(OF_GATHERING) and key != "stage3_param_persistence_threshold" for key in zero)
        divided = gathers or layer_by_layer or offloads or zero.get("zero_hpz_partition_size", 1) > 1
        bits = 4 if adapters.load_in_4bit else 8 if adapters.load_in_8bit else 0
        return Role(
            name, size, dtype, ranks, stage, True, checkpoints, stage > 0 and on_host["optimizer"], offloads,
            stage == 3 and not divided and fits(size), shared, on_gpu, bits if size.adapted else 0,
        )  # fmt: skip

    def frozen(name: str, size: ModelParts, stage: int, offloads: bool, shared: int) -> Role:
        is_divided = stage == 3
        return Role(
            name, size, dtype, ranks, 3 if is_divided else 0, False, offloads_weights=is_divided and offloads,
            kept_whole=is_divided and not offloads and fits(size), shared=shared, on_gpu=on_gpu,
        )  # fmt: skip

    if not isinstance(config, PPOConfig):
        scalar = isinstance(config, PreferenceConfig) and config.reward.trains_classifier
        size = parts("model", scalar, config.lora.lora_dim, config.lora.lora_module_name)
        return [trained("model", size, fit.zero_stage, fit.gradient_checkpointing)]
    ppo, lora = config.ppo, config.lora
    size = parts("actor", False, lora.actor_lora_dim, lora.actor_lora_module_name)
    actor = trained("actor", size, ppo.actor_zero_stage, ppo.actor_gradient_checkpointing,
                    layer_by_layer=ppo.unpin_actor_parameters)  # fmt: skip
    roles = [actor]
    if "reference" in models:
        size = parts("reference", False)
        of_actor = config.actor_base_is_frozen and config.ppo_schedule.ref_model_name_or_path is None
        shared = min(actor.parts.total - actor.parts.trained, size.total) if of_actor else 0
        stage = actor.stage if shared else ppo.actor_zero_stage
        roles.append(frozen("reference", size, stage, ppo.offload_reference_model, shared))
    if "critic" in models:
        size = parts("critic", True, lora.critic_lora_dim, lora.critic_lora_module_name)
        shared = size.total - size.trained if lora.share_base else 0
        roles.append(trained("critic", size, ppo.critic_zero_stage, ppo.critic_gradient_checkpointing, shared))
    if "reward" in models:
        size = parts("reward", True)
        stage, shared = (actor.stage, size.total - size.head) if lora.share_base else (ppo.critic_zero_stage, 0)
        roles.append(frozen("reward", size, stage, ppo.offload_reward_model, shared))
    return roles
