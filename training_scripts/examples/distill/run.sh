#!/usr/bin/env bash
# On-policy distillation: run.sh QUICKSTART_DIR OUTPUT_DIR [more flags of step 3]
# The student is the SFT model of the quickstart, and the teacher the actor that PPO made of it. The student answers, and
# learns the teacher's distribution at each token of its answers. No reward is used: `true_rule` only measures.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../../ranks.sh"
usage="usage: run.sh QUICKSTART_DIR OUTPUT_DIR [more flags]"
quickstart="${1:?$usage}" output="${2:?$usage}"
batch=$((RANKS < 32 ? 32 / RANKS : 1))

launch "$top/training/step3_ppo/main.py" \
    --actor_model_name_or_path "$quickstart/sft" \
    --teacher_model_name_or_path "$quickstart/ppo/actor" \
    --advantage_estimator none \
    --use_reward_model False \
    --data_path "$quickstart/toy/data/prompts.jsonl" \
    --data_split 0,0,1 \
    --eval_data_path "$quickstart/toy/data/heldout.jsonl" \
    --eval_reward_function dschat_ppo.tools.toy:true_rule \
    --eval_interval 2 \
    --save_best False \
    --max_prompt_seq_len 64 \
    --max_answer_seq_len 48 \
    --per_device_generation_batch_size "$batch" \
    --per_device_training_batch_size "$batch" \
    --actor_learning_rate 5e-4 \
    --num_warmup_steps 2 \
    --max_steps 12 \
    --dtype "$DTYPE" \
    --output_dir "$output" "${@:3}"
