"""The four models of PPO, each in a DeepSpeed engine over all ranks.

Several of them may be over one frozen base: module trees with the same parameters, and with
adapters and heads of their own. Hooks, training mode and checkpointing of one do not affect
another; only the tensors of the base are shared.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from dschat_ppo.common.dist import device, world_size
from dschat_ppo.common.logging import logger
from dschat_ppo.config.batch_plan import PPOPlan
from dschat_ppo.config.ppo_config import PPOConfig
from dschat_ppo.engine.averages import MovingAverage, ReferenceSync
from dschat_ppo.engine.build_engine import (
    eval_engine,
    frozen_policy,
    optimizer_settings,
    require_whole_distributions,
    share_gathering,
    train_engine,
)
from dschat_ppo.engine.ds_config import Config, config_of_run, eval_config
from dschat_ppo.engine.hybrid_engine import (
    HybridEngine,
    Merge,
    reason_not_to_divide,
    tensor_parallel,
)
from dschat_ppo.errors import UserError
from dschat_ppo.models.adapters import (
    AdapterSettings,
    adapter_layers,
    adapter_settings,
    add_adapter,
    is_adapter_parameter,
    merged,
    saved_config,
)
from dschat_ppo.models.architectures import backbone_of, classifier_class, config_for
from dschat_ppo.models.kernel_selection import apply_memory_flags, select_kernels
from dschat_ppo.models.loading import load_causal_lm, load_sequence_classifier
from dschat_ppo.models.model_folders import SCORE, is_adapter_folder
from dschat_ppo.models.wrapped_models import PolicyModel, ScalarModel
from dschat_ppo.types import Engine


@dataclass(frozen=True)
class ModelFolders:
    """Local folders of the models; None for a role that the run does not use."""

    actor: str
    critic: str | None
    reward: str | None
    reference: str | None = None  # if it is not the actor's folder
    teachers: tuple[str, ...] = ()


class RLHFEngine:
    """Builds and holds the engines of actor, reference, critic and reward model.

    Actor and reference start from the SFT model, unless the reference has a folder, and critic and
    reward model from the reward model. Under ZeRO-3 each model is partitioned while its layers are
    built. If only the actor's adapter trains and the reference has no folder, the reference
    consists of modules over the actor's frozen weights; with `--share_base` critic and reward model
    do too. What the run does not use is None.

    Attributes:
        actor, critic: train.
        reference, reward, teachers: only run forward.
        actor_average: moving average of the actor's weights.
        reference_sync: moves the reference towards the actor.
        hybrid: switches the actor between training and generation.
        saves_merged: save models with their adapters merged; else adapter folders.
    """

    def __init__(self, config: PPOConfig, plan: PPOPlan, folders: ModelFolders):  # noqa: PLR0915
        # if other weights train with an adapter, the adapter alone would not be the model
        self.saves_merged = config.adapters.lora_merge or not config.adapters.only_optimize_lora
        ppo, own, lora = config.ppo, config.reference, config.lora
        dtype, resize = config.run.dtype, config.run.resize_vocabulary

        ranks, kind, quantised_frozen = (
            world_size(),
            device().type,
            config.ppo_memory.enable_mixed_precision_lora,
        )
        ds_config = config_of_run(config, ppo.actor_zero_stage, ranks, kind, quantised_frozen)
        adapter = adapter_settings(lora, config.adapters, "actor_")
        lm = load_causal_lm(
            folders.actor, dtype, ds_config, ppo.actor_dropout or 0.0, resize, adapter
        )
        actor = PolicyModel(lm)
        # Made here because an engine adds hooks, which a copy of the modules would have too.
        continues = is_adapter_folder(folders.actor)
        over_actor = (
            config.has_reference and folders.reference is None and config.actor_base_is_frozen
        )
        reference_lm = model_over_base(lm, copies_adapter=continues) if over_actor else None
        base = model_over_base(lm) if lora.share_base else None
        apply_memory_flags(actor, config.memory, ppo.actor_gradient_checkpointing)
        optimizer = optimizer_settings(config, plan.actor_updates, "actor_")
        self.actor = train_engine(
            actor, ds_config, optimizer, layer_by_layer=ppo.unpin_actor_parameters
        )
        select_kernels(self.actor)
        self.actor_average = MovingAverage(lm, ppo.ema_decay) if ppo.enable_ema else None
        # of the engines that may be over the actor's weights; --deepspeed_config may set another
        # than the flag
        actor_stage: int = ds_config["zero_optimization"]["stage"]

        self.reference: Engine | None = None
        if config.has_reference:
            stage = actor_stage if over_actor else ppo.actor_zero_stage
            ds_config = eval_config(stage, dtype, ppo.offload_reference_model, ranks)
            if reference_lm is not None:
                copied = "a frozen copy of its first adapter" if continues else "no adapter"
                logger().info(
                    f"reference: the actor's frozen weights with {copied}; no reference model is"
                    " held"
                )
            else:
                reference_lm = load_causal_lm(
                    folders.reference or folders.actor, dtype, ds_config, resize=resize
                )
            # The same model with the actor's kernels: both give the same bits before any update.
            same = folders.reference is None
            reference = (
                PolicyModel(reference_lm, actor.layout) if same else PolicyModel(reference_lm)
            )
            self.reference = self._evaluating(reference, ds_config, config, selects=not same)
        self.reference_sync: ReferenceSync | None = None
        if self.reference is not None and own.ref_sync_interval > 0:
            self.reference_sync = ReferenceSync(self.actor, self.reference, own.ref_sync_mixup)

        self.teachers: list[Engine] = []
        for folder in folders.teachers:
            offload = config.teacher.offload_teacher_model
            teacher, ds_config = frozen_policy(folder, dtype, ppo.actor_zero_stage, offload, resize)
            self.teachers.append(self._evaluating(teacher, ds_config, config, selects=True))
        if config.distill_loss_coef > 0 or "full" in config.algorithm.kl_forms:
            require_whole_distributions(
                [self.actor, *filter(None, [self.reference]), *self.teachers]
            )

        self.critic: Engine | None = None
        if folders.critic:
            ds_config = config_of_run(config, ppo.critic_zero_stage, ranks, kind)
            adapter = adapter_settings(lora, config.adapters, "critic_")
            if base is not None:
                logger().info(
                    "critic: an adapter and a head over the actor's frozen weights (--share_base)"
                )
                classifier = classifier_over_base(base, folders.critic, adapter)
            else:
                new_head, dropout = config.critic_may_have_new_head, ppo.critic_dropout or 0.0
                classifier = load_sequence_classifier(
                    folders.critic,
                    dtype,
                    ds_config,
                    new_head,
                    dropout,
                    resize,
                    adapter,
                    zero_head=True,
                )
            critic = ScalarModel(classifier)
            apply_memory_flags(critic, config.memory, ppo.critic_gradient_checkpointing)
            share_gathering(critic, self.actor)
            self.critic = train_engine(
                critic, ds_config, optimizer_settings(config, plan.total_updates, "critic_")
            )
            select_kernels(self.critic)

        self.reward: Engine | None = None
        if folders.reward:
            stage = actor_stage if lora.share_base else ppo.critic_zero_stage
            ds_config = eval_config(stage, dtype, ppo.offload_reward_model, ranks)
            if base is not None:
                logger().info(
                    "reward model: its adapter and head over the actor's frozen weights"
                    " (--share_base)"
                )
                classifier = classifier_over_base(base, folders.reward)
            else:
                classifier = load_sequence_classifier(
                    folders.reward, dtype, ds_config, new_head=False, resize=resize
                )
            same = self.critic is not None and folders.reward == folders.critic
            self.reward = self._evaluating(
                ScalarModel(classifier), ds_config, config, selects=not same
            )
            if self.critic is not None and same:
                # the same model, already tested
                self.reward.module.layout = self.critic.module.layout

        memory, lora_dim = config.ppo_memory, config.lora.actor_lora_dim
        engines = [self.actor, self.reference, self.critic, self.reward, *self.teachers]
        sleeping = (
            [engine for engine in engines if engine is not None] if memory.sleep_in_rollout else []
        )
        size, parallel = memory.inference_tp_size, None
        whole = size > 1 and reason_not_to_divide(self.actor.module.config, lora_dim) is not None
        if not whole:
            parallel = tensor_parallel(size, memory.tp_gather_partition_size)
        pinned = not (config.ppo.unpin_actor_parameters or whole)
        merge: Merge | None = None
        if lora_dim > 0 and (pinned or actor_stage != 3):  # else the weights are never whole
            merge = partial(merged, originals_on_host=memory.sleep_in_rollout)
        self.hybrid = HybridEngine(self.actor, pinned, merge, sleeping, parallel)

    def _evaluating(
        self, model: PolicyModel | ScalarModel, ds_config: Config, config: PPOConfig, selects: bool
    ) -> Engine:
        """An engine that only runs forward; `selects` the kernels of the model, which has no others
        yet."""
        apply_memory_flags(model, config.memory)
        share_gathering(model, self.actor)
        engine = eval_engine(model, ds_config)
        if selects:
            select_kernels(engine)
        return engine

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


def model_over_base(model: PreTrainedModel, copies_adapter: bool = False) -> PreTrainedModel:
    """A second model whose base parameters and buffers are those of `model`, which has no hooks,
    thus no engine, yet. `copies_adapter`: with copies of the adapters as they are now; else it has
    none."""
    shared = {
        id(weight): weight
        for name, weight in model.named_parameters()
        if not is_adapter_parameter(name)
    }
    tree = copy.deepcopy(model, {**shared, **{id(buffer): buffer for buffer in model.buffers()}})
    if not copies_adapter:
        for path, layer in adapter_layers(tree).items():
            parent, _, name = path.rpartition(".")
            setattr(tree.get_submodule(parent), name, layer.get_base_layer())
        if hasattr(tree, "peft_config"):
            del tree.peft_config
    return tree


def classifier_over_base(
    base: PreTrainedModel, folder: str, adapter: AdapterSettings | None = None
) -> PreTrainedModel:
    """A one-label classifier whose backbone has the parameters of a causal language model without
    adapters and hooks, with the adapter and head of `folder`, or, if that is the base's own, a new
    adapter and a head of zeros. `adapter` None: as in `folder`. `UserError` where transformers'
    classifier has another backbone than its language model."""
    tree = model_over_base(base)
    backbone = backbone_of(tree)
    config = config_for(classifier_class(tree.config), tree.config)
    kind: Any = classifier_class(config)
    with torch.device("meta"):
        classifier = kind(config)
    name = classifier.base_model_prefix
    if type(getattr(classifier, name)) is not type(backbone):
        raise UserError(
            f"--share_base: {kind.__name__} has another backbone than {type(base).__name__}; omit"
            " the flag"
        )
    setattr(classifier, name, backbone)
    text = config.get_text_config()
    head = nn.utils.skip_init(nn.Linear, text.hidden_size, 1, bias=False, dtype=base.dtype)
    nn.init.zeros_(head.weight)
    setattr(classifier, SCORE, head)
    add_adapter(
        classifier,
        adapter or settings_of(folder),
        folder=folder if is_adapter_folder(folder) else None,
    )
    return classifier


def settings_of(folder: str) -> AdapterSettings:
    """The settings of the adapter in a folder, as it is."""
    config = saved_config(folder)
    return AdapterSettings(
        config.r, config.lora_alpha, 0.0, None, config.use_rslora, config.use_dora, freeze_base=True
    )
