#!/usr/bin/env bash
# GRPO with the numeric rule: MODEL=... DATA=... run_grpo.sh OUTPUT_DIR [more flags of step 3]
# MODEL  the output of run_sft.sh
# DATA   see task.sh. Questions with more tokens than --max_prompt_seq_len are dropped.
# An answer scores 1 if its number is right, and 0.2 more if it ends with "#### NUMBER".
set -euo pipefail
usage="usage: MODEL=... DATA=... run_grpo.sh OUTPUT_DIR [more flags]"
source "$(dirname "${BASH_SOURCE[0]}")/task.sh"
model="${MODEL:?$usage}" output="${1:?$usage}"
shift

launch "$top/training/step3_ppo/main.py" \
    --actor_model_name_or_path "$model" \
    --data_path "$train_rows" \
    --data_split 0,0,1 \
    --eval_data_path "$heldout_rows" \
    --eval_interval 20 \
    --eval_samples 4 \
    "${prompts[@]}" \
    --use_reward_model False \
    "${rewards[@]}" \
    --advantage_estimator grpo \
    --n_samples_per_prompt 8 \
    --kl_loss_coef 0.001 \
    --max_prompt_seq_len 256 \
    --max_answer_seq_len 256 \
    --per_device_generation_batch_size $((2 * $(per_rank 16))) \
    --per_device_training_batch_size 8 \
    --gradient_accumulation_steps "$(per_rank 16)" \
    --actor_learning_rate 1e-6 \
    --num_warmup_steps 10 \
    --actor_zero_stage 3 \
    --dtype "$DTYPE" \
    --output_dir "$output" "$@"
