"""The four models of PPO, each in a DeepSpeed engine over all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

from transformers import PreTrainedModel

from dschat_ppo.common.dist import device, world_size
from dschat_ppo.common.logging import logger
from dschat_ppo.config.batch_plan import PPOPlan
from dschat_ppo.config.ppo_config import PPOConfig
from dschat_ppo.engine.build_engine import (
    eval_engine,
    frozen_policy,
    optimizer_settings,
    require_whole_distributions,
    share_gathering,
    train_engine,
)
from dschat_ppo.engine.ds_config import Config, config_of_run, eval_config
from dschat_ppo.engine.hybrid_engine import HybridEngine, MergeWithHost
from dschat_ppo.features import hooks
from dschat_ppo.models.adapters.shared_base import classifier_over_base, model_over_base
from dschat_ppo.models.given_embeddings import GivenSource
from dschat_ppo.models.kernel_selection import apply_memory_flags, select_kernels
from dschat_ppo.models.loading import (
    changes_to_train,
    frozen_changes,
    load_causal_lm,
    load_sequence_classifier,
)
from dschat_ppo.models.model_folders import is_adapter_folder
from dschat_ppo.models.wrapped_models import PolicyModel, ScalarModel
from dschat_ppo.types import Engine


@dataclass(frozen=True)
class ModelFolders:
    """Local folders of the models; None for a role that the run does not use."""

    actor: str
    critic: str | None
    reward: str | None
    reference: str | None = None  # if it is not the actor's folder
    further: Mapping[str, str] = field(default_factory=dict)  # of features, by role


class RLHFEngine:
    """Builds and holds the engines of actor, reference, critic and reward model.

    Actor and reference start from the SFT model, unless the reference has a folder, and critic and
    reward model from the reward model. Under ZeRO-3 each model is partitioned while its layers are
    built. If only the actor's adapter trains and the reference has no folder, the reference
    consists of modules over the actor's frozen weights; with `--share_base` critic and reward model
    do too. What the run does not use is None.

    Attributes:
        actor, critic: train.
        reference, reward: only run forward.
        further: the models that features add, by role; they only run forward.
        hybrid: switches the actor between training and generation.
    """

    def __init__(
        self,
        config: PPOConfig,
        plan: PPOPlan,
        folders: ModelFolders,
        given_sources: Mapping[str, GivenSource] | None = None,
    ):
        """Load the models and build their engines. Collective; all ranks build them in this order.

        Args:
            config: the flags.
            plan: batches and steps.
            folders: of the models.
            given_sources: role -> where that comes from which the model gets in place of the
                embeddings of some ids; None: no model gets any.

        Raises:
            UserError: a model folder cannot be loaded, or does not suit a flag.
        """
        self._config = config
        self._plan = plan
        self._folders = folders
        self._given_sources = given_sources or {}
        self._actor_ds_config = config_of_run(
            config,
            config.ppo.actor_zero_stage,
            world_size(),
            device().type,
            quantised_frozen=config.quantises_frozen,
        )
        # --deepspeed_config may set another stage than the flag
        self._actor_stage: int = self._actor_ds_config["zero_optimization"]["stage"]

        actor_lm = self._load_actor()
        # Models over the actor's weights come before its engine: the engine adds hooks to the
        # modules, and a copy of the modules would have them too.
        reference_over_actor = self._reference_over_actor(actor_lm)
        base = self._shared_base(actor_lm)
        self.actor = self._build_actor(actor_lm)
        self.reference = self._build_reference(reference_over_actor)
        self.further = self._build_further()
        self.critic = self._build_critic(base)
        self.reward = self._build_reward(base)  # after the critic, whose kernels it may take
        self.hybrid = self._build_hybrid()  # last: features may move the other engines meanwhile

    def _load_actor(self) -> PreTrainedModel:
        """The actor's language model, with what trains in it."""
        config = self._config
        return load_causal_lm(
            self._folders.actor,
            config.run.dtype,
            self._actor_ds_config,
            changes_to_train(config, "actor_", config.ppo.actor_dropout or 0.0),
        )

    def _reference_over_actor(self, actor_lm: PreTrainedModel) -> PreTrainedModel | None:
        """The reference as modules over the actor's frozen weights; None if it has weights of its
        own, or there is none."""
        config = self._config
        if not config.has_reference or not config.is_frozen("actor_"):
            return None
        if self._folders.reference is not None:
            return None
        # a run that continues an adapter has that adapter in its reference
        return model_over_base(actor_lm, copies_adapter=is_adapter_folder(self._folders.actor))

    def _shared_base(self, actor_lm: PreTrainedModel) -> PreTrainedModel | None:
        """The base of critic and reward model under `--share_base`; else None."""
        if not self._config.shares_base:
            return None
        return model_over_base(actor_lm)

    def _build_actor(self, actor_lm: PreTrainedModel) -> Engine:
        """The training engine of the actor, whose forward passes take the fastest kernels that give
        its log-probs."""
        config = self._config
        actor = PolicyModel(actor_lm)
        actor.given_source = self._given_sources.get("actor")
        apply_memory_flags(actor, config.memory, config.ppo.actor_gradient_checkpointing)
        engine = train_engine(
            actor,
            self._actor_ds_config,
            optimizer_settings(config, self._plan.actor_updates, "actor_"),
            layer_by_layer=config.ppo.unpin_actor_parameters,
        )
        select_kernels(engine)
        return engine

    def _build_reference(self, reference_over_actor: PreTrainedModel | None) -> Engine | None:
        """The engine of the reference: of the modules over the actor's weights if there are some,
        else of a model of its own from its folder, or from the actor's. None if the run has no
        reference."""
        config = self._config
        if not config.has_reference:
            return None
        stage: int = config.ppo.actor_zero_stage
        if reference_over_actor is not None:
            stage = self._actor_stage  # its weights are divided as the actor's engine divides them
        ds_config = eval_config(
            stage, config.run.dtype, config.ppo.offload_reference_model, world_size()
        )
        if reference_over_actor is not None:
            copied = "no adapter"
            if is_adapter_folder(self._folders.actor):
                copied = "a frozen copy of its first adapter"
            logger().info(
                f"reference: the actor's frozen weights with {copied}; no reference model is held"
            )
            reference_lm = reference_over_actor
        else:
            reference_lm = load_causal_lm(
                self._folders.reference or self._folders.actor,
                config.run.dtype,
                ds_config,
                frozen_changes(config),
            )
        has_weights_of_actor = self._folders.reference is None
        if has_weights_of_actor:
            # The same model with the actor's kernels: both give the same bits before any update.
            reference = PolicyModel(reference_lm, self.actor.module.layout)
        else:
            reference = PolicyModel(reference_lm)
        reference.given_source = self._given_sources.get("reference")
        return self._build_forward_only(
            reference, ds_config, selects_kernels=not has_weights_of_actor
        )

    def _build_further(self) -> dict[str, Engine]:
        """The engines of the models that features add, by role. Where whole distributions are
        compared, it is checked that those of all policies can be."""
        config = self._config
        engines = {}
        for model in config.further_models:
            folder = self._folders.further[model.role]
            policy, ds_config = frozen_policy(config, model, folder, config.ppo.actor_zero_stage)
            policy.given_source = self._given_sources.get(model.role)
            engines[model.role] = self._build_forward_only(policy, ds_config)
        if config.compares_distributions:
            compared = [self.actor, self.reference]
            for model in config.further_models:
                if model.reads_tokens_of_actor:
                    compared.append(engines[model.role])
            require_whole_distributions([engine for engine in compared if engine is not None])
        return engines

    def _build_critic(self, base: PreTrainedModel | None) -> Engine | None:
        """The training engine of the critic: an adapter and a head over `base`, or a model of its
        own, whose head is zero if it is new. None if the run has no critic."""
        config = self._config
        folder = self._folders.critic
        if not folder:
            return None
        ds_config = config_of_run(config, config.ppo.critic_zero_stage, world_size(), device().type)
        changes = changes_to_train(config, "critic_", config.ppo.critic_dropout or 0.0)
        if base is not None:
            logger().info(
                "critic: an adapter and a head over the actor's frozen weights (--share_base)"
            )
            classifier = classifier_over_base(base, folder, changes.adapter, changes.kinds)
        else:
            classifier = load_sequence_classifier(
                folder,
                config.run.dtype,
                ds_config,
                config.critic_may_have_new_head,
                changes,
                zero_head=True,
            )
        critic = ScalarModel(classifier)
        critic.given_source = self._given_sources.get("critic")
        apply_memory_flags(critic, config.memory, config.ppo.critic_gradient_checkpointing)
        share_gathering(critic, self.actor)
        settings = optimizer_settings(config, self._plan.total_updates, "critic_")
        engine = train_engine(critic, ds_config, settings)
        select_kernels(engine)
        return engine

    def _build_reward(self, base: PreTrainedModel | None) -> Engine | None:
        """The engine of the reward model: its adapter and head over `base`, or a model of its own.
        None if rewards come from elsewhere."""
        config = self._config
        folder = self._folders.reward
        if not folder:
            return None
        stage: int = config.ppo.critic_zero_stage
        if config.shares_base:
            stage = self._actor_stage  # its weights are divided as the actor's engine divides them
        ds_config = eval_config(
            stage, config.run.dtype, config.ppo.offload_reward_model, world_size()
        )
        if base is not None:
            logger().info(
                "reward model: its adapter and head over the actor's frozen weights (--share_base)"
            )
            classifier = classifier_over_base(base, folder, kinds=frozen_changes(config).kinds)
        else:
            classifier = load_sequence_classifier(
                folder,
                config.run.dtype,
                ds_config,
                new_head=False,
                changes=frozen_changes(config),
            )
        reward = ScalarModel(classifier)
        reward.given_source = self._given_sources.get("reward")
        if self.critic is None or folder != self._folders.critic:
            return self._build_forward_only(reward, ds_config)
        engine = self._build_forward_only(reward, ds_config, selects_kernels=False)
        engine.module.layout = self.critic.module.layout  # the same model, already tested
        return engine

    def _build_forward_only(
        self, model: PolicyModel | ScalarModel, ds_config: Config, selects_kernels: bool = True
    ) -> Engine:
        """An engine that only runs forward. `selects_kernels`: False if the model takes those of
        another model."""
        apply_memory_flags(model, self._config.memory)
        share_gathering(model, self.actor)
        engine = eval_engine(model, ds_config)
        if selects_kernels:
            select_kernels(engine)
        return engine

    def _build_hybrid(self) -> HybridEngine:
        """What switches the actor to generation, with whole weights, with layers that are divided
        over ranks, or with layers that are gathered one at a time, as the flags ask."""
        config = self._config
        # A feature offers `generation.generation_change(config, engines)`: a `GenerationChange`, or
        # None.
        changes = []
        for generation_change in hooks("generation.generation_change"):
            change = generation_change(config, self)
            if change is not None:
                changes.append(change)
        division = None
        gathers_by_layer = config.ppo.unpin_actor_parameters
        merge: MergeWithHost | None = None
        for change in changes:
            merge = merge or change.merge
            division = division or change.division
            gathers_by_layer = gathers_by_layer or change.by_layer
        are_whole = not gathers_by_layer or self._actor_stage != 3
        if not are_whole:  # nothing merges into them
            merge = None
        if merge is not None:
            on_host = any(change.originals_on_host for change in changes)
            merge = partial(merge, originals_on_host=on_host)
        around = [change.around for change in changes if change.around is not None]
        return HybridEngine(self.actor, not gathers_by_layer, merge, around, division)

    @property
    def all_engines(self) -> list[Engine]:
        """The engines of all models."""
        further = self.further.values()
        engines = [self.actor, self.reference, self.critic, self.reward, *further]
        return [engine for engine in engines if engine is not None]

    @property
    def trained(self) -> dict[str, Engine]:
        """The engines that train, by role."""
        engines = {"actor": self.actor, "critic": self.critic}
        return {role: engine for role, engine in engines.items() if engine is not None}

    def frozen(self, role: str) -> Engine:
        """The engine of a model that does not train, by its role."""
        engine = {"reference": self.reference, "reward": self.reward, **self.further}[role]
        assert engine is not None
        return engine

    def train(self) -> None:
        """Put actor and critic into training mode."""
        for engine in self.trained.values():
            engine.train()

    def eval(self) -> None:
        """Put actor and critic into eval mode: no dropout."""
        for engine in self.trained.values():
            engine.eval()
