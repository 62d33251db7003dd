# Sourced by the `run.sh` of examples with the toy judge. Creates in "$out", unless they exist: `toy` (model and data of
# the quickstart), `sft` (an SFT model of these, trained for longer), `judge_task` and `judge` (a judge that knows the
# true rule, by SFT on verdicts),
# `judge.json` (its accuracy, and what hostile answers get). `judge` is the specification for --judge.
export DTYPE="${DTYPE:-fp32}" # bf16 rounds away much of what a few steps change in models of 1 M parameters
source "$(dirname "${BASH_SOURCE[0]}")/../ranks.sh"
export DSCHAT_PPO_NO_NEXT=1 # the script runs the next step
per_rank() { echo $((RANKS < $1 ? $1 / RANKS : 1)); } # per_rank COUNT: COUNT divided by the number of ranks, at least 1
finished() { is_valid_json "$1/result.json" || exit 1; } # finished FOLDER: ends the script if the run was stopped
mkdir -p "$out"
out="$(cd "$out" && pwd)"
judge_example="$top/training_scripts/examples/judge"
judge="$out/judge?template=$judge_example/judge.jinja"

if [ ! -e "$out/toy/model/model.safetensors" ]; then
    python -m dschat_ppo.tools.toy "$out/toy"
fi

if ! is_valid_json "$out/sft/result.json"; then
    bash "$top/training_scripts/toy/run_step1_sft.sh" "$out/toy" "$out/sft" \
        --per_device_train_batch_size "$(per_rank 64)" \
        --learning_rate 2e-3 \
        --num_train_epochs 2 \
        --max_steps 250
    finished "$out/sft"
fi

if [ ! -e "$out/judge_task/model/model.safetensors" ]; then
    python "$judge_example/judge_task.py" "$out/judge_task"
fi

if ! is_valid_json "$out/judge/result.json"; then
    launch "$top/training/step1_sft/main.py" \
        --model_name_or_path "$out/judge_task/model" \
        --data_path "$out/judge_task/data/judge.jsonl" \
        --data_split 1,0,0 \
        --eval_data_path "$out/judge_task/data/judge_eval.jsonl" \
        --max_seq_len 256 \
        --per_device_train_batch_size "$(per_rank 64)" \
        --learning_rate 2e-3 \
        --num_warmup_steps 50 \
        --num_train_epochs 2 \
        --dtype "$DTYPE" \
        --output_dir "$out/judge"
    finished "$out/judge"
fi

if [ ! -e "$out/judge.json" ]; then
    python "$judge_example/check.py" "$out/judge" "$out/judge_task/data/judge_eval.jsonl" "$out/judge.json"
fi
