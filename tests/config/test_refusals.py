"""Flags that contradict each other, or have no effect with the others, are refused before anything is loaded."""

import pytest
from command_lines import read

from dschat_ppo.errors import UserError

GRPO = "--advantage_estimator grpo --n_samples_per_prompt 2"
LORA = "--actor_lora_dim 4 --critic_lora_dim 4 --only_optimize_lora"
FUNCTION = "--use_reward_model False --reward_function exact_match"
CASES: list[tuple[str, str | list[str], str]] = [  # step, what is given, a part of the message
    # schedule and reference
    ("sft", "--warmup_ratio 0.1 --num_warmup_steps 5", "--warmup_ratio 0.1 and --num_warmup_steps 5 both set"),
    ("ppo", "--warmup_ratio 0.1 --num_warmup_steps 5", "--warmup_ratio 0.1 and --num_warmup_steps 5 both set"),
    ("reward", "--warmup_ratio 0.1 --lr_scheduler_type constant", "--lr_scheduler_type constant has no warm-up"),
    ("sft", "--min_lr_ratio 0.1 --lr_scheduler_type constant", "--lr_scheduler_type constant does not decay"),
    ("ppo", "--min_lr_ratio 0.1 --lr_scheduler_type constant_with_warmup", "constant_with_warmup does not decay"),
    ("ppo", "--kl_coef 0 --ref_model_name_or_path r", "--ref_model_name_or_path: there is no reference"),
    ("ppo", "--kl_coef 0 --ref_sync_interval 2", "--ref_sync_interval: there is no reference"),
    ("ppo", "--ref_sync_mixup 0.5", "--ref_sync_mixup has no effect without --ref_sync_interval"),
    ("ppo", "--ref_sync_interval 2 --ref_sync_mixup 0", "--ref_sync_mixup must be above 0 and at most 1"),
    ("ppo", "--ref_sync_interval 2 --ref_sync_mixup 1.1", "--ref_sync_mixup must be above 0 and at most 1"),
    ("ppo", "--ref_sync_interval 2 --actor_lora_dim 4 --only_optimize_lora", "--ref_sync_interval mixes"),
    # one base of all models
    ("ppo", "--share_base --actor_lora_dim 4 --critic_lora_dim 4", "--only_optimize_lora"),
    ("ppo", "--share_base --critic_lora_dim 4 --only_optimize_lora", "--actor_lora_dim above 0"),
    ("ppo", "--share_base --actor_lora_dim 4 --only_optimize_lora", "--critic_lora_dim above 0"),
    ("ppo", f"--share_base {LORA} --actor_zero_stage 3", "--actor_zero_stage 3 and --critic_zero_stage 0 both"),
    ("ppo", f"--share_base {LORA} --critic_dropout 0.1", "--actor_dropout and --critic_dropout to the same value"),
    ("ppo", f"--share_base {LORA} {GRPO} {FUNCTION}", "neither a critic"),
    # several groups
    ("ppo", "--advantage_estimator grpo",
     "--advantage_estimator grpo compares the answers to one prompt: set --n_samples"),
    ("ppo", "--dynamic_sampling",
     "--dynamic_sampling compares the answers to one prompt: set --n_samples_per_prompt to 2"),
    ("ppo", "--old_logprobs rollout --importance_correction token",
     "--old_logprobs rollout skips the forward pass that"),
    ("ppo", "--overlong_buffer 257", "--overlong_buffer 257 is above --max_answer_seq_len 256"),
    ("ppo", "--kl_coef 0 --offload_reference_model --actor_zero_stage 3",
     "--offload_reference_model: there is no reference"),
    ("ppo", f"{FUNCTION} --offload_reward_model --critic_zero_stage 3", "--offload_reward_model: there is no"),
    ("ppo", f"{FUNCTION} --normalize_rewards model", "--normalize_rewards model needs a learned reward"),
    # memory
    ("ppo", "--offload", "--actor_zero_stage and --critic_zero_stage"),
    ("ppo", "--offload --actor_zero_stage 3", "--actor_zero_stage and --critic_zero_stage"),
    ("ppo", "--offload_reference_model", "--actor_zero_stage 3"),
    ("ppo", "--offload_reference_model --critic_zero_stage 3", "--actor_zero_stage 3"),
    ("ppo", "--offload_reward_model --actor_zero_stage 3", "--critic_zero_stage 3"),
    ("ppo", "--enable_test_mode", "--test_stop_step"),
    ("ppo", "--offload_optimizer", "--actor_zero_stage and --critic_zero_stage 1, 2 or 3"),
    ("ppo", "--offload_optimizer --actor_zero_stage 2", "--actor_zero_stage and --critic_zero_stage 1, 2 or 3"),
    ("ppo", "--inference_tp_size 2 --unpin_actor_parameters", "use one of the two"),
    ("ppo", "--zero_hpz_partition_size 2",
     "--zero_hpz_partition_size (ZeRO++) needs --actor_zero_stage or --critic_zero_stage 3"),
    ("ppo", "--enable_mixed_precision_lora", "--actor_zero_stage 3, --actor_lora_dim above 0 and --dtype fp16"),
    ("ppo", "--kl_estimator full --old_logprobs recompute --sequence_parallel_size 2",
     "--kl_estimator full would gather"),
    ("ppo", "--kl_loss_coef 0.1 --kl_loss_estimator full --sequence_parallel_size 2",
     "--kl_loss_estimator full would gather"),
    # data
    ("sft", "--input_template Question:", "must contain {}"),
    ("sft", ["--input_template", "Q: {}\\nA:"], "backslash and the letter n; in bash, $'...'"),
    ("sft", ["--chat_template_kwargs", "[" * 9999], "--chat_template_kwargs is not JSON"),
    ("sft", "--answer_column a --answer_pattern ####", "needs a group"),
    ("sft", "--answer_column a --answer_pattern (x", "--answer_pattern"),
    ("sft", ["--prompt_column", ""], "--prompt_column is empty"),
    # health
    ("ppo", "--health window=1", "--health window=1: window takes a whole number of 2 or more"),
    ("sft", "--health window=off", "window takes a whole number of 2 or more"),
    ("ppo", "--health gradient_explodes=inf", "takes 1 or above, or off"),
    ("ppo", "--health entropy_collapse=0", "takes 1 or above, or off"),
    ("sft", "--health overfitting=0", "takes whole numbers of 1 or above, or off"),
    ("ppo", "--health reward_faults=-0.1", "takes 0 or above, or off"),
    ("ppo", "--health reward_faults=nan", "takes 0 or above"),
    ("ppo", "--health kl_spike", "kl_spike takes a number, or off"),
    ("ppo", "--health kl_negative=0.02", "takes 0 or below, or off"),
    ("ppo", "--health logprob_diff_high=-1", "takes 0 or above"),
    ("ppo", "--health critic_lags=2", "critic_lags takes off"),
    ("ppo", "--health kl_spikes=1", "there is no rule 'kl_spikes'; did you mean kl_spike?"),
    ("sft", "--health kl_spike=1", "there is no rule 'kl_spike'; there are: window, loss_grows, overfitting"),
    # algorithm
    ("ppo", "--policy_loss reinforce --clip_eps 0.3", "--clip_eps 0.3 has no effect: it is for --policy_loss ppo or"),
    ("ppo", "--policy_loss kl_cov --clip_eps_high 0.3", "--clip_eps_high 0.3 has no effect"),
    ("ppo", "--sapo_tau_negative 2.0", "it is for --policy_loss sapo"),
    ("ppo", "--covariance_share 0.1", "it is for --policy_loss clip_cov or kl_cov"),
    ("ppo", "--policy_loss cispo --dual_clip 3.0", "--dual_clip 3.0 has no effect"),
    ("ppo", "--advantage_estimator grpo --gae_lambda 1.0", "it is for --advantage_estimator gae"),
    ("ppo", "--advantage_estimator rloo --gamma 0.9", "--gamma 0.9 has no effect"),
    ("ppo", "--advantage_estimator grpo --whiten_advantages False", "--whiten_advantages False has no effect"),
    ("ppo", "--normalize_group_std False", "it is for --advantage_estimator grpo or grpo_pass_at_k"),
    ("ppo", "--kl_coef 0.0 --kl_target 0.1", "--kl_target 0.1 has no effect: it is for a --kl_coef above 0"),
    ("ppo", "--advantage_estimator grpo --kl_target 0.1",
     "--kl_target 0.1 has no effect: it is for a --kl_coef above 0 (for grpo it is 0 unless given)"),
    ("ppo", "--advantage_estimator gpg --kl_estimator k3", "above 0 (for gpg it is 0 unless given)"),
    ("ppo", "--kl_horizon 5", "it is for --kl_target"),
    ("ppo", "--kl_loss_estimator k2", "it is for --kl_loss_coef above 0"),
    ("ppo", "--kl_loss_coef 0.1 --kl_loss_estimator full --kl_straight_through False", "a KL loss k1, k3 or abs"),
    ("ppo", "--kl_coef 0.0 --kl_estimator full", "it is for --kl_coef above 0"),
    ("ppo", "--importance_cap 3.0", "it is for --importance_correction"),
    ("ppo", "--importance_correction token --importance_cap 0.5", "--importance_cap must be above 1"),
    ("ppo", "--entropy_delta 0.1", "it is for --entropy_target"),
    ("ppo", "--entropy_target 1.0 --entropy_coef 2.0", "--entropy_coef 2.0 is above --entropy_coef_max 1.0"),
    ("ppo", "--overlong_penalty 2.0", "it is for --overlong_buffer"),
    ("ppo", "--dynamic_sampling_rounds 2", "it is for --dynamic_sampling"),
    # evaluation
    ("ppo", "--eval_batch_size 8", "--eval_batch_size: has no effect without --eval_data_path"),
    ("ppo", "--eval_pass_score 0.5", "--eval_pass_score: has no effect without --eval_data_path"),
    ("ppo", "--save_best False", "--save_best: has no effect without --eval_data_path"),
    ("ppo", "--validate_only", "--validate_only needs held-out prompts: give --eval_data_path"),
    ("ppo", "--eval_data_path e --eval_greedy --eval_samples 2",
     "--eval_greedy gives the same answer every time: omit --eval_samples"),
    # rewards
    ("ppo", f"--process_reward min {FUNCTION}", "--process_reward has no effect with --use_reward_model False"),
    ("ppo", "--process_reward last --normalize_rewards model", "use --normalize_rewards running"),
    # LoRA
    ("sft", "--lora_dim 8 --only_optimize_lora --load_in_4bit --load_in_8bit",
     "--load_in_4bit and --load_in_8bit: use one of the two"),
    # objectives
    ("reward", "--objective dpo_nll --nll_coef 0", "--nll_coef must be above 0 for --objective dpo_nll"),
    *[("reward", f"--objective {objective} --label_smoothing {share}",
       f"--label_smoothing must be above 0 and below 0.5 for --objective {objective}")
      for objective in ("cdpo", "robust_dpo") for share in ("0", "0.5", "0.9")],
]  # fmt: skip


@pytest.mark.parametrize(("step", "given", "message"), CASES)
def test_flags_that_do_not_go_together_are_refused(step, given, message):
    with pytest.raises(UserError) as problem:
        read(step, *(given.split() if isinstance(given, str) else given))
    assert message in str(problem.value) and "\n" not in str(problem.value)
