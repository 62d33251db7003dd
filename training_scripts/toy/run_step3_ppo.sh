#!/usr/bin/env bash
# Step 3 on the embedded task: run_step3_ppo.sh TOY_DIR SFT_DIR REWARD_DIR OUTPUT_DIR [more flags]
# The true rule scores the evaluations; training sees the learned reward alone. Advantages are not whitened: once nearly
# all answers are kind, whitening would make the noise of their scores as large as the difference of kind and curt was.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../ranks.sh"
usage="usage: run_step3_ppo.sh TOY_DIR SFT_DIR REWARD_DIR OUTPUT_DIR [more flags]"
toy="${1:?$usage}" sft="${2:?$usage}" reward="${3:?$usage}" output="${4:?$usage}"
shift 4
micro_batch=$((RANKS < 32 ? 32 / RANKS : 1))

launch "$top/training/step3_ppo/main.py" \
    --actor_model_name_or_path "$sft" \
    --critic_model_name_or_path "$reward" \
    --data_path "$toy/data/prompts.jsonl" \
    --data_split 0,0,1 \
    --eval_data_path "$toy/data/heldout.jsonl" \
    --eval_reward_function dschat_ppo.tools.toy:true_rule \
    --eval_interval 3 \
    --save_best False \
    --reward_workers 1 \
    --max_prompt_seq_len 64 \
    --max_answer_seq_len 48 \
    --per_device_generation_batch_size $((2 * micro_batch)) \
    --per_device_training_batch_size "$micro_batch" \
    --max_steps 9 \
    --reward_clip 10 \
    --kl_coef 1 \
    --whiten_advantages False \
    --ppo_epochs 2 \
    --actor_learning_rate 2e-4 \
    --critic_learning_rate 5e-4 \
    --num_warmup_steps 2 \
    --actor_zero_stage 3 \
    --critic_zero_stage 3 \
    --dtype "$DTYPE" \
    --output_dir "$output" "$@"
