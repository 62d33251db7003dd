#!/usr/bin/env bash
# GRPO with a rule as the reward: run_grpo_addition.sh OUT_DIR [more flags of step 3]
# Creates the task of two-digit addition and its SFT model (the next run reuses both), then trains without a reward model
# and without a critic. An answer that equals the row's `answer` column scores 1, any other 0.
# SFT_FLAGS in the environment: more flags of SFT.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../ranks.sh"
out="${1:?usage: run_grpo_addition.sh OUT_DIR [more flags of step 3]}"
shift
per_rank() { echo $((RANKS < $1 ? $1 / RANKS : 1)); } # per_rank COUNT: COUNT divided by the number of ranks, at least 1

if [ ! -e "$out/toy/model/model.safetensors" ]; then
    python "$top/training_scripts/toy/addition.py" "$out/toy"
fi

if ! is_valid_json "$out/sft/result.json"; then
    DSCHAT_PPO_NO_NEXT=1 bash "$top/training_scripts/toy/run_sft_addition.sh" "$out/toy" "$out/sft" ${SFT_FLAGS:-}
fi

launch "$top/training/step3_ppo/main.py" \
    --actor_model_name_or_path "$out/sft" \
    --data_path "$out/toy/data/prompts.jsonl" \
    --data_split 0,0,1 \
    --eval_data_path "$out/toy/data/heldout.jsonl" \
    --eval_interval 10 \
    --use_reward_model False \
    --reward_function exact_match \
    --advantage_estimator grpo \
    --n_samples_per_prompt 8 \
    --policy_loss ppo \
    --max_prompt_seq_len 6 \
    --max_answer_seq_len 4 \
    --per_device_generation_batch_size "$(per_rank 32)" \
    --per_device_training_batch_size "$(per_rank 64)" \
    --actor_learning_rate 3e-4 \
    --num_warmup_steps 2 \
    --actor_zero_stage 3 \
    --dtype "$DTYPE" \
    --output_dir "$out/grpo" "$@"
