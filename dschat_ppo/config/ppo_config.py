"""The configuration of step 3: its groups of flags, and combinations that are refused or have no
effect."""

from __future__ import annotations

from dataclasses import dataclass

from dschat_ppo.config.algorithm_flags import AlgorithmFlags
from dschat_ppo.config.data_flags import StepData
from dschat_ppo.config.distillation_flags import TEACHER, DistillationFlags, TeacherFlags
from dschat_ppo.config.environment_flags import EnvironmentFlags
from dschat_ppo.config.health_flags import PPOHealthFlags
from dschat_ppo.config.ppo_flags import (
    EvaluationFlags,
    PPOFlags,
    PPOLoraFlags,
    PPOMemoryFlags,
    RewardSourceFlags,
)
from dschat_ppo.config.schema import flag, not_negative, refuse, require_used, share
from dschat_ppo.config.step_config import StepConfig


@dataclass(frozen=True)
class ReferenceFlags:
    """Reference."""

    ref_model_name_or_path: str | None = flag(
        None,
        "model of the reference, with the actor's tokenizer; not given: the model of"
        " --actor_model_name_or_path",
    )
    ref_sync_interval: int = not_negative(
        0, "move the reference towards the actor after every N PPO steps; 0 = never"
    )
    ref_sync_mixup: float = share(
        1.0,
        "share of the actor in the new reference; the rest is the old reference (TRL: 0.6); 1 = the"
        " actor",
    )

    def __post_init__(self) -> None:
        require_used(self, [(self.ref_sync_interval > 0, "--ref_sync_interval", "ref_sync_mixup")])


