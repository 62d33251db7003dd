#!/usr/bin/env bash
# One step for a real model on several machines: HOSTFILE=hosts MODEL=... train.sh STEP OUTPUT_DIR [more flags]
#   HOSTFILE  one line "NAME slots=GPUS" for each machine, all with as many GPUs; default: /job/hostfile
#   STEP      sft, reward, dpo, ppo, or grpo (on GSM8K). MODEL, REWARD_MODEL, DATA, SIZE: see ../recipes.sh
# Run it on one of the machines. It starts all ranks by `deepspeed --hostfile`, through ssh. Models, data and OUTPUT_DIR
# are on a folder that the machines share.
# Hardware: 2 machines with 8 x A100 with 80 GiB and 1 TiB of host memory each. Not run on a GPU yet.
# Peak of a GPU in GiB, by the planner; in ppo all models are of the same size:
#                      sft  reward     dpo     ppo    grpo
#   Qwen2.5-0.5B         9      14      15      13      22
#   Llama-3.2-1B        13      19      20      15      27
#   opt-1.3b            11      16      17      13      23
#   Qwen2.5-1.5B        18      28      30      20      42
#   Qwen2.5-7B          15      13      15      35      27
#   Llama-3.1-8B        16      14      16      38      30
set -euo pipefail
place=multi_node devices=8
if [ -e "${HOSTFILE:=/job/hostfile}" ]; then
    all_slots="$(sed -nE 's/^[[:space:]]*[^#[:space:]]+[[:space:]]+slots=([0-9]+).*/\1/p' "$HOSTFILE")" # as DeepSpeed reads it
    slots="$(sort -u <<<"$all_slots")"
    if [ "$(wc -w <<<"$slots")" != 1 ]; then
        echo "error: HOSTFILE $HOSTFILE: give each machine a line 'NAME slots=N', with the same N" >&2 && exit 2
    fi
    export RANKS="$slots"
    MACHINES="$(wc -l <<<"$all_slots")"
elif [[ " $* " != *" --dry_run "* ]]; then
    echo "error: HOSTFILE $HOSTFILE: no such file; it must list the machines" >&2 && exit 2
fi
MACHINES="${MACHINES:-2}"
source "$(dirname "${BASH_SOURCE[0]}")/../recipes.sh"
train "$@"
