#!/usr/bin/env bash
# Online DPO with a toy judge: run.sh OUT_DIR [ROUNDS [SEED]]      3 rounds, seed 1
# A round samples answers of the policy, lets the judge score them, writes the best and the worst answer to each prompt as
# a pair, and trains the policy on the pairs by DPO; the reference is the policy before the round. The first policy is an
# SFT model of the quickstart's data. The true rule only measures. Finished parts are kept, so more rounds continue.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
out="${1:?usage: run.sh OUT_DIR [ROUNDS [SEED]]}"
rounds="${2:-3}" seed="${3:-1}"
source "$here/../toy_judge.sh"
prompts=256 # of a round

evaluate() { # evaluate MODEL: the share of its answers to held-out prompts that follow the true rule, in MODEL/rule.json
    if ! is_valid_json "$1.rule.json"; then
        python -m dschat_ppo.tools.evaluate \
            --model "$1" \
            --data_path "$out/toy/data/heldout.jsonl" \
            --reward_function dschat_ppo.tools.toy:true_rule \
            --decoding sampled \
            --samples 4 \
            --max_tokens 48 \
            --dtype fp32 \
            --json "$1.rule.json"
    fi
}

policy="$out/sft"
evaluate "$policy"
runs="$out/online_dpo_$seed"
mkdir -p "$runs"
for ((round = 1; round <= rounds; round++)); do
    pairs="$runs/pairs_$round.jsonl" next="$runs/round_$round"
    first=$(((round - 1) * prompts % 1792)) # the next rows of the file, which has 2000
    asked="$out/toy/data/prompts.jsonl[train[$first:$((first + prompts))]]"
    if [ ! -e "$pairs" ]; then
        python -m dschat_ppo.tools.evaluate \
            --model "$policy" \
            --data_path "$asked" \
            --judge "$judge" \
            --decoding sampled \
            --samples 4 \
            --max_tokens 48 \
            --dtype "$DTYPE" \
            --seed "$((1000 * seed + round))" \
            --write_pairs "$pairs"
    fi
    if ! is_valid_json "$next/result.json"; then
        launch "$top/training/step2_dpo/main.py" \
            --model_name_or_path "$policy" \
            --data_path "$pairs" \
            --data_split 0,1,0 \
            --eval_fraction 0 \
            --max_seq_len 128 \
            --per_device_train_batch_size "$(per_rank 32)" \
            --beta 0.1 \
            --learning_rate 1e-4 \
            --num_warmup_steps 2 \
            --num_train_epochs 2 \
            --seed "$seed" \
            --dtype "$DTYPE" \
            --output_dir "$next"
        finished "$next"
    fi
    policy="$next"
    evaluate "$policy"
done
python "$here/report.py" "$out" "$seed" "$rounds"
