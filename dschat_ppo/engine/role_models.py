"""The models of the four roles of PPO: loaded from their folders, or over the frozen base of the actor."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedModel

from dschat_ppo.common.logging import logger
from dschat_ppo.config.steps import PPOConfig
from dschat_ppo.engine.ds_config import Config
from dschat_ppo.models.adapters import AdapterSettings, adapter_settings
from dschat_ppo.models.loading import load_causal_lm, load_sequence_classifier
from dschat_ppo.models.model_folders import is_adapter_folder
from dschat_ppo.models.policy_model import PolicyModel
from dschat_ppo.models.scalar_model import ScalarModel
from dschat_ppo.models.shared_base import classifier_over_base, model_over_base


@dataclass(frozen=True)
class ModelFolders:
    """Local folders of the models; None for a role that the run does not use."""

    actor: str
    critic: str | None
    reward: str | None
    reference: str | None = None  # if it is not the actor's folder


class RoleModels:
    """Loads the actor at once, and makes the models of the other roles when they are asked for.

    If only the actor's adapter trains and the reference has no folder, the reference consists of modules over the
    actor's frozen weights. With `--share_base` critic and reward model do too. Otherwise they are loaded. `ds_config`
    is that of the actor's engine.
    """

    def __init__(self, config: PPOConfig, folders: ModelFolders, ds_config: Config):
        self._config = config
        self._folders = folders
        ppo, run = config.ppo, config.run
        settings, dropout = actor_adapter(config), ppo.actor_dropout or 0.0
        lm = load_causal_lm(folders.actor, run.dtype, ds_config, dropout, run.resize_vocabulary, settings)
        self.actor = PolicyModel(lm)
        # Made here because an engine adds hooks, which a copy of the modules would have too.
        self._reference: PreTrainedModel | None = None
        if config.algorithm.has_reference and folders.reference is None and config.actor_base_is_frozen:
            self._reference = model_over_base(lm, copies_adapter=is_adapter_folder(folders.actor))
        self._base = model_over_base(lm) if config.lora.share_base else None

    def reference(self, ds_config: Config) -> PolicyModel:
        """The model of the reference, with the actor's kernels, so that both give the same bits before any update. A
        reference from another folder than the actor's still needs `select_kernels`."""
        run, lm, folder = self._config.run, self._reference, self._folders.reference
        if folder is not None:
            return PolicyModel(load_causal_lm(folder, run.dtype, ds_config, resize=run.resize_vocabulary))
        if lm is None:
            lm = load_causal_lm(self._folders.actor, run.dtype, ds_config, resize=run.resize_vocabulary)
        else:
            adapter = "a frozen copy of its first adapter" if is_adapter_folder(self._folders.actor) else "no adapter"
            logger().info(f"reference: the actor's frozen weights with {adapter}; no reference model is held")
        return PolicyModel(lm, self.actor.layout)

    def critic(self, folder: str, ds_config: Config) -> ScalarModel:
        """The model of the critic."""
        config, settings = self._config, critic_adapter(self._config)
        if self._base is not None:
            logger().info("critic: an adapter and a head over the actor's frozen weights (--share_base)")
            return ScalarModel(classifier_over_base(self._base, folder, settings))
        dropout, resize = config.ppo.critic_dropout or 0.0, config.run.resize_vocabulary
        new_head = config.critic_may_have_new_head
        return ScalarModel(
            load_sequence_classifier(folder, config.run.dtype, ds_config, new_head, dropout, resize, settings)
        )

    def reward(self, folder: str, ds_config: Config) -> ScalarModel:
        """The reward model."""
        run = self._config.run
        if self._base is not None:
            logger().info("reward model: its adapter and head over the actor's frozen weights (--share_base)")
            return ScalarModel(classifier_over_base(self._base, folder))
        return ScalarModel(
            load_sequence_classifier(folder, run.dtype, ds_config, new_head=False, resize=run.resize_vocabulary)
        )


def actor_adapter(config: PPOConfig) -> AdapterSettings | None:
    """The adapter that the flags ask for the actor."""
    lora, flag = config.lora, "--actor_lora_module_name"
    return adapter_settings(lora.actor_lora_dim, lora.actor_lora_module_name, config.adapters, flag)


def critic_adapter(config: PPOConfig) -> AdapterSettings | None:
    """The adapter that the flags ask for the critic."""
    lora, flag = config.lora, "--critic_lora_module_name"
    return adapter_settings(lora.critic_lora_dim, lora.critic_lora_module_name, config.adapters, flag)
