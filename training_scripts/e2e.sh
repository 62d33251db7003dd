#!/usr/bin/env bash
# All three steps for your own models and data, with the options of DeepSpeed-Chat's e2e_rlhf.py:
#   e2e.sh --actor-model M --reward-model R [--data-path DATA ...] [--deployment-type single_gpu|single_node|multi_node]
#          [--output-dir DIR] [--step 1 2 3] [--dry-run]
# M: the pretrained model of SFT, whose result is the actor. R: the pretrained model of the reward model, with the same
# tokenizer. Models and data are folders or hub names; the default data set is Dahoas/rm-static. The outputs are in
# DIR/sft, DIR/reward and DIR/ppo. Run the same command again after an interruption: finished steps end at once and the
# others resume. ACTOR_SIZE and REWARD_SIZE (small, large) override the sizes that the names of the models show.
# The settings are those of DEPLOYMENT/train.sh and recipes.sh. Not run on a GPU yet.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
usage="usage: e2e.sh --actor-model M --reward-model R [--data-path DATA ...] [--deployment-type single_gpu|single_node|multi_node] [--output-dir DIR] [--step 1 2 3] [--dry-run]"
fail() { echo "error: $1 ($usage)" >&2 && exit 2; }

actor="" reward="" data=() place=single_gpu out=output steps=() dry=()
while [ $# -gt 0 ]; do
    flag="${1//_/-}" values=()
    shift
    while [ $# -gt 0 ] && [[ "$1" != --* ]]; do values+=("$1") && shift; done
    case "$flag" in
        --dry-run) dry=(--dry_run) && continue ;;
        --actor-model | --reward-model | --data-path | --deployment-type | --output-dir | --step) ;;
        *) fail "unknown flag $flag" ;;
    esac
    [ "${#values[@]}" -gt 0 ] || fail "$flag needs a value"
    case "$flag" in
        --actor-model) actor="${values[0]}" ;;
        --reward-model) reward="${values[0]}" ;;
        --data-path) data=("${values[@]}") ;;
        --deployment-type) place="${values[0]}" ;;
        --output-dir) out="${values[0]}" ;;
        --step) steps=("${values[@]}") ;;
    esac
done
[ "$actor" ] || fail "--actor-model is required"
[ "$reward" ] || fail "--reward-model is required"
case "$place" in single_gpu | single_node | multi_node) ;; *) fail "--deployment-type $place is not known" ;; esac
paths=() && if [ "${#data[@]}" -gt 0 ]; then paths=(--data_path "${data[@]}"); fi

# settings_of MODEL: a folder with a local model's settings and tokenizer, without weights but those of an adapter; a
# hub name as it is
settings_of() {
    [ -d "$1" ] || { echo "$1" && return; }
    local copy
    copy="$(mktemp -d "$scratch/XXXXXX")/$(basename "$1")" # two models may have the same name
    mkdir "$copy"
    find "$1" -maxdepth 1 -type f \( -name '*.json' -o -name '*.jinja' -o -name '*.model' -o -name '*.txt' -o -name 'adapter_model.*' \) \
        ! -name '*.index.json' -exec cp {} "$copy" \;
    echo "$copy"
}
run_step() { # run_step STEP FOLDER: with MODEL and SIZE in the environment
    echo "e2e: $2"
    bash "$here/$place/train.sh" "$1" "$out/$2" "${paths[@]}" "${dry[@]}"
    if [ "${#dry[@]}" -eq 0 ] && ! python3 -m json.tool "$out/$2/result.json" >/dev/null 2>&1; then
        echo "e2e: $2 was stopped; run the same command again to resume" && exit 1
    fi
}

[ "${#steps[@]}" -gt 0 ] || steps=(1 2 3)
actor_size="${ACTOR_SIZE:-}" reward_size="${REWARD_SIZE:-}" # "": by the name of the model
source "$here/size_of.sh"
actor_size="${actor_size:-$(size_of "$actor")}" # not on one line with the next: its failure would go unnoticed
reward_size="${reward_size:-$(size_of "$reward")}"
if [ "$actor_size$reward_size" = smallsmall ]; then both=small; else both=large; fi
sft_model="$out/sft" reward_model="$out/reward"
if [ "${#dry[@]}" -gt 0 ]; then # checks step 3 with the models from before training: the others may not exist
    scratch="$(mktemp -d)"
    trap 'rm -rf "$scratch"' EXIT
    sft_model="$(settings_of "$actor")" reward_model="$(settings_of "$reward")"
fi
for step in "${steps[@]}"; do
    if [ "$step" = "${steps[-1]}" ]; then unset DSCHAT_PPO_NO_NEXT; else export DSCHAT_PPO_NO_NEXT=1; fi # see start_and_end.py
    case "$step" in
        1) MODEL="$actor" SIZE="$actor_size" run_step sft sft ;;
        2) MODEL="$reward" SIZE="$reward_size" run_step reward reward ;;
        3) MODEL="$sft_model" REWARD_MODEL="$reward_model" SIZE="$both" run_step ppo ppo ;;
        *) fail "--step $step is not 1, 2 or 3" ;;
    esac
done
