#!/usr/bin/env bash
# Compare models on the held-out rows: DATA=... run_evaluate.sh OUTPUT_DIR --model A B [more flags of tools.evaluate]
# Prints the answers to four questions, and writes evaluation.json. For GSM8K's test rows, add --data_path 'openai/gsm8k:main[test]'.
set -euo pipefail
usage="usage: DATA=... run_evaluate.sh OUTPUT_DIR --model A B [more flags]"
source "$(dirname "${BASH_SOURCE[0]}")/task.sh"
output="${1:?$usage}"
shift
mkdir -p "$output"

python -m dschat_ppo.tools.evaluate \
    --data_path "$heldout_rows" \
    "${prompts[@]}" \
    "${rewards[@]}" \
    --truncation drop \
    --samples 4 \
    --max_tokens 256 \
    --show 4 \
    --json "$output/evaluation.json" "$@"
