#!/usr/bin/env bash
# One step for a real model on one GPU: MODEL=... train.sh STEP OUTPUT_DIR [more flags of the step]
#   STEP  sft, reward, dpo, ppo, or grpo (on GSM8K). MODEL, REWARD_MODEL, DATA, SIZE, RANKS: see ../recipes.sh
# Hardware: one A100 with 80 GiB, 128 GiB of host memory. Not run on a GPU yet.
# Peak of a GPU in GiB, by the planner, which leaves 8 free; in ppo all models are of the same size, and 72 is as many
# running rows as fit:
#                      sft  reward     dpo     ppo    grpo
#   Qwen2.5-0.5B        22      21      22      23      17
#   Llama-3.2-1B        38      37      38      54      40
#   opt-1.3b            37      36      37      72      72
#   Qwen2.5-1.5B        53      52      53      66      44
#   Qwen2.5-7B          22      20      22      71      56
#   Llama-3.1-8B        23      21      23      72      72
set -euo pipefail
place=single_gpu devices=1
export RANKS="${RANKS:-1}"
source "$(dirname "${BASH_SOURCE[0]}")/../recipes.sh"
train "$@"
