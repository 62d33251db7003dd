#!/usr/bin/env bash
# From nothing to a model trained by PPO: quickstart.sh [OUT_DIR]
# Makes .venv, a toy model and its data, and runs the three steps. Run again with the same OUT_DIR, it goes on at the
# first step that is not done.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
out="${1:-$here/../output/quickstart}"

bash "$here/setup_venv.sh"
source "$here/ranks.sh"
mkdir -p "$out"
out="$(cd "$out" && pwd)"
echo "quickstart: $RANKS rank(s), $OMP_NUM_THREADS thread(s) each, outputs in $out"

if [ ! -e "$out/toy/model/model.safetensors" ]; then
    python -m dschat_ppo.tools.toy "$out/toy"
fi

before="" # mark of the step before: what is older was made from other models
run_step() { # run_step NAME SCRIPT ARGS...: skipped if NAME is done, timed if not
    local name="$1" anew=() start=$SECONDS
    local result="$out/$name/result.json" settings="$out/$name/config.yaml" mark="$out/$name.seconds"
    shift
    if is_whole "$result" && [ -e "$mark" ] && [ ! "$mark" -ot "$before" ]; then
        echo "quickstart: step '$name' is done, skipped"
    else
        echo "quickstart: step '$name'"
        # a step that was interrupted goes on from its last checkpoint
        if [ -e "$settings" ] && [ "$settings" -ot "$before" ]; then anew=(--overwrite_output_dir --resume never); fi
        bash "$@" "${anew[@]}"
        if ! is_whole "$result"; then
            echo "quickstart: step '$name' was stopped; run again to go on"
            exit 1
        fi
        echo $((SECONDS - start)) >"$mark"
        sync "$mark" "$out" # before a later step says that it is newer
    fi
    before="$mark"
}

run_step sft "$here/toy/run_step1_sft.sh" "$out/toy" "$out/sft"
run_step reward "$here/toy/run_step2_reward.sh" "$out/toy" "$out/sft" "$out/reward"
run_step ppo "$here/toy/run_step3_ppo.sh" "$out/toy" "$out/sft" "$out/reward" "$out/ppo"
python -m dschat_ppo.tools.quickstart_report "$out"
