#!/usr/bin/env bash
# SFT on worked solutions: MODEL=... DATA=... run_sft.sh OUTPUT_DIR [more flags of step 1]
# MODEL  a pretrained causal language model, a folder or a hub name
# DATA   see task.sh. Rows with more tokens than --max_seq_len are dropped.
set -euo pipefail
usage="usage: MODEL=... DATA=... run_sft.sh OUTPUT_DIR [more flags]"
source "$(dirname "${BASH_SOURCE[0]}")/task.sh"
model="${MODEL:?$usage}" output="${1:?$usage}"
shift

launch "$top/training/step1_sft/main.py" \
    --model_name_or_path "$model" \
    --data_path "$train_rows" \
    --data_split 1,0,0 \
    --eval_data_path "$heldout_rows" \
    "${prompts[@]}" \
    --max_seq_len 512 \
    --truncation drop \
    --per_device_train_batch_size 8 \
    --gradient_accumulation_steps "$(per_rank 4)" \
    --learning_rate 1e-5 \
    --num_train_epochs 2 \
    --num_warmup_steps 10 \
    --zero_stage 3 \
    --dtype "$DTYPE" \
    --output_dir "$output" "$@"
