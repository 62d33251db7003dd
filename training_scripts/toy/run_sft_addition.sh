#!/usr/bin/env bash
# SFT on two-digit addition: run_sft_addition.sh TOY_DIR OUTPUT_DIR [more flags]
# TOY_DIR comes from `python training_scripts/toy/addition.py`. About a third of the answers sampled from the result are right.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../ranks.sh"
usage="usage: run_sft_addition.sh TOY_DIR OUTPUT_DIR [more flags]"
toy="${1:?$usage}" output="${2:?$usage}"
shift 2

echo "note: most SFT answers are wrong on purpose (digits reversed, 37+48=58 for 85): GRPO then learns the right order"
launch "$top/training/step1_sft/main.py" \
    --model_name_or_path "$toy/model" \
    --data_path "$toy/data/sft.jsonl" \
    --data_split 1,0,0 \
    --eval_fraction 0.01 \
    --max_seq_len 10 \
    --per_device_train_batch_size $((RANKS < 128 ? 128 / RANKS : 1)) \
    --per_device_eval_batch_size 128 \
    --learning_rate 2e-3 \
    --num_train_epochs 3 \
    --num_warmup_steps 20 \
    --zero_stage 3 \
    --dtype "$DTYPE" \
    --output_dir "$output" "$@"
