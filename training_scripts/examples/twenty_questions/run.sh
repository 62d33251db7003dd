#!/usr/bin/env bash
# Twenty questions, by GRPO: run.sh OUT_DIR [more flags of step 3]
# Creates the task and its SFT model (the next run reuses both), then trains with the environment `game.py`, which gives
# the reward: a right guess scores 1 less 0.05 for each question before it, a wrong one 0.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
sft_rows=32
source "$here/../episodes.sh"

launch "${step3[@]}" \
    --environment "$here/game.py:TwentyQuestions" \
    --n_samples_per_prompt 4 \
    --per_device_generation_batch_size "$(per_rank 48)" \
    --per_device_training_batch_size "$(per_rank 192)" \
    --actor_learning_rate 1e-3 \
    "${@:2}"
