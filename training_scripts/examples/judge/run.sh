#!/usr/bin/env bash
# GRPO with a toy judge, and with a learned reward: run.sh OUT_DIR [SEED ...]      seeds: 1 2 3
# An SFT model of the quickstart's data answers. The judge is a language model that knows the true rule, trained here by
# step 1; the learned reward is trained by step 2. The true rule scores the evaluations. Finished runs are kept.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
out="${1:?usage: run.sh OUT_DIR [SEED ...]}"
source "$here/../toy_judge.sh"
seeds=("${@:2}")
if [ "${#seeds[@]}" -eq 0 ]; then seeds=(1 2 3); fi

if ! is_valid_json "$out/reward/result.json"; then
    bash "$top/training_scripts/toy/run_step2_reward.sh" "$out/toy" "$out/sft" "$out/reward" --max_steps 63
    finished "$out/reward"
fi

grpo() { # grpo FOLDER SEED FLAGS...: GRPO with the reward that the flags name, unless the run is finished
    if is_valid_json "$1/result.json"; then return; fi
    launch "$top/training/step3_ppo/main.py" \
        --actor_model_name_or_path "$out/sft" \
        --data_path "$out/toy/data/prompts.jsonl" \
        --data_split 0,0,1 \
        --eval_data_path "$out/toy/data/heldout.jsonl" \
        --eval_reward_function dschat_ppo.tools.toy:true_rule \
        --eval_interval 2 \
        --eval_samples 4 \
        --save_best False \
        --reward_workers 1 \
        --advantage_estimator grpo \
        --n_samples_per_prompt 8 \
        --kl_coef 0.05 \
        --max_prompt_seq_len 64 \
        --max_answer_seq_len 48 \
        --per_device_generation_batch_size "$(per_rank 16)" \
        --per_device_training_batch_size "$(per_rank 64)" \
        --actor_learning_rate 2e-4 \
        --num_warmup_steps 2 \
        --max_steps 16 \
        --dtype "$DTYPE" \
        --seed "$2" \
        --output_dir "$1" "${@:3}"
    finished "$1"
}

for seed in "${seeds[@]}"; do
    grpo "$out/grpo_judge_$seed" "$seed" --use_reward_model False --judge "$judge"
    grpo "$out/grpo_reward_$seed" "$seed" --reward_model_name_or_path "$out/reward"
done
python "$here/report.py" "$out" "${seeds[@]}"
