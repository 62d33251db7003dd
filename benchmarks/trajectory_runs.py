"""The training runs of `trajectories.py`."""

from __future__ import annotations

from dataclasses import dataclass

# A reward with few values, so that answers to one prompt are often equal and dynamic sampling has something to drop.
SCORES = """def vowels(response: str) -> float:
    share = sum(letter in "aeiou" for letter in response) / (1 + len(response))
    return round(10 * share) / 2
"""


@dataclass(frozen=True)
class Run:
    """One command. `{made}` in `flags` is the folder of models and data; `resumed` names checkpoints to resume from."""

    script: str
    flags: str
    ranks: int = 2
    needs: tuple[str, ...] = ()
    resumed: tuple[str, ...] = ()


FIT = "--max_seq_len 128 --per_device_eval_batch_size 64 --zero_stage 3 --num_warmup_steps 5"
SFT = (
    f"--model_name_or_path {{made}}/toy/model --data_path {{made}}/toy/data/sft.jsonl --data_split 1,5,4 {FIT} "
    "--eval_data_path {made}/toy/data/sft_eval.jsonl --per_device_train_batch_size 32 --learning_rate 2e-3 "
    "--num_train_epochs 2 --dtype bf16"
)
PAIRS = (
    f"--model_name_or_path {{made}}/sft --data_path {{made}}/toy/data/pairs.jsonl --data_split 4,1,5 {FIT} "
    "--eval_data_path {made}/toy/data/pairs_eval.jsonl --per_device_train_batch_size 16 --num_train_epochs 1"
)
DPO = (
    "--learning_rate 1e-3 --dtype fp32 --dropout 0.1 --gradient_checkpointing --lr_scheduler_type linear "
    "--weight_decay 0.01 --eval_interval 4 --eval_iters 1 --save_steps 3 --save_total_limit 9 "
    "--keep_final_checkpoint"
)
STEP3 = (
    "--actor_model_name_or_path {made}/sft --critic_model_name_or_path {made}/reward --data_split 0,0,1 "
    "--data_path {made}/toy/data/prompts.jsonl --max_prompt_seq_len 64 --enable_test_mode --actor_zero_stage 3 "
    "--critic_zero_stage 3"
)
PPO = (
    "--max_answer_seq_len 48 --per_device_generation_batch_size 32 --per_device_training_batch_size 16 --ppo_epochs 2 "
    "--actor_learning_rate 1.5e-4 --critic_learning_rate 2e-4 --num_warmup_steps 2 --dtype bf16 --test_stop_step 3"
)
EVERY_UPDATE = "--save_minutes 0.00001 --save_total_limit 99 --keep_final_checkpoint"
GAE = (
    "--dtype fp32 --test_stop_step 4 --max_answer_seq_len 20 --per_device_generation_batch_size 4 "
    "--generation_batches 2 --n_samples_per_prompt 2 --per_device_training_batch_size 8 --ppo_epochs 2 "
    "--actor_learning_rate 1e-3 --critic_learning_rate 1e-3 --num_warmup_steps 0 --lr_scheduler_type linear "
    "--actor_dropout 0.1 --critic_dropout 0.1 --kl_target 0.05 --kl_horizon 200 --entropy_target 3 --entropy_coef 0.01 "
    "--normalize_rewards running --enable_ema --ema_decay 0.9 --sleep_in_rollout --actor_gradient_checkpointing "
    "--temperature 0.9 --top_p 0.95 --missing_eos_penalty 0.5 --critic_weight_decay 0.01 --save_best True "
    "--eval_data_path {made}/toy/data/heldout.jsonl --eval_interval 2 --eval_max_prompts 16 --eval_samples 2"
)
FUNCTION = (
    "--actor_model_name_or_path {made}/sft --data_path {made}/toy/data/prompts.jsonl --data_split 0,0,1 "
    "--use_reward_model False --reward_function {made}/scores.py:vowels --reward_timeout 600 --reward_workers 1 "
    "--max_prompt_seq_len 64 --max_answer_seq_len 20 --enable_test_mode --test_stop_step 4 --ppo_epochs 2 "
    "--actor_learning_rate 5e-4 --num_warmup_steps 1"
)
GRPO = (
    "--advantage_estimator grpo --n_samples_per_prompt 4 --dynamic_sampling --dtype bf16 --actor_zero_stage 2 "
    "--unsupervised_dataset_name {made}/plain.jsonl --unsup_coef 0.1 --kl_coef 0.1 --kl_estimator k3 "
    "--per_device_generation_batch_size 4 --per_device_training_batch_size 8 --actor_dropout 0.1 --enable_ema"
)
RUNS = {
    "sft": Run("step1_sft", SFT),
    "reward": Run("step2_reward", f"{PAIRS} --learning_rate 5e-4 --dtype bf16", needs=("sft",)),
    "ppo": Run("step3_ppo", f"{STEP3} {PPO}", needs=("sft", "reward")),
    "gae": Run(
        "step3_ppo", f"{STEP3} {GAE} {EVERY_UPDATE}", needs=("sft", "reward"),
        resumed=("step_000001_update_0003", "step_000002"),
    ),
    "grpo": Run(
        "step3_ppo", f"{FUNCTION} {GRPO} {EVERY_UPDATE}", needs=("sft",),
        resumed=("step_000001_update_0002", "step_000003"),
    ),
    "dpo": Run("step2_dpo", f"{PAIRS} {DPO}", needs=("sft",), resumed=("step_000003",)),
}  # fmt: skip
ONE_RANK = {
    "gae": "--dtype fp32 --critic_learning_rate 1e-2 --critic_warmup_rollouts 1 --value_clip_eps 0 --gae_lambda 0.9 "
    "--gamma 0.99 --whiten_advantages False --mask_truncated_answers --clip_eps_low 0.1 --clip_eps_high 0.3 "
    "--target_kl 0.0005 --kl_coef 0.05 --generation_batches 2",
    "dr_grpo": "--dtype bf16 --policy_loss cispo --kl_loss_coef 0.1 --importance_correction token --importance_cap 1.5 "
    "--off_policy_delta 0.001 --top_k 9 --min_answer_seq_len 2",
    "rloo": "--dtype fp32 --policy_loss reinforce --kl_loss_coef 0.1 --kl_loss_estimator full --kl_coef 0.1 "
    "--kl_estimator full --normalize_rewards running --loss_aggregation seq_mean_token_sum --overlong_buffer 3 "
    "--overlong_penalty 0.5 --max_grad_norm 0.1",
    "reinforce_plus_plus": "--dtype fp32 --policy_loss clip_cov --covariance_share 0.3 "
    "--dual_clip 1.2 --high_entropy_share 0.6 --gamma 0.95 --kl_estimator abs --rollout_engine padded",
    "reinforce_plus_plus_baseline": "--dtype bf16 --policy_loss kl_cov --covariance_share 0.2 "
    "--entropy_coef 0.01 --reward_clip 0.5 --stop_strings the --repetition_penalty 1.1",
    "remax": "--dtype fp32 --kl_loss_coef 0.2 --kl_loss_estimator k1 --kl_straight_through False --kl_coef 0.1 "
    "--kl_estimator k2 --max_log_ratio 0.2 --old_logprobs recompute --min_p 0.02",
    "opo": "--dtype fp32 --policy_loss sapo --sapo_tau_positive 0.8 --sapo_tau_negative 1.2 --adam_beta1 0.8 "
    "--gradient_accumulation_steps 2 --seed 7",
    "gpg": "--dtype fp32 --policy_loss gmpo --clip_eps 0.05 --loss_aggregation constant --actor_weight_decay 0.1 "
    "--micro_batch_tokens 64",
    "grpo_pass_at_k": "--dtype bf16 --policy_loss gspo --clip_eps 0.01 --importance_correction sequence "
    "--importance_mode mask --importance_cap 1.2 --normalize_group_std False --kl_coef 0.05",
}
RUNS |= {
    f"one_rank_{estimator}": Run(
        "step3_ppo",
        f"{FUNCTION} --advantage_estimator {estimator} --n_samples_per_prompt 4 --per_device_generation_batch_size 8 "
        f"--per_device_training_batch_size 16 {flags}",
        ranks=1,
        needs=("sft",),
    )
    for estimator, flags in ONE_RANK.items()
}
