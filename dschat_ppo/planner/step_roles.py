"""The models of a step as roles, from its flags."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig

from dschat_ppo.common.extras import require_extra
from dschat_ppo.config.lora_flags import AdapterFlags
from dschat_ppo.config.steps import PPOConfig, PreferenceConfig, SFTConfig
from dschat_ppo.engine.ds_config import read_overlay, train_config
from dschat_ppo.engine.whole_weights import OF_GATHERING, fits_whole
from dschat_ppo.models.adapters import AdapterSettings
from dschat_ppo.planner.model_parts import ModelParts, parts_of
from dschat_ppo.planner.role_memory import ITEMSIZE, Role, running_stage


def roles_of(
    config: Any, model_configs: Mapping[str, PretrainedConfig], ranks: int, device_memory: int, on_gpu: bool
) -> list[Role]:
    """The models that a step holds.

    Args:
        config: of the step.
        model_configs: see `read_model_configs`.
        ranks: of the run.
        device_memory: bytes of a rank's device, or its share of the host's.
        on_gpu: whether devices are GPUs.
    """
    if isinstance(config, PPOConfig):
        return _ppo_roles(config, model_configs, ranks, device_memory, on_gpu)
    return [_supervised_role(config, model_configs["model"], ranks, device_memory, on_gpu)]


def _supervised_role(
    config: SFTConfig | PreferenceConfig, model: PretrainedConfig, ranks: int, device_memory: int, on_gpu: bool
) -> Role:
    fit, run = config.fit, config.run
    scalar = isinstance(config, PreferenceConfig) and config.reward.trains_classifier
    adapter = _adapter(config.lora.lora_dim, config.lora.lora_module_name, config.adapters)
    parts = parts_of(model, run.dtype, scalar, adapter, config.memory.tiled_mlp, on_gpu)
    zero = _zero(config, fit.zero_stage, fit.offload, fit.max_grad_norm, ranks, on_gpu)
    return _trained_role("model", parts, config, zero, ranks, device_memory, on_gpu, fit.gradient_checkpointing)


def _ppo_roles(
    config: PPOConfig, models: Mapping[str, PretrainedConfig], ranks: int, device_memory: int, on_gpu: bool
) -> list[Role]:
    ppo, run, lora, tiled = config.ppo, config.run, config.lora, config.memory.tiled_mlp
    adapter = _adapter(lora.actor_lora_dim, lora.actor_lora_module_name, config.adapters)
    actor = parts_of(models["actor"], run.dtype, False, adapter, tiled, on_gpu)
    zero = _zero(config, ppo.actor_zero_stage, ppo.offload, ppo.max_grad_norm, ranks, on_gpu)
    roles = [
        _trained_role("actor", actor, config, zero, ranks, device_memory, on_gpu, ppo.actor_gradient_checkpointing,
                      layer_by_layer=ppo.unpin_actor_parameters)
    ]  # fmt: skip
    actor_stage = roles[0].stage
    base = actor.total - _adapter_numbers(actor) if config.actor_base_is_frozen else 0
    if "reference" in models:
        plain = parts_of(models["reference"], run.dtype, False, None, tiled, on_gpu)
        own_folder = config.ppo_schedule.ref_model_name_or_path is not None
        stage = ppo.actor_zero_stage if own_folder or not base else actor_stage
        shared = 0 if own_folder or not base else min(base, plain.total)
        roles.append(_frozen_role("reference", plain, config, stage, ppo.offload_reference_model, shared, ranks,
                                  device_memory, on_gpu))  # fmt: skip
    shares = lora.share_base
    if "critic" in models:
        adapter = _adapter(lora.critic_lora_dim, lora.critic_lora_module_name, config.adapters)
        parts = parts_of(models["critic"], run.dtype, True, adapter, tiled, on_gpu)
        zero = _zero(config, ppo.critic_zero_stage, ppo.offload, ppo.max_grad_norm, ranks, on_gpu)
        shared = parts.total - parts.trained if shares else 0
        roles.append(_trained_role("critic", parts, config, zero, ranks, device_memory, on_gpu,
                                   ppo.critic_gradient_checkpointing, shared))  # fmt: skip
    if "reward" in models:
        parts = parts_of(models["reward"], run.dtype, True, None, tiled, on_gpu)
        stage = actor_stage if shares else ppo.critic_zero_stage
        shared = parts.total - parts.head if shares else 0
        roles.append(_frozen_role("reward", parts, config, stage, ppo.offload_reward_model, shared, ranks,
                                  device_memory, on_gpu))  # fmt: skip
    return roles


def _adapter(dim: int, names: str | None, flags: AdapterFlags) -> AdapterSettings | None:
    """The adapter that the flags ask for, whether or not this machine has a GPU for QLoRA.

    Raises:
        UserError: peft is not installed.
    """
    if dim == 0:
        return None
    require_extra("peft", "LoRA")  # which adds the layers that are counted
    return AdapterSettings(
        dim, flags.lora_alpha, 0.0, names, flags.use_rslora, flags.use_dora, flags.only_optimize_lora
    )


def _adapter_numbers(parts: ModelParts) -> int:
    """Numbers of the adapter of a model whose base is frozen."""
    return parts.trained


def _zero(config: Any, stage: int, offload: bool, clip: float, ranks: int, on_gpu: bool) -> dict[str, Any]:
    """The settings of ZeRO of an engine that trains, with those of `--deepspeed_config`."""
    overlay, device = read_overlay(config.run.deepspeed_config), "cuda" if on_gpu else "cpu"
    made = train_config(stage, config.run.dtype, offload, ranks, clip, overlay, config.memory, device=device)
    settings: dict[str, Any] = made["zero_optimization"]
    return settings


def _is_on_host(zero: dict[str, Any], name: str) -> bool:
    return str((zero.get(name) or {}).get("device", "none")) != "none"


def _trained_role(
    name: str, parts: ModelParts, config: Any, zero: dict[str, Any], ranks: int, device_memory: int, on_gpu: bool,
    checkpoints: bool, shared: int = 0, layer_by_layer: bool = False,
) -> Role:  # fmt: skip
    dtype, stage = config.run.dtype, running_stage(zero["stage"], config.run.dtype)
    gathers = any(key.startswith(OF_GATHERING) and key != "stage3_param_persistence_threshold" for key in zero)
    offloads = stage == 3 and _is_on_host(zero, "offload_param")
    divided = gathers or layer_by_layer or offloads or zero.get("zero_hpz_partition_size", 1) > 1
    whole = stage == 3 and not divided and fits_whole(ITEMSIZE[dtype] * parts.total, ranks, device_memory)
    adapters = config.adapters
    bits = 4 if adapters.load_in_4bit else 8 if adapters.load_in_8bit else 0
    return Role(
        name, parts, dtype, ranks, stage, True, checkpoints, stage > 0 and _is_on_host(zero, "offload_optimizer"),
        offloads, whole, shared, on_gpu, bits if parts.adapted else 0,
    )  # fmt: skip


def _frozen_role(
    name: str, parts: ModelParts, config: PPOConfig, stage: int, offloads: bool, shared: int, ranks: int,
    device_memory: int, on_gpu: bool,
) -> Role:  # fmt: skip
    dtype, is_divided = config.run.dtype, stage == 3
    whole = is_divided and not offloads and fits_whole(ITEMSIZE[dtype] * parts.total, ranks, device_memory)
    return Role(
        name, parts, dtype, ranks, 3 if is_divided else 0, False, offloads_weights=is_divided and offloads,
        kept_whole=whole, shared=shared, on_gpu=on_gpu,
    )  # fmt: skip
