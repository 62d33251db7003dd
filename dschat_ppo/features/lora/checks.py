"""Checks of the device and of the folders of models, before weights are read."""

from __future__ import annotations

from pathlib import Path

from transformers import PretrainedConfig

from dschat_ppo.common import dist
from dschat_ppo.config.ppo_config import PPOConfig
from dschat_ppo.config.schema import require
from dschat_ppo.config.step_config import StepConfig
from dschat_ppo.engine.rlhf_engine import ModelFolders
from dschat_ppo.errors import UserError
from dschat_ppo.models.model_folders import base_folder, is_adapter_folder


def check_trained_model(config: StepConfig, model_config: PretrainedConfig, model: str) -> None:
    """Check that what quantises the actor's frozen weights has a GPU."""
    if not isinstance(config, PPOConfig) or not config.quantises_frozen:
        return
    device = dist.device().type
    require(
        device == "cuda",
        "--enable_mixed_precision_lora: DeepSpeed quantises with CUDA kernels, and this run is on"
        f" the {device}; run it on GPUs, or omit the flag",
    )


def check_folders(config: PPOConfig, folders: ModelFolders) -> None:
    """Check that all models can be adapters over the actor's base (`--share_base`)."""
    if not config.shares_base:
        return
    actor_flag, _ = config.models["actor"]
    actor_base = Path(base_folder(folders.actor, actor_flag)).resolve()
    for role, folder in (("reward", folders.reward), ("critic", folders.critic)):
        if folder is None:
            continue
        flag, _ = config.models[role]
        base = Path(base_folder(folder, flag)).resolve()
        if base != actor_base:
            raise UserError(
                f"--share_base: the base of {flag} {folder} is {base}, but that of {actor_flag}"
                f" {folders.actor} is {actor_base}; train both as adapters over one base, or omit"
                " --share_base"
            )
    if folders.reward is not None and not is_adapter_folder(folders.reward):
        raise UserError(
            f"--share_base: {config.models['reward'][0]} {folders.reward} is a whole model; train"
            " it as an adapter over the actor's base (step 2 with --lora_dim and"
            " --only_optimize_lora), or omit --share_base"
        )
