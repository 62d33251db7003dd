#!/usr/bin/env bash
# Sums with a calculator, by GRPO: run.sh OUT_DIR [more flags of step 3]
# Creates the task and its SFT model (the next run reuses both), then trains with the tool. An episode that ends with the
# right sum scores 1, any other 0. Without the tool: run.sh OUT_DIR --tools --output_dir OUT_DIR/without_tool
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$here/../episodes.sh"

launch "${step3[@]}" \
    --tools "$here/calculator.py:calculate" \
    --reward_function "$here/calculator.py:right_sum" \
    "${@:2}"
