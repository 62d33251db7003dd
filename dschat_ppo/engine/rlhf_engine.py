"""The four roles of PPO, each a DeepSpeed engine over all devices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dschat_ppo.common.dist import world_size
from dschat_ppo.config.batch_plan import PPOPlan
from dschat_ppo.config.steps import PPOConfig
from dschat_ppo.engine.build_engine import OptimizerSettings, eval_engine, train_engine
from dschat_ppo.engine.ds_config import eval_config, read_overlay, train_config
from dschat_ppo.engine.hybrid_engine import HybridEngine
from dschat_ppo.engine.moving_average import MovingAverage
from dschat_ppo.models.kernel_selection import select_kernels
from dschat_ppo.models.loading import load_causal_lm, load_sequence_classifier
from dschat_ppo.models.policy_model import PolicyModel
from dschat_ppo.models.scalar_model import ScalarModel


@dataclass(frozen=True)
class ModelFolders:
    """Local folders of the models; None where a role is not used."""

    actor: str
    critic: str | None
    reward: str | None


class RLHFEngine:
    """Builds and holds actor, critic (train configs), reference and reward (eval configs).

    Actor and reference start from the SFT model, critic and reward from the reward model. The reference, the critic
    and the reward are None where the run does not use them. A role is partitioned by ZeRO-3 from the moment its layers
    are built.
    """

    def __init__(self, config: PPOConfig, plan: PPOPlan, folders: ModelFolders):
        self._config = config
        self._plan = plan
        self._ranks = world_size()
        ppo = config.ppo
        self.actor = self._build_actor(folders.actor)
        self.actor_average = MovingAverage(self.actor.module.lm, ppo.ema_decay) if ppo.enable_ema else None
        self.reference = self._build_reference(folders.actor) if config.algorithm.has_reference else None
        self.critic = self._build_critic(folders.critic) if folders.critic else None
        sleeping = list(self.trained.values()) if ppo.sleep_in_rollout else []
        self.hybrid = HybridEngine(self.actor, pinned=not ppo.unpin_actor_parameters, sleeping=sleeping)
        self.reward = self._build_reward(folders.reward, folders.critic) if folders.reward else None

    @property
    def trained(self) -> dict[str, Any]:
        """The engines that are trained, by role."""
        engines = {"actor": self.actor, "critic": self.critic}
        return {role: engine for role, engine in engines.items() if engine is not None}

    def _train_config(self, stage: int) -> dict[str, Any]:
        ppo, run = self._config.ppo, self._config.run
        overlay = read_overlay(run.deepspeed_config)
        return train_config(stage, run.dtype, ppo.offload, self._ranks, ppo.max_grad_norm, overlay)

    def _optimizer_settings(self, learning_rate: float, weight_decay: float, updates: int) -> OptimizerSettings:
        ppo, run = self._config.ppo, self._config.run
        return OptimizerSettings(
            learning_rate,
            weight_decay,
            ppo.lr_scheduler_type,
            ppo.num_warmup_steps,
            updates,
            (run.adam_beta1, run.adam_beta2),
            run.adam_epsilon,
        )

    def _build_actor(self, folder: str) -> Any:
        ppo, run = self._config.ppo, self._config.run
        ds_config = self._train_config(ppo.actor_zero_stage)
        lm = load_causal_lm(folder, run.dtype, ds_config, ppo.actor_dropout or 0.0, run.resize_vocabulary)
        model = PolicyModel(lm)
        if ppo.actor_gradient_checkpointing:
            model.gradient_checkpointing_enable()
        settings = self._optimizer_settings(ppo.actor_learning_rate, ppo.actor_weight_decay, self._plan.actor_updates)
        engine = train_engine(model, ds_config, settings)
        select_kernels(engine)
        return engine

    def _build_reference(self, folder: str) -> Any:
        ppo, dtype = self._config.ppo, self._config.run.dtype
        ds_config = eval_config(ppo.actor_zero_stage, dtype, ppo.offload_reference_model, self._ranks)
        # the actor's way, so that the two agree to the last bit before the first update
        actor = self.actor.module
        lm = load_causal_lm(folder, dtype, ds_config, resize=self._config.run.resize_vocabulary)
        model = PolicyModel(lm, actor.fused, actor.packed)
        return eval_engine(model, ds_config)

    def _build_critic(self, folder: str) -> Any:
        ppo, run, new_head = self._config.ppo, self._config.run, self._config.critic_may_have_new_head
        ds_config = self._train_config(ppo.critic_zero_stage)
        dropout = ppo.critic_dropout or 0.0
        model = ScalarModel(
            load_sequence_classifier(folder, run.dtype, ds_config, new_head, dropout, run.resize_vocabulary)
        )
        if ppo.critic_gradient_checkpointing:
            model.gradient_checkpointing_enable()
        settings = self._optimizer_settings(ppo.critic_learning_rate, ppo.critic_weight_decay, self._plan.total_updates)
        engine = train_engine(model, ds_config, settings)
        select_kernels(engine)
        return engine

    def _build_reward(self, folder: str, critic_folder: str | None) -> Any:
        ppo, dtype = self._config.ppo, self._config.run.dtype
        ds_config = eval_config(ppo.critic_zero_stage, dtype, ppo.offload_reward_model, self._ranks)
        resize = self._config.run.resize_vocabulary
        model = ScalarModel(load_sequence_classifier(folder, dtype, ds_config, new_head=False, resize=resize))
        engine = eval_engine(model, ds_config)
        if self.critic is None or folder != critic_folder:
            select_kernels(engine)
        else:
            model.packed = self.critic.module.packed
        return engine

    def train(self) -> None:
        """Actor and critic to training mode."""
        for engine in self.trained.values():
            engine.train()

    def eval(self) -> None:
        """Actor and critic to eval mode: dropout off."""
        for engine in self.trained.values():
            engine.eval()
