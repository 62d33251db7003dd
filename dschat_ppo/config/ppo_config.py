"""The configuration of step 3: its groups of flags, and combinations that are refused or have no
effect."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dschat_ppo.config.algorithm_flags import AlgorithmFlags
from dschat_ppo.config.data_flags import StepData
from dschat_ppo.config.feature_flags import (
    feature_notes,
    features_give_rewards,
    given_sources_of_learning,
)
from dschat_ppo.config.health_flags import PPOHealthFlags
from dschat_ppo.config.ppo_flags import (
    EvaluationFlags,
    PPOFlags,
    RewardSourceFlags,
)
from dschat_ppo.config.schema import flag, require_used
from dschat_ppo.config.step_config import StepConfig
from dschat_ppo.errors import UserError


@dataclass(frozen=True)
class ReferenceFlags:
    """Reference."""

    ref_model_name_or_path: str | None = flag(
        None,
        "model of the reference, with the actor's tokenizer; not given: the model of"
        " --actor_model_name_or_path",
    )


@dataclass(frozen=True, kw_only=True)
class PPOConfig(StepConfig):
    """The configuration of step 3."""

    ppo: PPOFlags
    algorithm: AlgorithmFlags
    rewards: RewardSourceFlags
    validation: EvaluationFlags
    reference: ReferenceFlags
    health: PPOHealthFlags

    kind = "ppo"
    own_defaults = {
        "tensorboard_path": "step3_tensorboard",
        "truncation": "drop",
        "logging_steps": 1,
    }
    micro_batch = "per_device_training_batch_size"

    def __post_init__(self) -> None:
        self._check_rollouts()
        self._check_rewards()
        self._check_something_is_learned()
        self._check_memory()
        self._check_effects()
        super().__post_init__()

    def _check_rollouts(self) -> None:
        """Refuse numbers and sources of responses that the algorithm cannot use."""
        ppo = self.ppo
        algorithm = self.algorithm
        if algorithm.compares_answers and ppo.n_samples_per_prompt == 1:
            raise UserError(
                f"--advantage_estimator {algorithm.advantage_estimator} compares the answers to one"
                " prompt: set --n_samples_per_prompt to 2 or more"
            )
        if ppo.old_logprobs == "rollout" and algorithm.needs_training_logprobs:
            raise UserError(
                "--old_logprobs rollout skips the forward pass that --importance_correction,"
                " --high_entropy_share and --kl_estimator full need; use recompute or auto"
            )
        if algorithm.overlong_buffer > ppo.max_answer_seq_len:
            raise UserError(
                f"--overlong_buffer {algorithm.overlong_buffer} is above --max_answer_seq_len"
                f" {ppo.max_answer_seq_len}"
            )

    def _check_rewards(self) -> None:
        """Refuse a learned reward without a model."""
        has_model = self.rewards.use_reward_model
        if has_model and "reward" not in self.models:
            without_rewards = ""
            alone = names_of_teachings(self.value)
            if alone:
                without_rewards = (
                    f", or to learn from {alone} alone, --use_reward_model False"
                    " --advantage_estimator none"
                )
            raise UserError(
                "the learned reward needs --critic_model_name_or_path or"
                " --reward_model_name_or_path (or set --use_reward_model False and give"
                f" --reward_function or --remote_reward_url{without_rewards})"
            )
        if self.algorithm.normalize_rewards == "model" and not has_model:
            raise UserError(
                "--normalize_rewards model needs a learned reward, but --use_reward_model is False"
            )

    def _check_something_is_learned(self) -> None:
        """Refuse a run that nothing rewards or teaches."""
        has_estimator = self.algorithm.advantage_estimator != "none"
        teachings = [notes.teaching for notes in feature_notes() if notes.teaching is not None]
        alternatives = " or ".join(teaching.advice for teaching in teachings)
        if not self.has_rewards and has_estimator:
            sources = ["--reward_function", "--remote_reward_url"]
            for notes in feature_notes():
                sources += [f"--{name}" for name in notes.rewarding]
            without_rewards = ""
            if alternatives:
                without_rewards = f"; or {alternatives}, alone with --advantage_estimator none"
            listed = f"{', '.join(sources[:-1])} or {sources[-1]}"
            raise UserError(
                f"--use_reward_model False leaves no reward: give {listed}{without_rewards}"
            )
        if not has_estimator and not given_sources_of_learning(self.value):
            raise UserError(
                "--advantage_estimator none has no policy loss; give"
                f" {alternatives or 'another one'}"
            )

    def _check_memory(self) -> None:
        """Refuse flags of memory that need another ZeRO stage."""
        if self.ppo.offload and min(self.stages.values()) == 0:
            stage_flags = " and ".join(f"--{prefix}zero_stage" for prefix in self.stages)
            raise UserError(
                f"--offload needs {stage_flags} 1, 2 or 3: stage 0 keeps everything on the device"
            )

    def _check_effects(self) -> None:
        """Refuse flags that the rest of the configuration leaves without effect."""
        require_used(
            self.algorithm,
            "policy_loss clip_eps clip_eps_low clip_eps_high dual_clip high_entropy_share"
            " importance_correction off_policy_delta",
            when=self.has_policy_loss,
            purpose="a policy loss, which --advantage_estimator none does not have",
        )
        require_used(
            self.schedule,
            "early_stop_patience early_stop_min_delta",
            when=self.validation.eval_interval > 0,
            purpose="evaluations during training, which --eval_data_path and --eval_interval make",
        )
        with_reference = "the reference, which --kl_coef or --kl_loss_coef above 0 compares with"
        require_used(
            self.reference,
            "ref_model_name_or_path",
            when=self.has_reference,
            purpose=with_reference,
        )
        require_used(
            self.ppo,
            "offload_reference_model",
            when=self.has_reference,
            purpose=with_reference,
        )
        require_used(
            self.ppo,
            "offload_reward_model",
            when=self.rewards.use_reward_model,
            purpose="--use_reward_model",
        )

    @property
    def has_rewards(self) -> bool:
        """Whether a model, a function, a service or a feature scores answers."""
        return (
            self.rewards.use_reward_model
            or self.rewards.has_functions
            or features_give_rewards(self)
        )

    @property
    def has_policy_loss(self) -> bool:
        """Whether there are advantages, from which the policy learns."""
        if self.algorithm.advantage_estimator != "none":
            return True
        return any(needs.policy_loss for needs in self.needs)

    @property
    def has_reference(self) -> bool:
        """Whether the reward or a loss compares with the reference."""
        return self.algorithm.has_reference or any(needs.reference for needs in self.needs)

    @property
    def compares_distributions(self) -> bool:
        """Whether the whole distributions of policies are compared, not only at sampled tokens."""
        if "full" in self.algorithm.kl_forms:
            return True
        return any(needs.whole_distributions for needs in self.needs)

    @property
    def training(self) -> PPOFlags:
        return self.ppo

    @property
    def stages(self) -> dict[str, int]:
        stages: dict[str, int] = {"actor_": self.ppo.actor_zero_stage}
        if self.algorithm.has_critic:
            stages["critic_"] = self.ppo.critic_zero_stage
        return stages

    @property
    def data_of_step(self) -> StepData:
        return StepData(
            "prompt",
            self.data,
            self.ppo.max_prompt_seq_len,
            eval_paths=self.validation.eval_data_path,
        )

    @property
    def models_of_step(self) -> dict[str, tuple[str, str]]:
        ppo = self.ppo
        actor = ("--actor_model_name_or_path", ppo.actor_model_name_or_path)
        critic = None
        if ppo.critic_model_name_or_path:
            critic = ("--critic_model_name_or_path", ppo.critic_model_name_or_path)
        reward = None
        if self.rewards.use_reward_model:
            reward = critic
            if self.rewards.reward_model_name_or_path:
                reward = ("--reward_model_name_or_path", self.rewards.reward_model_name_or_path)
        models = {"actor": actor}
        if self.has_reference:
            models["reference"] = actor
            if self.reference.ref_model_name_or_path:
                models["reference"] = (
                    "--ref_model_name_or_path",
                    self.reference.ref_model_name_or_path,
                )
        if self.algorithm.has_critic:  # which gets a new head, if its model is the actor's
            models["critic"] = critic or reward or actor
        if reward is not None:
            models["reward"] = reward
        return models

    @property
    def validate_only(self) -> bool:
        return self.validation.validate_only

    @property
    def score_clip(self) -> float:
        """`--reward_clip`, or its default; 0 is off. A function may return any numbers, and
        estimators that compare answers would find no difference between two that are clipped."""
        if self.algorithm.reward_clip is not None:
            return self.algorithm.reward_clip
        # 5 as in DeepSpeed-Chat
        if self.algorithm.has_critic and self.rewards.learned_alone:
            return 5.0
        return 0.0

    @property
    def critic_may_have_new_head(self) -> bool:
        """Whether the critic may start with a new score head: without a learned reward there is no
        trained one."""
        return not self.rewards.use_reward_model

    @property
    def shares_base(self) -> bool:
        """Whether critic and reward model are over the actor's frozen weights."""
        return any(needs.shares_base for needs in self.needs)

    @property
    def quantises_frozen(self) -> bool:
        """Whether ZeRO-3 holds the actor's frozen weights in 8 bits."""
        return any(needs.quantises_frozen for needs in self.needs)

    @property
    def undivided(self) -> str | None:
        """Why ranks cannot divide the actor's layers among them; None if they can."""
        reasons = [needs.undivided for needs in self.needs if needs.undivided is not None]
        return next(iter(reasons), None)

    @property
    def reference_is_actor_base(self) -> bool:
        """Whether the reference consists of the actor's frozen weights."""
        return self.is_frozen("actor_") and self.reference.ref_model_name_or_path is None

    @property
    def aligns_overflow(self) -> bool:
        """Whether an fp16 overflow of actor or critic skips the update of both."""
        return self.ppo.align_overflow and self.run.dtype == "fp16" and self.algorithm.has_critic

    def idle(self) -> dict[str, str]:
        reasons = super().idle()
        if not self.aligns_overflow:
            reasons["align_overflow"] = (
                "overflows are aligned only between two models trained in fp16"
            )
        if self.reference_is_actor_base:
            reasons["offload_reference_model"] = "the reference uses the actor's frozen weights"
        if self.shares_base:
            reasons["offload_reward_model"] = "the reward model uses the actor's frozen weights"
        return reasons

    @property
    def recompute_old_logprobs(self) -> bool:
        """Whether old log-probs come from a forward pass of the actor; if not, from sampling."""
        if self.ppo.old_logprobs == "auto":
            is_near = self.run.dtype == "fp32" or any(need.samples_exactly for need in self.needs)
            return not is_near or self.algorithm.needs_training_logprobs
        return self.ppo.old_logprobs == "recompute"


def names_of_teachings(value_of: Callable[[str], Any]) -> str:
    """What a run of step 3 with these values of flags can learn from without rewards, for messages;
    "" for nothing."""
    return " and ".join(source.name for source in given_sources_of_learning(value_of))
