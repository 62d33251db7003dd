# Sourced by the `run.sh` of examples with episodes, whose folder is `here` and whose words are OUT_DIR and flags of step 3.
# Creates "$out/task" (by task.py of the example) and "$out/sft", its SFT model, unless they exist. `step3` is the rest of
# the command, without what the model meets and what rewards it. `sft_rows`: rows of a batch of SFT (64).
# SFT_FLAGS in the environment: more flags of SFT.
source "$here/../../ranks.sh"
out="${1:?usage: run.sh OUT_DIR [more flags of step 3]}"
per_rank() { echo $((RANKS < $1 ? $1 / RANKS : 1)); } # per_rank COUNT: COUNT divided by the number of ranks, at least 1

if [ ! -e "$out/task/model/model.safetensors" ]; then
    python "$here/task.py" "$out/task"
fi

if ! is_valid_json "$out/sft/result.json"; then
    DSCHAT_PPO_NO_NEXT=1 launch "$top/training/step1_sft/main.py" \
        --model_name_or_path "$out/task/model" \
        --data_path "$out/task/data/sft.jsonl" \
        --data_split 1,0,0 \
        --eval_fraction 0.01 \
        --max_seq_len 192 \
        --per_device_train_batch_size "$(per_rank "${sft_rows:-64}")" \
        --learning_rate 2e-3 \
        --num_train_epochs 3 \
        --num_warmup_steps 20 \
        --dtype "$DTYPE" \
        --output_dir "$out/sft" ${SFT_FLAGS:-}
    is_valid_json "$out/sft/result.json" || exit 1 # it was stopped
fi

step3=("$top/training/step3_ppo/main.py"
    --actor_model_name_or_path "$out/sft"
    --data_path "$out/task/data/prompts.jsonl"
    --data_split 0,0,1
    --eval_data_path "$out/task/data/heldout.jsonl"
    --eval_max_prompts 64
    --eval_interval 16
    --use_reward_model False
    --advantage_estimator grpo
    --n_samples_per_prompt 8
    --kl_coef 0
    --max_prompt_seq_len 48
    --max_answer_seq_len 128
    --per_device_generation_batch_size "$(per_rank 8)"
    --per_device_training_batch_size "$(per_rank 64)"
    --actor_learning_rate 5e-4
    --num_warmup_steps 2
    --max_steps 32
    --dtype "$DTYPE"
    --output_dir "$out/grpo")
