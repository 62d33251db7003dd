#!/usr/bin/env bash
# Step 2 on the embedded task: run_step2_reward.sh TOY_DIR SFT_DIR OUTPUT_DIR [more flags]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../ranks.sh"
usage="usage: run_step2_reward.sh TOY_DIR SFT_DIR OUTPUT_DIR [more flags]"
toy="${1:?$usage}" sft="${2:?$usage}" output="${3:?$usage}"
shift 3

launch "$top/training/step2_reward/main.py" \
    --model_name_or_path "$sft" \
    --data_path "$toy/data/pairs.jsonl" \
    --data_split 0,1,0 \
    --eval_data_path "$toy/data/pairs_eval.jsonl" \
    --max_seq_len 128 \
    --per_device_train_batch_size $((RANKS < 32 ? 32 / RANKS : 1)) \
    --per_device_eval_batch_size 64 \
    --learning_rate 5e-4 \
    --max_steps 20 \
    --num_warmup_steps 5 \
    --zero_stage 3 \
    --dtype "$DTYPE" \
    --output_dir "$output" "$@"
