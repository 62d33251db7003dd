"""What to use in place of a flag of another trainer, or of another of our steps: for the message
about an unknown flag. docs/from-trl.md and docs/from-openrlhf.md list all of them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from dschat_ppo.config.feature_flags import feature_notes

ROLES = ("actor_", "critic_")  # whose flags in step 3 are those of steps 1 and 2 with a prefix

# Names that other trainers (TRL 1.x, OpenRLHF 0.8 to 0.11, peft) and other steps give to settings.
# Our flags, of which a step may have only some -> their names for them, with _ for - and .
THEIR_NAMES = {
    "model_name_or_path": "pretrain",
    "actor_model_name_or_path": "sft_model_path",
    "critic_model_name_or_path reward_model_name_or_path": "reward_model_path reward_pretrain",
    "data_path": (
        "dataset dataset_name prompt_data prompt_dataset dataset_train_split dataset_split"
    ),
    "eval_data_path": "eval_dataset dataset_test_split",
    "preprocessing_num_workers": "dataset_num_proc",
    "chat_template": "chat_template_path tokenizer_chat_template",
    "prompt_column": "prompt_key",
    "train_on_prompt": "pretrain_mode pretrain_mode_enable",
    "truncation": "truncation_mode",
    "max_seq_len max_prompt_seq_len max_answer_seq_len": "max_length max_len",
    "packing": "packing_samples padding_free",
    "per_device_train_batch_size per_device_training_batch_size": (
        "micro_train_batch_size micro_batch_size"
    ),
    "per_device_training_batch_size": "per_device_train_batch_size",
    "per_device_generation_batch_size generation_batches": (
        "rollout_batch_size generation_batch_size steps_per_generation"
    ),
    "gradient_accumulation_steps": "train_batch_size num_mini_batches",
    "ppo_epochs num_train_epochs": "max_epochs",
    "num_train_epochs": "num_episodes",
    "ppo_epochs": "num_iterations num_ppo_epochs",
    "learning_rate": "adam_lr lr",
    "critic_learning_rate": "vf_coef value_loss_coef value_coef",
    "adam_epsilon": "adam_eps",
    "weight_decay": "l2",
    "lr_scheduler_type": "lr_scheduler",
    "max_grad_norm": "max_norm",
    "optimizer": "optim",
    "warmup_ratio": "lr_warmup_ratio",
    "num_warmup_steps": "warmup_steps",
    "n_samples_per_prompt": "num_generations",
    "max_answer_seq_len": "max_completion_length max_new_tokens response_length generate_max_len",
    "max_prompt_seq_len": "max_prompt_length prompt_max_len",
    "objective policy_loss loss_aggregation": "loss_type",
    "clip_eps": "epsilon eps_clip cliprange",
    "clip_eps_high": "epsilon_high",
    "value_clip_eps": "cliprange_value value_clip",
    "clip_eps_low clip_eps_high": "eps_clip_low_high",
    "dual_clip": "delta",
    "policy_loss": "policy_loss_type importance_sampling_level",
    "loss_aggregation": "loss_agg_mode",
    "sapo_tau_positive": "sapo_temperature_pos",
    "sapo_tau_negative": "sapo_temperature_neg",
    "critic_warmup_rollouts": "freezing_steps freezing_actor_steps",
    "gae_lambda": "lam lambd",
    "normalize_group_std group_std": "scale_rewards",
    "kl_loss_coef kl_coef": "beta",
    "kl_coef": "init_kl_coef kl_init_coef",
    "kl_loss_coef": "kl_use_loss use_kl_loss",
    "kl_straight_through": "use_bias_correction_kl kl_unbiased_gradient",
    "high_entropy_share": "top_entropy_quantile",
    "entropy_coef": "entropy_loss_coef",
    "entropy_delta": "entropy_coef_delta",
    "entropy_target": "use_adaptive_entropy",
    "importance_correction": (
        "vllm_importance_sampling_correction enable_vllm_is_correction is_correction_enable"
        " is_correction_level"
    ),
    "importance_mode": (
        "vllm_importance_sampling_mode vllm_is_correction_type is_correction_mode"
        " is_correction_type is_correction_gating icepop use_icepop enable_icepop tis use_tis"
    ),
    "importance_cap": "vllm_importance_sampling_clip_max vllm_importance_sampling_cap",
    "importance_floor": "vllm_importance_sampling_clip_min",
    "importance_floor importance_cap": (
        "is_correction_threshold vllm_is_truncated_threshold icepop_threshold"
    ),
    "off_policy_delta": "off_policy_mask_threshold",
    "reward_function": "reward_funcs reward_weights",
    "reward_clip": "reward_clip_range",
    "normalize_rewards": "normalize_reward reward_normalize_enable",
    "overlong_buffer": "overlong_buffer_len",
    "overlong_penalty": "overlong_penalty_factor",
    "missing_eos_penalty": "stop_properly_penalty_coef",
    "mask_truncated_answers": "mask_truncated_completions",
    "stop_strings stop_token_ids": "stop_token stop_token_id",
    "max_steps": "total_episodes",
    "nll_coef": "nll_loss_coef loss_weights",
    "kto_desirable_weight": "desirable_weight",
    "kto_undesirable_weight": "undesirable_weight",
    "center_rewards_coef": "center_rewards_coefficient",
    "offload_activations": "activation_offloading",
    "offload_optimizer": "adam_offload",
    "zero_hpz_partition_size": "zpg",
    "gradient_checkpointing": "gradient_checkpointing_enable",
    "deterministic": "full_determinism full_determinism_enable",
    "dtype": "param_dtype",
    "save_hf_steps": "save_hf save_hf_ckpt",
    "save_total_limit": "max_num max_ckpt_num",
    "sample_interval": "num_sample_generations",
    "print_answers": "log_completions",
    "remote_reward_url reward_function": "remote_url remote_rm_url",
    "output_dir": "save_path ckpt_path",
    "resume": "resume_from_checkpoint load_checkpoint load_enable",
    "eval_interval": "eval_steps eval_strategy",
    "metric_for_best": "load_best_model_at_end metric_for_best_model",
    "save_best": "best_metric_key",
    "early_stop_patience": "early_stopping_patience early_stopping_steps",
    "early_stop_min_delta": "early_stopping_threshold",
    "report_to": "use_wandb wandb_key use_tensorboard",
    "tensorboard_path": "tensorboard_dir",
    # whose last words mean something else
    "offload_reference_model": "ref_offload",
    "offload_reward_model": "reward_offload",
    "micro_batch_tokens": (
        "rollout_micro_batch_size micro_rollout_batch_size local_rollout_forward_batch_size"
        " max_tokens_per_gpu"
    ),
    "eval_samples": "num_generations_eval eval_n_samples_per_prompt",
    # our other steps
    "max_prompt_seq_len max_answer_seq_len": "max_seq_len",
    "max_seq_len": "max_prompt_seq_len max_answer_seq_len",
    "eval_batch_size": "per_device_eval_batch_size",
    "per_device_eval_batch_size": "eval_batch_size",
}
for notes in feature_notes():
    THEIR_NAMES |= notes.their_names
OUR_NAMES = {name: ours for ours, theirs in THEIR_NAMES.items() for name in theirs.split()}

# Their name -> how their number differs from ours; {micro_batch} is the step's flag for it.
REMARKS = {
    "train_batch_size": (
        "theirs is the total of an optimizer step: divide it by {micro_batch} and by the ranks"
    ),
    "rollout_batch_size": (
        "theirs is the total of prompts: the product of these two and of the ranks"
    ),
    **dict.fromkeys(
        ("generation_batch_size", "steps_per_generation"),
        "theirs count responses of all ranks, these two count prompts of a rank",
    ),
    "num_mini_batches": (
        "theirs are the optimizer steps of a PPO step: divide a rank's responses of a PPO step by"
        " them and by {micro_batch}"
    ),
    **dict.fromkeys(
        (
            "rollout_micro_batch_size",
            "micro_rollout_batch_size",
            "local_rollout_forward_batch_size",
        ),
        "tokens of a forward pass, not rows",
    ),
    "total_episodes": "PPO steps, not episodes",
    **dict.fromkeys(
        ("vf_coef", "value_loss_coef", "value_coef"),
        "the critic has an optimizer of its own, so its loss has no coefficient",
    ),
    **dict.fromkeys(
        ("icepop", "use_icepop", "enable_icepop"),
        "IcePop is --importance_correction token --importance_mode mask",
    ),
    **dict.fromkeys(
        ("tis", "use_tis"), "TIS is --importance_correction token --importance_mode truncate"
    ),
}

_FEWER = "to try a few steps, use --max_steps, or fewer rows: --data_path DATA@ROWS"
ADVICE = {  # their name -> the whole answer
    "max_train_steps": "did you mean --max_steps?",
    **dict.fromkeys(("max_train_samples", "max_samples"), _FEWER),
    **{name: f"use --dtype {name}" for name in ("bf16", "fp16")},
    **{
        name: (
            f"it is a flag of the launcher, before the program: deepspeed --{name} N training/...,"
            " or of dschat-ppo"
        )
        for name in ("num_accelerators", "num_gpus")
    },
}

_OF_CRITIC = ("value_clip_eps", "gae_lambda")  # besides those that begin with critic_


def trains_critic(words: Sequence[str]) -> bool:
    """Whether the words of a command line leave the estimator `gae`, the only one with a critic.
    The flag may have another trainer's name, such as --algo.advantage.estimator."""
    estimator = "gae"
    for position, word in enumerate(words):
        flag, equals, value = word.partition("=")
        name = flag.replace("-", "_").replace(".", "_")
        if name.endswith("advantage_estimator"):
            if not equals:
                value = "".join(words[position + 1 : position + 2])  # "" at the end
            estimator = value
    return estimator == "gae"


