# Sourced by train.sh of single_gpu/, single_node/ and multi_node/ and by slurm/train.sbatch: one step for a real model.
#   train STEP OUTPUT_DIR [more flags of the step]      STEP: sft, reward, dpo, ppo, or grpo (on GSM8K)
# The scripts set `place` (single_gpu, single_node or multi_node), and `devices`, the ranks of a machine without a GPU
# (for --dry_run). From the environment:
#   MODEL         a folder or a hub name: the model that trains. In ppo and grpo, the SFT model
#   REWARD_MODEL  in ppo: the output of the step reward
#   DATA          default: Dahoas/rm-static, in grpo openai/gsm8k:main
#   SIZE          small (up to 1.5 B parameters) or large (7 B, 8 B); default: by the name of MODEL
#   RANKS         ranks of each machine; default: its GPUs
#   MACHINES      number of machines; default: 1
# Rows per optimizer step do not depend on the number of ranks, if it is a power of two. The planner (`python -m
# dschat_ppo.tools.plan`) computes that the settings fit. They have not run on a GPU.
given_ranks="${RANKS:-}"
source "$(dirname "${BASH_SOURCE[0]}")/ranks.sh"
source "$top/training_scripts/size_of.sh"
if [ "$place" != multi_node ]; then hostfile=""; fi # one machine, whatever /job/hostfile names
if [ "$gpus" -eq 0 ]; then RANKS="${given_ranks:-$devices}"; fi
MACHINES="${MACHINES:-1}"

rows() { # rows TOTAL MOST: sets micro, a power of two up to MOST, and count, a rank's micro-batches, for TOTAL rows
    local mine=$(($1 / (RANKS * MACHINES)))
    micro=1
    while [ $((2 * micro)) -le "$mine" ] && [ $((2 * micro)) -le "$2" ]; do micro=$((2 * micro)); done
    count=$((mine > micro ? mine / micro : 1))
}
one_model() { # one_model RATE LORA_RATE: sets settings, the flags of memory, LoRA and learning rates of steps 1 and 2
    settings=()
    if [ "$lora" ]; then settings+=(--lora_dim 64 --only_optimize_lora --lora_merge --lora_learning_rate "$2"); fi
    if [ ! "$lora" ] || [ "$step" = reward ]; then settings+=(--learning_rate "$1"); fi # with LoRA, that of the head
    if [ "$size" = large ]; then settings+=(--gradient_checkpointing); fi
    if [ "$place" != single_gpu ]; then settings+=(--zero_stage 3); fi
}
several_models() { # several_models CRITIC: the same for step 3; CRITIC is "critic", or "" without one
    settings=()
    if [ "$lora" ]; then
        settings+=(--only_optimize_lora --lora_merge --actor_lora_learning_rate 1e-5)
        if [ "$1" ]; then settings+=(--critic_lora_learning_rate 5e-5); fi
    else
        settings+=(--actor_learning_rate 1e-6)
    fi
    if [ "$1" ]; then settings+=(--critic_learning_rate 5e-6); fi # with LoRA, that of its head
    for role in actor $1; do
        if [ "$lora" ]; then settings+=("--${role}_lora_dim" 64); fi
        if [ "$size" = large ] || [ "$place" = single_gpu ]; then settings+=("--${role}_gradient_checkpointing"); fi
        if [ "$place" != single_gpu ]; then settings+=("--${role}_zero_stage" 3); fi
    done
}
sft() {
    one_model 1e-5 1e-4
    rows 64 $((size_is_small ? 8 : 4))
    launch "$top/training/step1_sft/main.py" --model_name_or_path "$MODEL" --data_path "$data" --max_seq_len 1024 \
        --per_device_train_batch_size "$micro" --gradient_accumulation_steps "$count" \
        --num_train_epochs 2 --warmup_ratio 0.03 "${settings[@]}" "$@"
}
pairs() { # pairs MAIN LEARNING_RATE LORA_LEARNING_RATE [flags]
    local main="$1"
    one_model "$2" "$3"
    shift 3
    rows 64 $((size_is_small ? 4 : 2))
    launch "$top/training/$main/main.py" --model_name_or_path "$MODEL" --data_path "$data" --max_seq_len 1024 \
        --per_device_train_batch_size "$micro" --gradient_accumulation_steps "$count" \
        --num_train_epochs 1 --warmup_ratio 0.03 "${settings[@]}" "$@"
}
reward() { pairs step2_reward 1e-5 1e-4 "$@"; }
dpo() { pairs step2_dpo 5e-7 5e-6 --beta 0.1 "$@"; }
ppo() {
    several_models critic
    rows 64 $((size_is_small ? 8 : 4))
    launch "$top/training/step3_ppo/main.py" --actor_model_name_or_path "$MODEL" \
        --critic_model_name_or_path "${REWARD_MODEL:?REWARD_MODEL: the output of the step reward}" --data_path "$data" \
        --max_prompt_seq_len 512 --max_answer_seq_len 512 \
        --per_device_generation_batch_size $((2 * micro * count)) --per_device_training_batch_size "$micro" \
        --gradient_accumulation_steps "$count" \
        --num_warmup_steps 10 --critic_warmup_rollouts 5 "${settings[@]}" "$@"
}
grpo() {
    several_models ""
    rows 256 $((size_is_small ? 16 : 8)) # two optimizer steps of 32 questions with 8 answers
    DATA="$data" source "$top/training_scripts/examples/gsm8k/task.sh" # how its rows are read, divided and scored
    launch "$top/training/step3_ppo/main.py" --actor_model_name_or_path "$MODEL" --data_path "$train_rows" \
        --data_split 0,0,1 --eval_data_path "$heldout_rows" --eval_interval 20 "${prompts[@]}" \
        --use_reward_model False "${rewards[@]}" --advantage_estimator grpo --n_samples_per_prompt 8 \
        --kl_loss_coef 0.001 --max_prompt_seq_len 256 --max_answer_seq_len 512 \
        --per_device_generation_batch_size $((micro * count / 4 > 0 ? micro * count / 4 : 1)) \
        --per_device_training_batch_size "$micro" \
        --gradient_accumulation_steps "$count" --num_warmup_steps 10 "${settings[@]}" "$@"
}
train() { # train STEP OUTPUT_DIR [flags]
    local usage="usage: MODEL=... $0 sft|reward|dpo|ppo|grpo OUTPUT_DIR [more flags of the step]" step="${1:-}"
    case "$step" in
        sft | reward | dpo | ppo) data="${DATA:-Dahoas/rm-static}" ;;
        grpo) data="${DATA:-openai/gsm8k:main}" ;;
        *) echo "$usage" >&2 && return 2 ;;
    esac
    : "${MODEL:?$usage}" "${2:?$usage}"
    size="${SIZE:-$(size_of "$MODEL")}"
    case "$size" in
        small) size_is_small=1 ;;
        large) size_is_small=0 ;;
        *) echo "error: SIZE $size: set it to small (up to 1.5 B parameters) or large" >&2 && return 2 ;;
    esac
    if [ "$place $size" = "single_gpu large" ]; then lora=1; else lora=""; fi
    "$step" --output_dir "$2" "${@:3}"
}
