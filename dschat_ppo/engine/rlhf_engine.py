"""The four models of PPO, each in a DeepSpeed engine over all ranks."""

from __future__ import annotations

from functools import partial

from dschat_ppo.common.dist import device, world_size
from dschat_ppo.config.batch_plan import PPOPlan
from dschat_ppo.config.schedule_flags import ModelSchedule, ppo_schedules
from dschat_ppo.config.steps import PPOConfig
from dschat_ppo.engine.averages import MovingAverage, ReferenceSync
from dschat_ppo.engine.build_engine import OptimizerSettings, eval_engine, share_gathering, train_engine
from dschat_ppo.engine.ds_config import Config, eval_config, read_overlay, train_config
from dschat_ppo.engine.hybrid_engine import HybridEngine, Merge
from dschat_ppo.engine.role_models import ModelFolders, RoleModels
from dschat_ppo.engine.tensor_parallel import reason_not_to_divide, tensor_parallel
from dschat_ppo.models.adapters import merged
from dschat_ppo.models.kernel_selection import select_kernels
from dschat_ppo.models.long_sequences import apply_memory_flags
from dschat_ppo.types import Engine


class RLHFEngine:
    """Builds and holds the engines of actor, reference, critic and reward model.

    Actor and reference start from the SFT model, unless the reference has a folder, and critic and reward model from
    the reward model. Under ZeRO-3 each model is partitioned while its layers are built. Engines may share the
    parameters of a frozen base (`RoleModels`). What the run does not use is None.

    Attributes:
        actor, critic: train.
        reference, reward: only run forward.
        actor_average: moving average of the actor's weights.
        reference_sync: moves the reference towards the actor.
        hybrid: switches the actor between training and generation.
        saves_merged: save models with their adapters merged; else adapter folders.
    """

    def __init__(self, config: PPOConfig, plan: PPOPlan, folders: ModelFolders):
        # if other weights train with an adapter, the adapter alone would not be the model
        self.saves_merged = config.adapters.lora_merge or not config.adapters.only_optimize_lora
        ppo, own, lora = config.ppo, config.ppo_schedule, config.lora
        schedules = ppo_schedules(ppo, own, config.algorithm.has_critic)
        quantised_frozen = config.ppo_memory.enable_mixed_precision_lora
        ds_config = _training(config, ppo.actor_zero_stage, ppo.max_grad_norm, quantised_frozen)
        models = RoleModels(config, folders, ds_config)

        if ppo.actor_gradient_checkpointing:
            models.actor.gradient_checkpointing_enable()
        apply_memory_flags(models.actor, config.memory)
        rate = lora.actor_lora_learning_rate
        optimizer = _adamw(config, schedules[0], ppo.actor_weight_decay, plan.actor_updates, rate)
        self.actor = train_engine(models.actor, ds_config, optimizer, layer_by_layer=ppo.unpin_actor_parameters)
        select_kernels(self.actor)
        self.actor_average = MovingAverage(models.actor.lm, ppo.ema_decay) if ppo.enable_ema else None

        # of the engines that may be over the actor's weights; --deepspeed_config may set another than the flag
        actor_stage: int = ds_config["zero_optimization"]["stage"]
        self.reference = self._build_reference(config, folders, models, actor_stage)
        self.reference_sync: ReferenceSync | None = None
        if self.reference is not None and own.ref_sync_interval > 0:
            self.reference_sync = ReferenceSync(self.actor, self.reference, own.ref_sync_mixup)

        self.critic: Engine | None = None
        if folders.critic:
            clip = ppo.max_grad_norm if own.critic_max_grad_norm is None else own.critic_max_grad_norm
            ds_config = _training(config, ppo.critic_zero_stage, clip)
            critic = models.critic(folders.critic, ds_config)
            if ppo.critic_gradient_checkpointing:
                critic.gradient_checkpointing_enable()
            apply_memory_flags(critic, config.memory)
            rate = lora.critic_lora_learning_rate
            optimizer = _adamw(config, schedules[1], ppo.critic_weight_decay, plan.total_updates, rate)
            share_gathering(critic, self.actor)
            self.critic = train_engine(critic, ds_config, optimizer)
            select_kernels(self.critic)

        self.reward = self._build_reward_model(config, folders, models, actor_stage)
        self.hybrid = self._build_hybrid(config, actor_stage)

    def _build_reference(
        self, config: PPOConfig, folders: ModelFolders, models: RoleModels, actor_stage: int
    ) -> Engine | None:
        if not config.algorithm.has_reference:
            return None
        over_actor = folders.reference is None and config.actor_base_is_frozen
        stage = actor_stage if over_actor else config.ppo.actor_zero_stage
        ds_config = eval_config(stage, config.run.dtype, config.ppo.offload_reference_model, world_size())
        reference = models.reference(ds_config)
        apply_memory_flags(reference, config.memory)
        share_gathering(reference, self.actor)
        engine = eval_engine(reference, ds_config)
        if folders.reference is not None:  # else it has the actor's kernels
            select_kernels(engine)
        return engine

    def _build_reward_model(
        self, config: PPOConfig, folders: ModelFolders, models: RoleModels, actor_stage: int
    ) -> Engine | None:
        if not folders.reward:
            return None
        stage = actor_stage if config.lora.share_base else config.ppo.critic_zero_stage
        ds_config = eval_config(stage, config.run.dtype, config.ppo.offload_reward_model, world_size())
        reward = models.reward(folders.reward, ds_config)
        apply_memory_flags(reward, config.memory)
        share_gathering(reward, self.actor)
        engine = eval_engine(reward, ds_config)
        if self.critic is not None and folders.reward == folders.critic:
            reward.layout = self.critic.module.layout  # the same model, already tested
        else:
            select_kernels(engine)
        return engine

    def _build_hybrid(self, config: PPOConfig, actor_stage: int) -> HybridEngine:
        memory, lora_dim = config.ppo_memory, config.lora.actor_lora_dim
        engines = [self.actor, self.reference, self.critic, self.reward]
        sleeping = [engine for engine in engines if engine is not None] if memory.sleep_in_rollout else []
        size, parallel = memory.inference_tp_size, None
        whole = size > 1 and reason_not_to_divide(self.actor.module.config, lora_dim) is not None
        if not whole:
            parallel = tensor_parallel(size, memory.tp_gather_partition_size)
        pinned = not (config.ppo.unpin_actor_parameters or whole)
        merge: Merge | None = None
        if lora_dim > 0 and (pinned or actor_stage != 3):  # else the weights are never whole
            merge = partial(merged, originals_on_host=memory.sleep_in_rollout)
        return HybridEngine(self.actor, pinned, merge, sleeping, parallel)

    @property
    def trained(self) -> dict[str, Engine]:
        """The engines that train, by role."""
        engines = {"actor": self.actor, "critic": self.critic}
        return {role: engine for role, engine in engines.items() if engine is not None}

    def train(self) -> None:
        """Put actor and critic into training mode."""
        for engine in self.trained.values():
            engine.train()

    def eval(self) -> None:
        """Put actor and critic into eval mode: no dropout."""
        for engine in self.trained.values():
            engine.eval()


def _training(config: PPOConfig, stage: int, clip: float, quantised_frozen: bool = False) -> Config:
    """The DeepSpeed config of actor or critic."""
    run, overlay = config.run, read_overlay(config.run.deepspeed_config)
    offload = config.ppo.offload
    return train_config(
        stage, run.dtype, offload, world_size(), clip, overlay, config.memory, quantised_frozen, device().type
    )


def _adamw(
    config: PPOConfig, model: ModelSchedule, weight_decay: float, updates: int, lora_learning_rate: float
) -> OptimizerSettings:
    """The optimizer of actor or critic."""
    run, warmup = config.run, model.warmup
    if warmup is None:
        warmup = config.schedule.warmup_steps(config.ppo.num_warmup_steps, updates)
    return OptimizerSettings(
        model.peak, weight_decay, model.kind, warmup, updates, (run.adam_beta1, run.adam_beta2), run.adam_epsilon,
        lora_learning_rate, config.schedule.min_lr_ratio,
    )  # fmt: skip
