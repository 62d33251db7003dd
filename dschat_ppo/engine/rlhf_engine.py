"""The four models of PPO, each in a DeepSpeed engine over all ranks."""

from __future__ import annotations

from dataclasses import dataclass

from dschat_ppo.common.dist import world_size
from dschat_ppo.config.batch_plan import PPOPlan
from dschat_ppo.config.steps import PPOConfig
from dschat_ppo.engine.build_engine import OptimizerSettings, eval_engine, train_engine
from dschat_ppo.engine.ds_config import Config, eval_config, read_overlay, train_config
from dschat_ppo.engine.hybrid_engine import HybridEngine
from dschat_ppo.engine.moving_average import MovingAverage
from dschat_ppo.engine.tensor_parallel import tensor_parallel
from dschat_ppo.models.kernel_selection import select_kernels
from dschat_ppo.models.loading import load_causal_lm, load_sequence_classifier
from dschat_ppo.models.policy_model import PolicyModel
from dschat_ppo.models.scalar_model import ScalarModel
from dschat_ppo.types import Engine


@dataclass(frozen=True)
class ModelFolders:
    """Local folders of the models; None for a role that the run does not use."""

    actor: str
    critic: str | None
    reward: str | None


class RLHFEngine:
    """Builds and holds the engines of actor, reference, critic and reward model.

    Actor and reference start from the SFT model, critic and reward model from the reward model. Under ZeRO-3 each
    model is partitioned while its layers are built.

    Attributes:
        actor: trains.
        actor_average: moving average of the actor's weights, or None.
        reference: only runs forward; None if the run does not use it.
        critic: trains; None if the run does not use it.
        hybrid: switches the actor between training and generation.
        reward: only runs forward; None if the run does not use it.
    """

    def __init__(self, config: PPOConfig, plan: PPOPlan, folders: ModelFolders):
        ppo, run, ranks = config.ppo, config.run, world_size()
        overlay = read_overlay(run.deepspeed_config)

        memory, eight_bits = config.memory, config.memory.zero_quantized_weights

        def training(stage: int, quantised_frozen: bool = False) -> Config:
            return train_config(
                stage, run.dtype, ppo.offload, ranks, ppo.max_grad_norm, overlay, memory, quantised_frozen
            )

        def adamw(learning_rate: float, weight_decay: float, updates: int) -> OptimizerSettings:
            schedule, betas = ppo.lr_scheduler_type, (run.adam_beta1, run.adam_beta2)
            return OptimizerSettings(
                learning_rate, weight_decay, schedule, ppo.num_warmup_steps, updates, betas, run.adam_epsilon
            )

        ds_config = training(ppo.actor_zero_stage, config.ppo_memory.enable_mixed_precision_lora)
        dropout = ppo.actor_dropout or 0.0
        actor = PolicyModel(load_causal_lm(folders.actor, run.dtype, ds_config, dropout, run.resize_vocabulary))
        if ppo.actor_gradient_checkpointing:
            actor.gradient_checkpointing_enable()
        optimizer = adamw(ppo.actor_learning_rate, ppo.actor_weight_decay, plan.actor_updates)
        self.actor = train_engine(actor, ds_config, optimizer)
        select_kernels(self.actor)
        self.actor_average = MovingAverage(actor.lm, ppo.ema_decay) if ppo.enable_ema else None

        self.reference: Engine | None = None
        if config.algorithm.has_reference:
            ds_config = eval_config(ppo.actor_zero_stage, run.dtype, ppo.offload_reference_model, ranks, eight_bits)
            lm = load_causal_lm(folders.actor, run.dtype, ds_config, resize=run.resize_vocabulary)
            # the actor's kernels, so that both models give the same bits before the first update
            self.reference = eval_engine(PolicyModel(lm, actor.fused, actor.packed), ds_config)

        self.critic: Engine | None = None
        if folders.critic:
            ds_config = training(ppo.critic_zero_stage)
            new_head, dropout = config.critic_may_have_new_head, ppo.critic_dropout or 0.0
            critic = ScalarModel(
                load_sequence_classifier(folders.critic, run.dtype, ds_config, new_head, dropout, run.resize_vocabulary)
            )
            if ppo.critic_gradient_checkpointing:
                critic.gradient_checkpointing_enable()
            optimizer = adamw(ppo.critic_learning_rate, ppo.critic_weight_decay, plan.total_updates)
            self.critic = train_engine(critic, ds_config, optimizer)
            select_kernels(self.critic)

        self.reward: Engine | None = None
        if folders.reward:
            ds_config = eval_config(ppo.critic_zero_stage, run.dtype, ppo.offload_reward_model, ranks, eight_bits)
            reward = ScalarModel(
                load_sequence_classifier(
                    folders.reward, run.dtype, ds_config, new_head=False, resize=run.resize_vocabulary
                )
            )
            self.reward = eval_engine(reward, ds_config)
            if self.critic is not None and folders.reward == folders.critic:
                reward.packed = critic.packed  # the same model, already tested
            else:
                select_kernels(self.reward)

        engines = [self.actor, self.reference, self.critic, self.reward]
        sleeping = [engine for engine in engines if engine is not None] if config.ppo_memory.sleep_in_rollout else []
        parallel = tensor_parallel(config.ppo_memory.inference_tp_size, config.ppo_memory.tp_gather_partition_size)
        self.hybrid = HybridEngine(
            self.actor, pinned=not ppo.unpin_actor_parameters, sleeping=sleeping, parallel=parallel
        )

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