@dataclass(frozen=True, kw_only=True)
class PPOConfig(StepConfig):
    """The configuration of step 3."""

    ppo: PPOFlags
    algorithm: AlgorithmFlags
    rewards: RewardSourceFlags
    environment: EnvironmentFlags
    validation: EvaluationFlags
    lora: PPOLoraFlags
    ppo_memory: PPOMemoryFlags
    reference: ReferenceFlags
    teacher: TeacherFlags
    distillation: DistillationFlags
    health: PPOHealthFlags

    kind = "ppo"
    own_defaults = {
        "tensorboard_path": "step3_tensorboard",
        "truncation": "drop",
        "logging_steps": 1,
    }
    micro_batch = "per_device_training_batch_size"

    def __post_init__(self) -> None:
        ppo = self.ppo
        algorithm = self.algorithm
        memory = self.ppo_memory
        reference = self.reference
        compares = "compares the answers to one prompt: set --n_samples_per_prompt to 2 or more"
        of_reference = "the reference, which --kl_coef or --kl_loss_coef above 0 compares with"
        without_policy_loss = algorithm.advantage_estimator == "none"
        learned = self.rewards.use_reward_model
        by_model = algorithm.normalize_rewards == "model"
        teacher_alone = ""
        if self.distils:
            teacher_alone = (
                ", or to learn from the teacher alone, --use_reward_model False "
                "--advantage_estimator none"
            )
        refuse(
            {
                f"--advantage_estimator {algorithm.advantage_estimator} {compares}": (
                    algorithm.compares_answers and ppo.n_samples_per_prompt == 1
                ),
                (
                    "--sampler chooses among all prompts, which --streaming does not know; use "
                    "one of the two"
                ): (ppo.sampler is not None and self.data.streaming),
                f"--dynamic_sampling {compares}": (
                    algorithm.dynamic_sampling and ppo.n_samples_per_prompt == 1
                ),
                (
                    "--old_logprobs rollout skips the forward pass that --importance_correction, "
                    "--high_entropy_share and --kl_estimator full need; use recompute or auto"
                ): (ppo.old_logprobs == "rollout" and algorithm.needs_training_logprobs),
                (
                    f"--overlong_buffer {algorithm.overlong_buffer} is above --max_answer_seq_len "
                    f"{ppo.max_answer_seq_len}"
                ): (algorithm.overlong_buffer > ppo.max_answer_seq_len),
                # the reference
                (
                    "--ref_sync_interval mixes whole weights, but with --actor_lora_dim the "
                    "changes of the actor are in its adapter; omit one of the two"
                ): (reference.ref_sync_interval > 0 and self.lora.actor_lora_dim > 0),
                (
                    "--ref_model_name_or_path: with --share_base the reference is the shared "
                    "base; omit one of the two"
                ): (reference.ref_model_name_or_path is not None and self.lora.share_base),
                # the learned reward
                (
                    "the learned reward needs --critic_model_name_or_path or "
                    "--reward_model_name_or_path (or set --use_reward_model False and give "
                    f"--reward_function or --remote_reward_url{teacher_alone})"
                ): (learned and "reward" not in self.models),
                (
                    "--normalize_rewards model needs a learned reward, but --use_reward_model is "
                    "False"
                ): (by_model and not learned),
                (
                    "--normalize_rewards model uses the mean of scores at last tokens, not of "
                    "--process_reward scores; use --normalize_rewards running"
                ): (by_model and self.rewards.process_reward is not None),
                (
                    "--use_reward_model False leaves no reward: give --reward_function, "
                    "--remote_reward_url, --environment, --tool_config or --agent_func_path; or a "
                    "teacher (--teacher_model_name_or_path) and, to learn from it alone, "
                    "--advantage_estimator none"
                ): (not self.has_rewards and not without_policy_loss),
                # the teacher
                (
                    "--advantage_estimator none has no policy loss; give a teacher to learn from "
                    f"({TEACHER})"
                ): (without_policy_loss and not self.distils),
                "--distill_coef 0 leaves the teacher without effect; omit it": (
                    self.distils and self.distill_coef == 0
                ),
                (
                    "--eval_data_path: a teacher gives no score to held-out answers; give "
                    "--eval_reward_function as well"
                ): (
                    bool(self.validation.eval_data_path)
                    and not self.has_rewards
                    and self.validation.eval_reward_function is None
                ),
                (
                    f"--distill_on {self.distillation.distill_on}: answers of the data are no "
                    "samples of the policy, so they take --advantage_estimator none and one "
                    "answer to a prompt (--n_samples_per_prompt 1), and neither episodes nor "
                    "--distill_policy_gradient"
                ): (
                    self.distillation.on_policy_share < 1
                    and not (
                        without_policy_loss
                        and ppo.n_samples_per_prompt == 1
                        and not self.environment.is_used
                        and not self.distillation.distill_policy_gradient
                    )
                ),
                (
                    "--offload_teacher_model needs --actor_zero_stage 3: only ZeRO-3 keeps "
                    "parameters in host memory"
                ): (self.teacher.offload_teacher_model and ppo.actor_zero_stage < 3),
                # episodes
                "--process_reward scores the steps of one answer, not of episodes; omit it": (
                    self.environment.is_used and self.rewards.process_reward is not None
                ),
                "--min_answer_seq_len is not for episodes: an action may be short; omit it": (
                    self.environment.is_used and ppo.min_answer_seq_len > 0
                ),
                (
                    f"--advantage_estimator {algorithm.advantage_estimator} compares scores of "
                    "whole episodes; use --turn_reward sum"
                ): (
                    self.environment.to_go_weight is not None
                    and algorithm.advantage_estimator in ("remax", "gdpo")
                ),
                (
                    f"--inference_tp_size {memory.inference_tp_size}: the ranks of a group would "
                    "each run the episodes of all; set it to 1"
                ): (self.environment.is_used and memory.inference_tp_size > 1),
                # memory
                (
                    f"--inference_tp_size {memory.inference_tp_size} divides the layers, and "
                    "--unpin_actor_parameters gathers each layer whole; use one of the two"
                ): (memory.inference_tp_size > 1 and ppo.unpin_actor_parameters),
                (
                    "--enable_mixed_precision_lora needs --actor_zero_stage 3, --actor_lora_dim "
                    "above 0 and --dtype fp16: DeepSpeed quantises only frozen fp16 weights of "
                    "ZeRO-3"
                ): (
                    memory.enable_mixed_precision_lora
                    and not (
                        ppo.actor_zero_stage == 3
                        and self.lora.actor_lora_dim > 0
                        and self.run.dtype == "fp16"
                    )
                ),
                (
                    "--offload needs "
                    f"{' and '.join(f'--{prefix}zero_stage' for prefix in self.stages)} 1, 2 or 3: "
                    "stage 0 keeps everything on the device"
                ): (ppo.offload and min(self.stages.values()) == 0),
            }
            | {
                (
                    f"--sequence_parallel_size {self.memory.sequence_parallel_size}: {what} needs "
                    "whole rows on a rank; use 1"
                ): (self.memory.sequence_parallel_size > 1 and holds)
                for what, holds in {
                    "--kl_estimator full": algorithm.kl_estimator == "full",
                    "--kl_loss_estimator full": algorithm.kl_loss_estimator == "full",
                    "a divergence from a teacher": self.distill_loss_coef > 0,
                }.items()
            }
        )
        has_reference = self.has_reference
        has_policy_loss = not without_policy_loss or self.teacher_gives_rewards
        require_used(
            algorithm,
            [
                (
                    has_policy_loss,
                    (
                        "a policy loss, which --advantage_estimator none has only with"
                        " --distill_policy_gradient"
                    ),
                    (
                        "policy_loss clip_eps clip_eps_low clip_eps_high dual_clip"
                        " high_entropy_share importance_correction off_policy_delta"
                    ),
                ),
            ],
        )
        of_loss = f"{'a teacher' if not self.distils else 'the loss of a divergence'} ({TEACHER})"
        require_used(
            self.teacher,
            [
                (self.distils, f"a teacher ({TEACHER})", "distill_coef"),
                (self.distill_loss_coef > 0, of_loss, "distill_loss distill_topk"),
            ],
        )
        require_used(
            self.distillation,
            [
                (self.distils, f"a teacher ({TEACHER})", "distill_on distill_policy_gradient"),
            ],
        )
        require_used(
            reference, [(has_reference, of_reference, "ref_model_name_or_path ref_sync_interval")]
        )
        require_used(
            ppo,
            [
                (has_reference, of_reference, "offload_reference_model"),
                (learned, "--use_reward_model", "offload_reward_model"),
            ],
        )
        super().__post_init__()
        if self.lora.share_base:
            self._require_shareable_base()

    def _require_shareable_base(self) -> None:
        ppo = self.ppo
        has_critic = self.algorithm.has_critic
        actor = ppo.actor_zero_stage
        critic = ppo.critic_zero_stage
        refuse(
            {
                (
                    "--share_base needs --only_optimize_lora: several models cannot share weights "
                    "that train"
                ): (not self.adapters.only_optimize_lora),
                "--share_base needs --actor_lora_dim above 0": self.lora.actor_lora_dim == 0,
                (
                    "--share_base: there is neither a critic nor a reward model that could use "
                    "the actor's base; omit it"
                ): (not has_critic and not self.rewards.use_reward_model),
                "--share_base needs --critic_lora_dim above 0": (
                    has_critic and self.lora.critic_lora_dim == 0
                ),
                (
                    "--share_base: ZeRO-3 partitions the base for both models or for none; set "
                    f"--actor_zero_stage {actor} and --critic_zero_stage {critic} both to 3 or "
                    "both below"
                ): (has_critic and (actor == 3) != (critic == 3)),
                (
                    "--share_base: the layers of the base have one dropout; set --actor_dropout "
                    "and --critic_dropout to the same value"
                ): (has_critic and (ppo.actor_dropout or 0.0) != (ppo.critic_dropout or 0.0)),
            }
        )

    @property
    def has_rewards(self) -> bool:
        """Whether a model, a function, a service or an environment scores answers."""
        return (
            self.rewards.use_reward_model
            or self.rewards.has_functions
            or self.environment.gives_reward
        )

    @property
    def distils(self) -> bool:
        """Whether the actor learns from a teacher."""
        return bool(self.teacher.teachers or self.distillation.teacher_prompt_column)

    @property
    def distill_coef(self) -> float:
        """The weight of the divergence from the teacher, as a loss or in advantages; 0 without a
        teacher."""
        if self.teacher.distill_coef is None:
            return float(self.distils)
        return self.teacher.distill_coef

    @property
    def distill_loss_coef(self) -> float:
        """The weight of the divergence as a loss; 0 if there is no such loss."""
        if self.distillation.distill_policy_gradient or not self.distils:
            return 0.0
        return self.distill_coef

    @property
    def teacher_gives_rewards(self) -> bool:
        """Whether the divergence from the teacher is in the advantages."""
        return self.distils and self.distillation.distill_policy_gradient

    @property
    def has_reference(self) -> bool:
        """Whether the reward or a loss compares with the reference."""
        return self.algorithm.has_reference or (self.distils and not self.teacher.teachers)

    @property
    def training(self) -> PPOFlags:
        return self.ppo

    @property
    def stages(self) -> dict[str, int]:
        stages: dict[str, int] = {
            "actor_": self.ppo.actor_zero_stage,
            "critic_": self.ppo.critic_zero_stage,
        }
        if self.algorithm.has_critic:
            return stages
        return {"actor_": self.ppo.actor_zero_stage}

    @property
    def step_data(self) -> StepData:
        return StepData(
            "prompt",
            self.data,
            self.ppo.max_prompt_seq_len,
            eval_paths=self.validation.eval_data_path,
            teacher_column=self.distillation.teacher_prompt_column,
            keeps_answers=self.distillation.on_policy_share < 1,
        )

    @property
    def models(self) -> dict[str, tuple[str, str]]:
        given = {
            "actor": self.ppo.actor_model_name_or_path,
            "critic": self.ppo.critic_model_name_or_path,
            "reward": self.rewards.reward_model_name_or_path,
            "ref": self.reference.ref_model_name_or_path,
        }
        named = {
            role: (f"--{role}_model_name_or_path", name) for role, name in given.items() if name
        }
        found = {"actor": ("--actor_model_name_or_path", self.ppo.actor_model_name_or_path)}
        if self.has_reference:
            found["reference"] = named.get("ref", found["actor"])
        if self.rewards.use_reward_model:
            reward = named.get("reward", named.get("critic"))
        else:
            reward = None
        if self.algorithm.has_critic:  # which gets a new head, if its model is the actor's
            found["critic"] = named.get("critic", reward or found["actor"])
        return found | ({} if reward is None else {"reward": reward}) | self.teacher.models

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
    def actor_base_is_frozen(self) -> bool:
        """Whether of the actor only an adapter trains, so that other models can use its weights."""
        return self.lora.actor_lora_dim > 0 and self.adapters.only_optimize_lora

    @property
    def aligns_overflow(self) -> bool:
        """Whether an fp16 overflow of actor or critic skips the update of both."""
        return self.ppo.align_overflow and self.run.dtype == "fp16" and self.algorithm.has_critic

    def idle(self) -> dict[str, str]:
        ppo = self.ppo
        algorithm = self.algorithm
        reasons = super().idle()
        if not algorithm.has_critic:
            names = ("critic_lora_dim", "critic_lora_module_name", "critic_lora_learning_rate")
            reasons |= dict.fromkeys(
                names, f"--advantage_estimator {algorithm.advantage_estimator} has no critic"
            )
        if (
            self.actor_base_is_frozen
            and ppo.actor_learning_rate != self.lora.actor_lora_learning_rate
        ):
            reasons["actor_learning_rate"] = (
                "only the actor's LoRA parameters train, with --actor_lora_learning_rate"
            )
        if not self.aligns_overflow:
            reasons["align_overflow"] = (
                "overflows are aligned only between two models trained in fp16"
            )
        if self.actor_base_is_frozen and not self.reference.ref_model_name_or_path:
            reasons["offload_reference_model"] = "the reference uses the actor's frozen weights"
        if self.lora.share_base:
            reasons["offload_reward_model"] = "the reward model uses the actor's frozen weights"
        if self.ppo_memory.inference_tp_size == 1:
            reasons["tp_gather_partition_size"] = "no layers are divided: --inference_tp_size is 1"
        return reasons

    @property
    def recompute_old_logprobs(self) -> bool:
        """Whether old log-probs come from a forward pass of the actor; if not, from sampling."""
        if self.ppo.old_logprobs == "auto":
            return self.run.dtype != "fp32" or self.algorithm.needs_training_logprobs
        return self.ppo.old_logprobs == "recompute"
