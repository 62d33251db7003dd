#!/usr/bin/env bash
# Train a toy model with SFT, a reward model and PPO: quickstart.sh [OUT_DIR]
# Creates .venv, the model and its data, and runs the three steps. Run it again with the same OUT_DIR to continue with
# the first unfinished step.
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

before="" # time stamp of the previous step; outputs that are older come from other models
run_step() { # run_step NAME SCRIPT ARGS...: run and time a step, unless it is done
    local name="$1" fresh=() start=$SECONDS
    local result="$out/$name/result.json" settings="$out/$name/config.yaml" mark="$out/$name.seconds"
    shift
    if is_whole "$result" && [ -e "$mark" ] && [ ! "$mark" -ot "$before" ]; then
        echo "quickstart: step '$name' is done, skipped"
    else
        echo "quickstart: step '$name'"
        # an interrupted step resumes from its last checkpoint, unless the previous step has run since
        if [ -e "$settings" ] && [ "$settings" -ot "$before" ]; then fresh=(--overwrite_output_dir --resume never); fi
        bash "$@" "${fresh[@]}"
        if ! is_whole "$result"; then
            echo "quickstart: step '$name' was stopped; run again to continue"
            exit 1
        fi
        echo $((SECONDS - start)) >"$mark"
        sync "$mark" "$out" # before a later step compares its age
    fi
    before="$mark"
}

run_step sft "$here/toy/run_step1_sft.sh" "$out/toy" "$out/sft"
run_step reward "$here/toy/run_step2_reward.sh" "$out/toy" "$out/sft" "$out/reward"
run_step ppo "$here/toy/run_step3_ppo.sh" "$out/toy" "$out/sft" "$out/reward" "$out/ppo"
python -m dschat_ppo.tools.quickstart_report "$out"
