#!/usr/bin/env bash
# One step for a real model on the GPUs of one machine: MODEL=... train.sh STEP OUTPUT_DIR [more flags of the step]
#   STEP  sft, reward, dpo, ppo, or grpo (on GSM8K). MODEL, REWARD_MODEL, DATA, SIZE, RANKS: see ../recipes.sh
# Hardware: 8 x A100 with 80 GiB, 1 TiB of host memory. Not run on a GPU yet.
# Peak of a GPU in GiB, by the planner; in ppo all models are of the same size:
#                      sft  reward     dpo     ppo    grpo
#   Qwen2.5-0.5B        16      14      16      20      22
#   Llama-3.2-1B        22      20      22      25      29
#   opt-1.3b            18      17      18      22      24
#   Qwen2.5-1.5B        31      30      31      36      44
#   Qwen2.5-7B          24      21      24      54      38
#   Llama-3.1-8B        25      22      25      58      43
set -euo pipefail
place=single_node devices=8
source "$(dirname "${BASH_SOURCE[0]}")/../recipes.sh"
train "$@"
