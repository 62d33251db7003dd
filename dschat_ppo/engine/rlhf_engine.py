"""The four models of PPO, each in a DeepSpeed engine over all ranks."""

from __future__ import annotations

from functools import partial

from dschat_ppo.common.dist import world_size
from dschat_ppo.config.batch_plan import PPOPlan
from dschat_ppo.config.schedule_flags import ModelSchedule, ppo_schedules
from dschat_ppo.config.steps import PPOConfig
from dschat_ppo.engine.build_engine import OptimizerSettings, eval_engine, share_gathering, train_engine
from dschat_ppo.engine.ds_config import Config, eval_config, read_overlay, train_config
from dschat_ppo.engine.hybrid_engine import HybridEngine, Merge
from dschat_ppo.engine.moving_average import MovingAverage
from dschat_ppo.engine.reference_sync import ReferenceSync
from dschat_ppo.engine.role_models import ModelFolders, RoleModels
from dschat_ppo.engine.tensor_parallel import reason_not_to_divide, tensor_parallel
from dschat_ppo.models.adapter_merge import merged
from dschat_ppo.models.kernel_selection import select_kernels
from dschat_ppo.models.long_sequences import save_activation_memory
from dschat_ppo.types import Engine


class RLHFEngine:
    """Builds and holds the engines of actor, reference, critic and reward model.

    Actor and reference start from the SFT model, unless the reference has a folder, and critic and reward model from
    the reward model. Under ZeRO-3 each model is partitioned while its layers are built. Engines may share the
    parameters of a frozen base (`RoleModels`).

    Attributes:
        actor: trains.
        actor_average: moving average of the actor's weights, or None.
        reference: only runs forward; None if the run does not use it.
        reference_sync: moves the reference towards the actor, or None.
        critic: trains; None if the run does not use it.
        hybrid: switches the actor between training and generation.
        reward: only runs forward; None if the run does not use it.
        saves_merged: save models with their adapters merged; else adapter folders.
    """

    def __init__(self, config: PPOConfig, plan: PPOPlan, folders: ModelFolders):
        ppo, run, lora, ranks = config.ppo, config.run, config.lora, world_size()
        overlay = read_overlay(run.deepspeed_config)

        memory, eight_bits = config.memory, config.memory.zero_quantized_weights
        own, schedules = config.ppo_schedule, ppo_schedules(ppo, config.ppo_schedule, config.algorithm.has_critic)

        def training(stage: int, clip: float, quantised_frozen: bool = False) -> Config:
            return train_config(stage, run.dtype, ppo.offload, ranks, clip, overlay, memory, quantised_frozen)

        def adamw(model: ModelSchedule, weight_decay: float, updates: int, of_lora: float) -> OptimizerSettings:
            warmup, betas = model.warmup, (run.adam_beta1, run.adam_beta2)
            if warmup is None:
                warmup = config.schedule.warmup_steps(ppo.num_warmup_steps, updates)
            return OptimizerSettings(
                model.peak, weight_decay, model.kind, warmup, updates, betas, run.adam_epsilon, of_lora,
                config.schedule.min_lr_ratio,
            )  # fmt: skip

        # if other weights train beside an adapter, the adapter alone would not be the model
        self.saves_merged = config.adapters.lora_merge or not config.adapters.only_optimize_lora
        ds_config = training(ppo.actor_zero_stage, ppo.max_grad_norm, config.ppo_memory.enable_mixed_precision_lora)
        models = RoleModels(config, folders, ds_config)
        actor = models.actor
        if ppo.actor_gradient_checkpointing:
            actor.gradient_checkpointing_enable()
        save_activation_memory(actor, memory)
        optimizer = adamw(schedules[0], ppo.actor_weight_decay, plan.actor_updates, lora.actor_lora_learning_rate)
        self.actor = train_engine(actor, ds_config, optimizer)
        select_kernels(self.actor)
        self.actor_average = MovingAverage(actor.lm, ppo.ema_decay) if ppo.enable_ema else None

        self.reference: Engine | None = None
        if config.algorithm.has_reference:
            ds_config = eval_config(ppo.actor_zero_stage, run.dtype, ppo.offload_reference_model, ranks, eight_bits)
            reference = models.reference(ds_config)
            save_activation_memory(reference, memory)
            share_gathering(reference, self.actor)
            self.reference = eval_engine(reference, ds_config)
            if folders.reference is not None:  # else it has the actor's kernels
                select_kernels(self.reference)
        self.reference_sync: ReferenceSync | None = None
        if self.reference is not None and own.ref_sync_interval > 0:
            self.reference_sync = ReferenceSync(self.actor, self.reference, own.ref_sync_mixup)

        self.critic: Engine | None = None
        if folders.critic:
            clip = ppo.max_grad_norm if own.critic_max_grad_norm is None else own.critic_max_grad_norm
            ds_config = training(ppo.critic_zero_stage, clip)
            critic = models.critic(folders.critic, ds_config)
            if ppo.critic_gradient_checkpointing:
                critic.gradient_checkpointing_enable()
            save_activation_memory(critic, memory)
            optimizer = adamw(schedules[1], ppo.critic_weight_decay, plan.total_updates, lora.critic_lora_learning_rate)
            share_gathering(critic, self.actor)
            self.critic = train_engine(critic, ds_config, optimizer)
            select_kernels(self.critic)

        self.reward: Engine | None = None
        if folders.reward:
            stage = ppo.actor_zero_stage if lora.share_base else ppo.critic_zero_stage
            ds_config = eval_config(stage, run.dtype, ppo.offload_reward_model, ranks, eight_bits)
            reward = models.reward(folders.reward, ds_config)
            save_activation_memory(reward, memory)
            share_gathering(reward, self.actor)
            self.reward = eval_engine(reward, ds_config)
            if self.critic is not None and folders.reward == folders.critic:
                reward.packed, reward.divided = critic.packed, critic.divided  # the same model, already tested
            else:
                select_kernels(self.reward)

        engines = [self.actor, self.reference, self.critic, self.reward]
        sleeping = [engine for engine in engines if engine is not None] if config.ppo_memory.sleep_in_rollout else []
        size, parallel = config.ppo_memory.inference_tp_size, None
        whole = size > 1 and reason_not_to_divide(actor.config, lora.actor_lora_dim) is not None
        if not whole:
            parallel = tensor_parallel(size, config.ppo_memory.tp_gather_partition_size)
        pinned = not (ppo.unpin_actor_parameters or whole)
        self.hybrid = HybridEngine(self.actor, pinned, _merge(config, pinned), sleeping, parallel)

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


def _merge(config: PPOConfig, pinned: bool) -> Merge | None:
    """How adapters are merged for generation; None without adapters, or if the weights are never whole."""
    if config.lora.actor_lora_dim == 0 or (not pinned and config.ppo.actor_zero_stage == 3):
        return None
    return partial(merged, originals_on_host=config.ppo_memory.sleep_in_rollout)
