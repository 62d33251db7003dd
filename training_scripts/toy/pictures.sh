#!/usr/bin/env bash
# The colour in a picture, by PPO and by GRPO: pictures.sh OUT_DIR [--seed N] [--asked shape|number]
# Creates pictures of four colours and a model with a vision tower, both with random numbers. SFT learns random answers, so
# that a quarter is right; the reward model learns from pairs. PPO scores by that model and has a critic, which sees the
# pictures too. GRPO scores by the right answer. `swapped` is GRPO on the same pictures in a random order: what it can learn
# from texts alone. The end prints the share of right answers to pictures that no step has seen. With --asked, pictures show
# one of four shapes, or one to four dots, and the vision tower and the projector train in all steps. Of shapes, half of
# the answers of SFT are right on purpose, and the others random.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../ranks.sh"
usage="usage: pictures.sh OUT_DIR [--seed N] [--asked shape|number]"
out="${1:?$usage}"
shift
seed=1234
asked=colour
while [ $# -gt 0 ]; do
    case "$1 ${2:-}" in
        --seed\ ?*) seed="$2" ;;
        "--asked colour" | "--asked shape" | "--asked number") asked="$2" ;;
        *)
            echo "$usage" >&2
            exit 2
            ;;
    esac
    shift 2
done
per_rank() { echo $((RANKS < $1 ? $1 / RANKS : 1)); } # per_rank COUNT: COUNT divided by the number of ranks, at least 1
data="$out/toy/data"
export DSCHAT_PPO_NO_NEXT=1
common=(--dtype fp32 --seed "$seed")
sft_epochs=4
steps=60
task=(--asked "$asked")
if [ "$asked" != colour ]; then
    common+=(--train_vision_tower True --train_projector True)
    steps=120
fi
if [ "$asked" = shape ]; then
    sft_epochs=10
    task+=(--right_share 0.5)
fi

if [ ! -e "$out/toy/model/model.safetensors" ]; then
    python "$top/training_scripts/toy/pictures.py" "$out/toy" --seed "$seed" "${task[@]}"
fi

echo "note: SFT answers are random on purpose"
launch "$top/training/step1_sft/main.py" \
    --model_name_or_path "$out/toy/model" \
    --data_path "$data/sft.jsonl" \
    --data_split 1,0,0 \
    --eval_fraction 0 \
    --max_seq_len 32 \
    --per_device_train_batch_size "$(per_rank 64)" \
    --learning_rate 2e-3 \
    --num_train_epochs "$sft_epochs" \
    --num_warmup_steps 2 \
    --output_dir "$out/sft" "${common[@]}"

launch "$top/training/step2_reward/main.py" \
    --model_name_or_path "$out/sft" \
    --data_path "$data/pairs.jsonl" \
    --data_split 0,1,0 \
    --eval_fraction 0.125 \
    --max_seq_len 32 \
    --per_device_train_batch_size "$(per_rank 64)" \
    --learning_rate 2e-3 \
    --num_train_epochs 12 \
    --num_warmup_steps 4 \
    --output_dir "$out/reward" "${common[@]}"

step3() { # step3 NAME PROMPTS FLAGS...: train from the SFT model; the right answers score the evaluation
    local name="$1" prompts="$2"
    shift 2
    launch "$top/training/step3_ppo/main.py" \
        --actor_model_name_or_path "$out/sft" \
        --data_path "$data/$prompts.jsonl" \
        --data_split 0,0,1 \
        --eval_data_path "$data/heldout.jsonl" \
        --eval_reward_function exact_match \
        --eval_interval 10 \
        --save_best False \
        --reward_workers 1 \
        --max_prompt_seq_len 24 \
        --min_answer_seq_len 1 \
        --max_answer_seq_len 2 \
        --actor_learning_rate 2e-3 \
        --num_warmup_steps 2 \
        --actor_zero_stage 3 \
        --output_dir "$out/$name" "${common[@]}" "$@"
}
grpo=(
    --use_reward_model False
    --reward_function exact_match
    --advantage_estimator grpo
    --n_samples_per_prompt 8
    --per_device_generation_batch_size "$(per_rank 16)"
    --per_device_training_batch_size "$(per_rank 128)"
    --max_steps "$steps"
)
step3 ppo prompts \
    --critic_model_name_or_path "$out/reward" \
    --critic_zero_stage 3 \
    --critic_learning_rate 2e-3 \
    --per_device_generation_batch_size "$(per_rank 128)" \
    --per_device_training_batch_size "$(per_rank 64)" \
    --max_steps "$steps"
step3 grpo prompts "${grpo[@]}"
step3 swapped swapped "${grpo[@]}"

python - "$out" <<'PYTHON'
import json, sys
from pathlib import Path

for name in ("ppo", "grpo", "swapped"):
    lines = (Path(sys.argv[1]) / name / "metrics.jsonl").read_text().splitlines()
    shares = [json.loads(line)["eval/score"] for line in lines if "eval/score" in line]
    print(f"{name}: {shares[0]:.2f} of the held-out pictures before training, {shares[-1]:.2f} after")
PYTHON