def what_to_use(
    given: str, step: str, flags_of_steps: Mapping[str, Collection[str]], trains_critic: bool
) -> str:
    """The answer to the unknown flag `given`, without dashes at its start and with _ for -, of a
    step, a key of `flags_of_steps`; "" if nothing is known about it."""
    for name in _names_of(given):
        if name in ADVICE:
            return ADVICE[name]
    known = flags_of_steps[step]
    our_flags = flags_for(given, known)
    if our_flags and not trains_critic:
        our_flags = [flag for flag in our_flags if not _is_of_critic(flag)]
        if not our_flags:
            return "is for a critic, which only --advantage_estimator gae trains; omit it"
    if our_flags:
        micro_batch = "training"
        if "per_device_train_batch_size" in known:
            micro_batch = "train"
        remarks = [REMARKS[name] for name in _names_of(given) if name in REMARKS]
        remark = ""
        if remarks:
            text = remarks[0].format(micro_batch=f"--per_device_{micro_batch}_batch_size")
            remark = f" ({text})"
        return f"use {' and '.join(f'--{flag}' for flag in our_flags)}{remark}"
    steps = [f"dschat-{name}" for name, flags in flags_of_steps.items() if given in flags]
    if steps:
        return f"is a flag of {' and '.join(steps)}"
    return ""


def _is_of_critic(flag: str) -> bool:
    return flag.startswith("critic_") or flag in _OF_CRITIC


def _names_of(given: str) -> Iterator[str]:
    """`a.b.c` as `a_b_c`, `b_c` and `c`."""
    words = given.split(".")
    for first in range(len(words)):
        yield "_".join(words[first:])


def flags_for(given: str, known: Collection[str]) -> list[str]:
    """The flags among `known`, those of a step, for a setting of another step or trainer; [] if
    none is known. `given` has _ for -; OpenRLHF's names have dots, as in
    "rollout.n_samples_per_prompt"."""
    for name in _names_of(given):
        if name in known:
            return [name]
        role = next((role for role in ROLES if name.startswith(role)), "")
        without_role = name.removeprefix(role)
        our_names = OUR_NAMES.get(name, OUR_NAMES.get(without_role, without_role)).split()
        flags = []
        for our_name in our_names:
            candidates = [our_name, *(prefix + our_name for prefix in ROLES)]
            flags += [flag for flag in candidates if flag in known]
        if flags:
            of_role = [flag for flag in flags if role and flag.startswith(role)]
            return of_role or flags
    return []
