#!/usr/bin/env bash
# Step 1 on the embedded task: run_step1_sft.sh TOY_DIR OUTPUT_DIR [more flags]
# For your own model and data, copy this file and change the paths and numbers.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../ranks.sh"
usage="usage: run_step1_sft.sh TOY_DIR OUTPUT_DIR [more flags]"
toy="${1:?$usage}" output="${2:?$usage}"
shift 2

launch "$top/training/step1_sft/main.py" \
    --model_name_or_path "$toy/model" \
    --data_path "$toy/data/sft.jsonl" \
    --data_split 1,0,0 \
    --eval_data_path "$toy/data/sft_eval.jsonl" \
    --max_seq_len 128 \
    --per_device_train_batch_size $((RANKS < 32 ? 32 / RANKS : 1)) \
    --per_device_eval_batch_size 64 \
    --learning_rate 3e-3 \
    --max_steps 200 \
    --num_warmup_steps 20 \
    --zero_stage 3 \
    --dtype "$DTYPE" \
    --output_dir "$output" "$@"
